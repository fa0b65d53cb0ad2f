"""Which table a topic's rows are in, remembered beside its log.

The catalog alone cannot tell a topic that never had a table from one whose table was dropped; a
table that is gone must stop the topic and never be made again silently (G7). So the table's
identity is written next to the partitions' logs once it is known:

    <log root>/<namespace>/<topic>/table.json = {"topic_uuid": …, "table_uuid": …}
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tidewater_core.errors import Corrupt
from tidewater_worker.table.local_io import write_atomically

FILE_NAME: Final = "table.json"


@dataclass(frozen=True, slots=True)
class Marker:
    """A topic and its table."""

    topic_uuid: str
    table_uuid: str


def read_marker(directory: Path) -> Marker | None:
    """Read the marker of a topic; None if it never had a table here."""
    path = directory / FILE_NAME
    try:
        value = json.loads(path.read_bytes())
        return Marker(str(value["topic_uuid"]), str(value["table_uuid"]))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt("MarkerDamaged", f"{path} is not readable: {error}") from error


def write_marker(directory: Path, marker: Marker) -> None:
    """Remember a topic's table; durable when this returns."""
    data = json.dumps({"topic_uuid": marker.topic_uuid, "table_uuid": marker.table_uuid})
    write_atomically(directory / FILE_NAME, data.encode())
