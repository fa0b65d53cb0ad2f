"""What is left of topics on a disk: what may go, and what must stay (G7)."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import pyarrow as pa
import pytest

from tidewater_worker.log.frame import encode_header
from tidewater_worker.log.recover import recover
from tidewater_worker.volume import (
    DRAINED_FILE,
    Drained,
    clear_earlier_life,
    is_disposable,
    sweep,
    sweep_topic,
    write_drained,
)

_T = TypeVar("_T")

OLD, NEW = UUID(int=1), UUID(int=2)
SCHEMA = pa.schema([("value", pa.binary())])


def log_at(directory: Path, uuid: UUID | None = OLD, *, drained: bool = False) -> Path:
    directory.mkdir(parents=True)
    (directory / "lock").touch()
    (directory / f"{7:020d}.producers").write_bytes(b"who sent what")
    if uuid is not None:
        (directory / f"{7:020d}.wal").write_bytes(encode_header(uuid, 0, 7, SCHEMA))
    if drained:
        write_drained(directory, Drained(7, 1, 0, str(uuid or OLD)))
    return directory


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize(
    ("uuid", "drained", "is_first", "cleared"),
    [
        (OLD, True, True, True),
        (OLD, True, False, True),  # another volume had the partition first in this life
        (OLD, False, True, False),  # not drained: refused by opening, and kept
        (NEW, False, True, False),  # the registry was begun anew: the log is ours
        (NEW, True, False, False),
        (None, True, False, True),  # an empty log, drained in another life
        (None, False, True, True),
        (None, False, False, False),
    ],
)
def test_an_earlier_life_is_cleared_if_it_is_drained(
    tmp_path: Path, uuid: UUID | None, drained: bool, is_first: bool, cleared: bool
) -> None:
    directory = log_at(tmp_path / "log", uuid, drained=drained)
    before = names(directory)
    clear_earlier_life(directory, NEW, is_first=is_first)
    assert names(directory) == ({"lock"} if cleared else before)


def test_sweeping_keeps_what_is_known_and_what_is_not_drained(tmp_path: Path) -> None:
    log_at(tmp_path / "shop/known/0")
    log_at(tmp_path / "shop/gone/0", drained=True)
    log_at(tmp_path / "shop/gone/1", None)
    log_at(tmp_path / "shop/half/0", drained=True)
    log_at(tmp_path / "shop/half/1")
    log_at(tmp_path / "bank/gone/0", drained=True)
    (tmp_path / "volume-id").write_text("v")
    left = sweep(tmp_path, {"shop/known"})
    assert [(one.topic, one.partition, one.segments) for one in left] == [("shop/half", 1, 1)]
    assert names(tmp_path) == {"shop", "volume-id"}
    assert names(tmp_path / "shop") == {"known", "half"}
    assert names(tmp_path / "shop/half") == {"1"}
    assert sweep(tmp_path, {"shop/known"}) == left, "twice changes nothing"


def test_a_torn_tail_that_was_kept_is_evidence(tmp_path: Path) -> None:
    directory = log_at(tmp_path / "log", None)
    assert is_disposable(directory)
    (directory / f"{7:020d}.wal.broken").touch()
    assert not is_disposable(directory)


@pytest.mark.parametrize("is_first", [True, False])
def test_evidence_of_an_earlier_life_outlives_a_topic_of_the_same_name(
    tmp_path: Path, is_first: bool
) -> None:
    directory = log_at(tmp_path / "shop/gone/0", None, drained=not is_first)
    evidence = {f"{7:020d}.wal.broken", f"{7:020d}.wal.broken.1"}
    for name in evidence:
        (directory / name).write_bytes(b"messages that were set aside")
    clear_earlier_life(directory, NEW, is_first=is_first)
    kept = {f"{name}.earlier" for name in evidence}
    assert names(directory) == {"lock", *kept}, "G7"
    assert recover(directory, NEW, 0).next_offset == 0, "and is in nobody's way"
    # Nor does it go with the topic of the same name, whose own life ends as it should.
    write_drained(directory, Drained(0, 1, topic_uuid=str(NEW)))
    (left,) = sweep(tmp_path, set())
    assert (left.topic, left.partition) == ("shop/gone", 0)
    # A third life keeps what the second one left, too.
    (directory / min(evidence)).touch()
    clear_earlier_life(directory, OLD, is_first=True)
    assert len([name for name in names(directory) if name.endswith(".earlier")]) == 3
    assert all((directory / name).read_bytes() for name in kept), "nothing was written over"


class Killed(BaseException):
    """The process is gone."""


def _ordered(names: Iterable[_T], name_of: Callable[[_T], str], note_first: bool) -> list[_T]:
    """Put the note that a log is drained first, or last: a directory has any order."""
    return sorted(names, key=lambda each: (name_of(each) == DRAINED_FILE) != note_first)


def _killed_at(monkeypatch: pytest.MonkeyPatch, step: int, work: Callable[[], object]) -> bool:
    """Do something and be killed before the so-manieth file goes; tell whether it came to that."""
    left = step
    real = os.unlink

    def unlink(*args: Any, **named: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        real(*args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        patch.setattr(Path, "unlink", lambda path, **_: unlink(path))
        try:
            work()
        except Killed:
            return True
    return False


@pytest.mark.parametrize("note_first", [True, False])
@pytest.mark.parametrize("swept", [True, False])
def test_who_is_killed_while_a_drained_log_goes_leaves_none_that_looks_undrained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swept: bool, note_first: bool
) -> None:
    """G7: it would be held as evidence for ever, or refuse the topic's next life."""
    real, scan = os.listdir, os.scandir
    monkeypatch.setattr(os, "listdir", lambda path: _ordered(real(path), str, note_first))

    @contextmanager
    def scandir(path: Any) -> Iterator[Iterator[os.DirEntry[str]]]:
        with scan(path) as entries:
            yield iter(_ordered(entries, lambda entry: entry.name, note_first))

    monkeypatch.setattr(os, "scandir", scandir)
    for step in range(20):
        topic = tmp_path / str(step) / "orders"
        directory = log_at(topic / "0", drained=True)
        for more in (10, 20):
            (directory / f"{more:020d}.wal").write_bytes(encode_header(OLD, 0, more, SCHEMA))

        def work(topic: Path = topic, directory: Path = directory) -> None:
            if not directory.is_dir():
                return
            if swept:
                assert sweep_topic("shop/orders", topic) == []
            else:
                clear_earlier_life(directory, NEW, is_first=True)

        if not _killed_at(monkeypatch, step, work):
            break
        work()
        assert not list(topic.glob("**/*.wal"))
    assert step > 3
