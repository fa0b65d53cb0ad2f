"""One job at a time on a table, and nobody waits for ever."""

import multiprocessing
import os
import signal
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tidewater_core.errors import Overloaded, TidewaterError
from tidewater_pipeline.places import StoreSettings
from tidewater_pipeline.report import Progress
from tidewater_pipeline.turns import turn

TOPIC = "shop/orders"


@pytest.fixture
def store(tmp_path: Path) -> StoreSettings:
    return StoreSettings(place=str(tmp_path / "coordination.db"))


def hold(store: StoreSettings, has_it: Any) -> None:
    with turn(store, TOPIC, "compact", Progress()):
        has_it.set()
        time.sleep(60)


@pytest.fixture
def holder(store: StoreSettings) -> Any:
    """Start another process that has the table."""
    context = multiprocessing.get_context("spawn")
    has_it = context.Event()
    process = context.Process(target=hold, args=(store, has_it))
    process.start()
    assert has_it.wait(30)
    yield process
    process.kill()
    process.join()


def test_one_after_the_other(store: StoreSettings) -> None:
    for _ in range(2):
        with turn(store, TOPIC, "compact", Progress()):
            pass
    with pytest.raises(ZeroDivisionError), turn(store, TOPIC, "compact", Progress()):
        raise ZeroDivisionError
    with (
        turn(store, TOPIC, "expire", Progress(), wait_s=0),
        turn(store, "shop/other", "expire", Progress(), wait_s=0),
    ):
        pass


def test_a_run_of_an_import_has_a_lease_of_its_own(store: StoreSettings) -> None:
    """Two of one id at once read different snapshots, and the topic got both."""

    def run(lease: str) -> AbstractContextManager[None]:
        return turn(store, TOPIC, "import", Progress(), wait_s=0.2, lease=lease)

    with (
        turn(store, TOPIC, "compact", Progress()),
        run("import/shop/orders/1"),
        run("import/shop/orders/2"),
        pytest.raises(Overloaded, match="at work on import/shop/orders/1"),
        run("import/shop/orders/1"),
    ):
        pytest.fail("two at once")


def test_a_busy_table_is_told(store: StoreSettings, holder: Any) -> None:
    with (
        pytest.raises(Overloaded, match=f"compact-.*-{holder.pid}-.* is at work on the table"),
        turn(store, TOPIC, "expire", Progress(), wait_s=0.2),
    ):
        pytest.fail("two at once")


def test_two_of_one_process_are_two(store: StoreSettings) -> None:
    with (
        turn(store, TOPIC, "compact", Progress()),
        pytest.raises(Overloaded, match="TableBusy"),
        turn(store, TOPIC, "compact", Progress(), wait_s=0.2),
    ):
        pytest.fail("two at once")


def test_one_that_was_killed_is_waited_for(store: StoreSettings, holder: Any) -> None:
    os.kill(holder.pid, signal.SIGKILL)
    with turn(store, TOPIC, "expire", Progress()):
        pass


def test_without_a_store_there_is_nobody_to_ask() -> None:
    with turn(None, TOPIC, "compact", Progress()), turn(None, TOPIC, "compact", Progress()):
        pass


def test_a_store_that_cannot_be_had_is_an_error() -> None:
    with (
        pytest.raises(TidewaterError),
        turn(StoreSettings(place="http://127.0.0.1:1"), TOPIC, "compact", Progress()),
    ):
        pytest.fail("no store, no turn")
    assert not [each for each in threading.enumerate() if each.name.startswith("turn-")]
