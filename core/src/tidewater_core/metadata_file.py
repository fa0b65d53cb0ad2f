"""Whose a metadata file is: the one part of Iceberg's format that is read without a library. Pure.

A table keeps its location when it is renamed, and one made anew under the old name gets the same:
then one directory holds two tables, and what the one does not name may be all that the other has.
"""

import gzip
import json
import zlib
from typing import Any, Final

from tidewater_core.names import TOPIC

_SUFFIXES: Final = (".metadata.json", ".metadata.json.gz")
_GZIP: Final = b"\x1f\x8b"


def is_metadata_file(location: str) -> bool:
    """Say if a file holds one version of a table's metadata."""
    return location.endswith(_SUFFIXES)


def other_table(data: bytes, ours: str, topic: str) -> str | None:
    """Name the table that the file is of, unless it is ours or nobody's.

    A torn file is nobody's: no catalog names such a one. Neither is one that was made for our topic
    and never had a snapshot: of two workers that make a table, one comes too late.
    """
    try:
        text = gzip.decompress(data) if data.startswith(_GZIP) else data
        metadata: Any = json.loads(text)
    except (ValueError, EOFError, OSError, zlib.error):
        return None
    if not isinstance(metadata, dict) or metadata.get("table-uuid") == ours:
        return None
    made_for = (metadata.get("properties") or {}).get(TOPIC)
    if made_for and made_for == topic and not metadata.get("snapshots"):
        return None
    return str(metadata.get("table-uuid", "it does not say which"))
