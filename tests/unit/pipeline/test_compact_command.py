"""`tidewater compact`: the words it passes on, and what it says where there is no PySpark."""

import argparse
from pathlib import Path

import pytest

from tidewater_core.errors import Invalid, Retryable
from tidewater_pipeline.cli import compact
from tidewater_pipeline.cli.arguments import build_parser
from tidewater_pipeline.cli.options import compact_options


def words(*given: str) -> list[str]:
    parser = argparse.ArgumentParser()
    compact.add_arguments(parser)
    return compact.command_words(parser.parse_intermixed_args(list(given)))


def test_the_default_is_the_data_of_make_run() -> None:
    args = build_parser().parse_args(words("orders", "shop/web"))
    assert args.jobs == "compact"
    assert args.topic == ["default/orders", "shop/web"]
    assert args.data == Path("data")


def test_everything_given_is_passed_on() -> None:
    given = ("a/b", "--data", "d", "--open", "--then", "expire,audit", "--target-size", "8Mi")
    args = build_parser().parse_args(
        words(*given, "--conf", "a=b", "--lateness", "5m", "--budget", "7m")
    )
    assert args.jobs == "compact,expire,audit"
    assert args.data == Path("d")
    assert args.conf == ["a=b"]
    chosen = compact_options(args)
    assert chosen.include_open
    assert str(chosen.target) == "8Mi"
    assert (str(chosen.lateness), str(chosen.budget)) == ("5m", "7m")


def test_another_catalog_needs_no_data() -> None:
    args = build_parser().parse_args(words("a/b", "--catalog", "uri=http://c"))
    assert args.data is None


def test_python_with_spark_is_found_or_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert compact.find_python({compact.PYTHON_VARIABLE: "/x/python"}, tmp_path) == "/x/python"
    assert compact.find_python({}, tmp_path / "venv") is None
    python = tmp_path / ".venv-pipeline" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert compact.find_python({}, tmp_path / "venv") is None, "it was not finished"
    (tmp_path / ".venv-pipeline" / ".ready").touch()
    assert compact.find_python({}, tmp_path / "venv") == str(python)


def test_outside_a_checkout_it_says_how_to_get_spark(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="make setup-pipeline"):
        compact.make_environment(tmp_path)


def test_in_a_checkout_the_environment_is_made(tmp_path: Path) -> None:
    (tmp_path / "mk").mkdir()
    (tmp_path / "mk" / "pipeline.mk").touch()
    (tmp_path / "Makefile").write_text("setup-pipeline:\n\ttouch made\n")
    compact.make_environment(tmp_path)
    assert (tmp_path / "made").exists()
    (tmp_path / "Makefile").write_text("setup-pipeline:\n\tfalse\n")
    with pytest.raises(Retryable, match="failed"):
        compact.make_environment(tmp_path)
