"""Dropping the table of a topic that was deleted, with everything that it stored.

The files are listed *before* the table goes and only those are removed afterwards: a topic that is
made again under the same name may have a new table in the same place by then, and none of its
files are on the list. Nor does anything go while another table has files in the same place.
"""

import logging
from typing import Final

import pyarrow.fs as pafs
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import PyArrowFileIO

from tidewater_core.errors import Conflict, NotFound, Retryable
from tidewater_core.metadata_file import is_metadata_file, other_table
from tidewater_worker.table.catalog import TableCatalog
from tidewater_worker.table.files import remove_files
from tidewater_worker.table.opening import TopicTable
from tidewater_worker.table.view import TableView, view_of

log = logging.getLogger(__name__)

LOGGED_EVERY: Final = 1_000
"""Files removed between two lines of the log."""


def drop_table(catalog: TableCatalog, where: TopicTable) -> bool:
    """Drop the topic's table and remove its files; False if there is none.

    A table that belongs to somebody else, a topic of the same name in another life included, is
    refused. Twice is as good as once.
    """
    name = ".".join(where.identifier)
    try:
        view = view_of(catalog.load(where.identifier))
    except NotFound:
        return False
    if view.topic_uuid != where.uuid:
        owner = f"topic {view.topic} ({view.topic_uuid})" if view.topic else "nobody here"
        raise Conflict("TableNotOurs", f"{name} belongs to {owner}; it is not dropped")
    # Metadata first: what an interrupted removal leaves must not look like another table.
    files = sorted(_files_of(view), key=lambda path: not is_metadata_file(path))
    _check_alone(view, name, files)
    try:
        catalog.drop(where.identifier)
    except NotFound:
        return False
    for first in range(0, len(files), LOGGED_EVERY):
        last = min(first + LOGGED_EVERY, len(files))
        remove_files(view.table.io, files[first:last])
        log.info("removing files table=%s done=%d of=%d", name, last, len(files))
    _remove_directory(view)
    log.warning("table dropped table=%s topic=%s uuid=%s", name, where.topic, view.table_uuid)
    return True


def _files_of(view: TableView) -> list[str]:
    """List what is stored under the table's location.

    Not only what snapshots name: files that compaction replaced or whose commit never landed hold
    the same messages. A store that does not let us list leaves the removal to the catalog.
    """
    try:
        found = _filesystem(view.table.io, view.metadata.location)
        if found is None:
            return []
        filesystem, path = found
        location = view.metadata.location.rstrip("/")
        selector = pafs.FileSelector(path, allow_not_found=True, recursive=True)
        return [
            location + info.path.removeprefix(path)
            for info in filesystem.get_file_info(selector)
            if info.type is pafs.FileType.File
        ]
    except (OSError, ValueError) as error:
        log.warning("files under %s cannot be listed: %s", view.metadata.location, error)
        return []


def _check_alone(view: TableView, name: str, files: list[str]) -> None:
    """Refuse if another table has its metadata here: a renamed table keeps its location."""
    ours = {view.table.metadata_location, *(e.metadata_file for e in view.metadata.metadata_log)}
    for path in files:
        if path in ours or not is_metadata_file(path):
            continue
        try:
            with view.table.io.new_input(path).open() as file:
                other = other_table(file.read(), view.table_uuid, view.topic)
        except FileNotFoundError:
            continue  # it went meanwhile
        except OSError as error:
            raise Retryable("WarehouseUnavailable", f"reading {path}: {error}"[:500]) from error
        if other is not None:
            raise Conflict(
                "SharedLocation",
                f"{path} is of another table ({other}), which shares the location of {name}; "
                "neither is removed",
            )


def _filesystem(io: FileIO, location: str) -> tuple[pafs.FileSystem, str] | None:
    """Return the store of a location, and the path in it."""
    if not isinstance(io, PyArrowFileIO):
        return None
    scheme, netloc, path = io.parse_location(location, io.properties)
    return io.fs_by_scheme(scheme, netloc), path.rstrip("/")


def _remove_directory(view: TableView) -> None:
    """Remove the empty directories of a local warehouse; object stores have none."""
    found = _filesystem(view.table.io, view.metadata.location)
    if found is None or not isinstance(found[0], pafs.LocalFileSystem):
        return
    filesystem, path = found
    selector = pafs.FileSelector(path, allow_not_found=True, recursive=True)
    infos = filesystem.get_file_info(selector)
    if any(info.type is pafs.FileType.File for info in infos):
        return
    for info in sorted(infos, key=lambda info: info.path, reverse=True):
        filesystem.delete_dir(info.path)
    if filesystem.get_file_info(path).type is pafs.FileType.Directory:
        filesystem.delete_dir(path)
