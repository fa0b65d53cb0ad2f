"""Who owns what: registry, ownership, leases and cursors, behind one small port."""

from tidewater_core.settings import WorkerSettings
from tidewater_worker.coordination.port import Coordination
from tidewater_worker.coordination.sqlite import SqliteCoordination


def connect(settings: WorkerSettings) -> Coordination:
    """Return the store that the settings name; `start` opens it."""
    path = settings.coordination_path
    if path is not None:
        return SqliteCoordination(path)
    # Only where it is needed: loading gRPC takes as long as starting the rest.
    from tidewater_worker.coordination.etcd.store import EtcdCoordination

    return EtcdCoordination(settings.etcd_endpoints)
