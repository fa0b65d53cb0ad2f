"""Schedules: the five fields of cron."""

import pytest

from tidewater_core.crd.cron import check_schedule


@pytest.mark.parametrize(
    "text", ["* * * * *", "*/30 * * * *", "0 3 * * 1-5", "5,35 0-6/2 1 12 7", "59 23 31 12 0"]
)
def test_good(text: str) -> None:
    assert check_schedule(text) == text


@pytest.mark.parametrize(
    "text",
    ["", "* * * *", "* * * * * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "* * * 13 *",
     "* * * * 8", "*/0 * * * *", "5-1 * * * *", "a * * * *", "1, * * * *", "@daily"],
)  # fmt: skip
def test_bad(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a"):
        check_schedule(text)
