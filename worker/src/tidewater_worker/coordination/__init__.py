"""Who owns what: registry, ownership, leases and cursors, behind one small port."""

from tidewater_core.errors import Invalid
from tidewater_core.settings import WorkerSettings
from tidewater_worker.coordination.port import Coordination
from tidewater_worker.coordination.sqlite import SqliteCoordination


def connect(settings: WorkerSettings) -> Coordination:
    """Return the store that the settings name; `start` opens it."""
    path = settings.coordination_path
    if path is None:
        raise Invalid("NoEtcdYet", "coordination by etcd is not available yet")
    return SqliteCoordination(path)
