"""`tidewater log inspect|verify`: says what recovery would say, by output and exit status (G7)."""

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

from tidewater_core.errors import Corrupt, NotFound
from tidewater_testing import logs, wal
from tidewater_worker.cli import log as command
from tidewater_worker.log.durable import forget_durable
from tidewater_worker.log.frame import encode_header

BATCHES = [[b"%d-" % i + b"x" * 100] for i in range(12)]
Break = Callable[[bytearray, wal.Segment], None]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "shop" / "orders" / "3"
    logs.append(made, BATCHES, segment_bytes=4_000)
    assert len(wal.read_log(made)) > 2
    return made


def run(action: str, directory: Path) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([action, str(directory)]))


def zeroed_head(data: bytearray, segment: wal.Segment) -> None:
    data[segment.frames[0].at : segment.frames[0].at + 16] = bytes(16)


def zeroed_frame(data: bytearray, segment: wal.Segment) -> None:
    frame = segment.frames[0]
    data[frame.at : frame.end] = bytes(frame.end - frame.at)


def flipped_bit(data: bytearray, segment: wal.Segment) -> None:
    data[segment.frames[0].at + 40] ^= 1


def short_header(data: bytearray, segment: wal.Segment) -> None:
    data[100 : segment.header.size] = bytes(segment.header.size - 100)


def cut_header(data: bytearray, _segment: wal.Segment) -> None:
    data[40:44] = (2**20).to_bytes(4, "little")  # a schema that is longer than the file


def damaged(directory: Path, which: int, how: Break) -> None:
    segment = wal.read_log(directory)[which]
    data = bytearray(segment.path.read_bytes())
    how(data, segment)
    segment.path.write_bytes(data)


def test_a_whole_log(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = directory.parents[1]
    assert run("verify", root) == 0
    assert f"{directory}: ok, offsets 0 to 12, 12 frames" in capsys.readouterr().out
    assert run("inspect", root) == 0
    shown = capsys.readouterr().out
    for segment in wal.read_log(directory):
        assert f"{segment.header.base_offset:>20} {segment.end_offset:>20}" in shown


@pytest.mark.parametrize("how", [zeroed_head, zeroed_frame, flipped_bit, short_header, cut_header])
def test_what_recovery_refuses_is_damage(
    directory: Path, capsys: pytest.CaptureFixture[str], how: Break
) -> None:
    logs.append(directory, [[b"more"], [b"and more"]])
    damaged(directory, -1, how)
    assert run("verify", directory) == 1, "G7 Nothing is silently skipped"
    assert "DAMAGED" in capsys.readouterr().out
    assert run("inspect", directory) == 0
    assert "DAMAGED" in capsys.readouterr().out
    with pytest.raises(Corrupt):
        logs.reopen(directory)


@pytest.mark.parametrize("how", [zeroed_head, flipped_bit, short_header])
def test_damage_in_a_sealed_segment(
    directory: Path, capsys: pytest.CaptureFixture[str], how: Break
) -> None:
    damaged(directory, 0, how)
    assert run("verify", directory) == 1
    assert "DAMAGED" in capsys.readouterr().out


def test_a_torn_tail_is_no_damage(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = wal.read_log(directory)[-1]
    last.path.write_bytes(last.path.read_bytes()[:-20])
    assert run("verify", directory) == 1, "it was closed: all of it was fsynced"
    assert "messages below offset 12 were fsynced" in capsys.readouterr().out
    forget_durable(last.path)
    assert run("verify", directory) == 0
    assert "torn tail" in capsys.readouterr().out
    end = logs.reopen(directory).next_offset
    assert end == 11
    assert run("verify", directory) == 0
    assert f"ok, offsets 0 to {end}" in capsys.readouterr().out
    assert run("inspect", directory) == 0
    assert "kept from an earlier repair" in capsys.readouterr().out


def test_a_segment_that_ends_too_early_is_damage(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = wal.read_log(directory)[-1]
    for data in (last.path.read_bytes()[: last.frames[-1].at], b"TWLOG001"):
        last.path.write_bytes(data)
        assert run("verify", directory) == 1
        assert "messages below offset 12 were fsynced" in capsys.readouterr().out
        with pytest.raises(Corrupt, match="below offset 12 were fsynced"):
            logs.reopen(directory)
        assert last.path.read_bytes() == data, "G7 Nothing is silently skipped"


def test_a_segment_that_was_never_begun_is_no_damage(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (directory / f"{12:020d}.wal").write_bytes(b"TWLOG001")
    assert run("verify", directory) == 0
    assert "torn tail" in capsys.readouterr().out
    assert logs.reopen(directory).next_offset == 12


def test_a_gap_between_segments(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wal.read_log(directory)[1].path.unlink()
    assert run("verify", directory) == 1
    assert "the one before ends at" in capsys.readouterr().out
    with pytest.raises(Corrupt, match="LogGap"):
        logs.reopen(directory)


def test_frames_that_are_not_of_the_segments_schema_are_damage(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such a log cannot be written any more; one that was must be named, not crash its reader."""
    last = wal.read_log(directory)[-1]
    shorter = last.header.schema.remove(last.header.schema.get_field_index("value"))
    header = encode_header(logs.TOPIC_UUID, logs.PARTITION, last.header.base_offset, shorter)
    last.path.write_bytes(header + last.path.read_bytes()[last.header.size :])
    assert run("verify", directory) == 1
    assert "not of the segment's schema" in capsys.readouterr().out
    with pytest.raises(Corrupt, match="schema"):
        logs.reopen(directory)


def test_nothing_to_look_at(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="NoLog"):
        run("verify", tmp_path)
