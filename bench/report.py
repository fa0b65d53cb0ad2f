"""The result as text: what an ack means, the table, the verdicts. Pure."""

from collections.abc import Iterable
from typing import Final

from bench.lines import Line, number

ACKS: Final = """\
What an ack means here. All three wait for the disk before they answer.
  floor      a write() and an fdatasync() returned: the bytes are on the disk. Nothing else.
  NATS       JetStream, file storage, one replica, sync_interval: always: the message is in the
             stream's file and the file was synced. It survives the loss of the process and of
             power. A subject's stream is its only place; nothing is in a table.
  Tidewater  log sync Always (the default): the message has its offset in its partition's log and
             the log was fdatasynced, together with those that came at the same time. It survives
             the loss of the process and of power; a re-send by the same producer is recognised.
             It becomes a row of an Iceberg table within about a flush interval ("freshness")."""

_HEAD: Final = ("", "floor", "NATS", "Tidewater", "unit", "÷ NATS", "target", "")


def render(lines: Iterable[Line]) -> str:
    """Return the table, one block per group."""
    rows: list[tuple[str, ...]] = []
    groups: dict[int, str] = {}
    last = None
    for line in lines:
        if line.group != last:
            groups[len(rows)] = line.group
            last = line.group
        rows.append(
            (
                f"  {line.name}",
                _cell(line.floor),
                _cell(line.nats),
                _cell(line.tidewater),
                line.unit,
                f"{line.ratio:.2f}" if line.ratio is not None else "",
                line.target.text() if line.target else "",
                line.verdict,
            )
        )
    widths = [max(len(row[i]) for row in [_HEAD, *rows]) for i in range(len(_HEAD))]
    text = [_row(_HEAD, widths)]
    for index, row in enumerate(rows):
        if index in groups:
            text += ["", groups[index]]
        text.append(_row(row, widths))
    return "\n".join(text)


def verdicts(lines: Iterable[Line]) -> str:
    """Return one sentence that counts what was met and names what was not."""
    held = [line for line in lines if line.verdict]
    missed = [line for line in held if line.verdict == "MISS"]
    text = f"{len(held) - len(missed)} of {len(held)} targets met."
    if missed:
        text += " Missed: " + "; ".join(
            f"{line.group}: {line.name} = {_cell(line.tidewater)} {line.unit}" for line in missed
        )
    return text


def _cell(value: float | None) -> str:
    return "" if value is None else number(value)


def _row(cells: tuple[str, ...], widths: list[int]) -> str:
    # Numbers stand right, words left.
    parts = [
        cell.rjust(width) if index in {1, 2, 3, 5} else cell.ljust(width)
        for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(parts).rstrip()
