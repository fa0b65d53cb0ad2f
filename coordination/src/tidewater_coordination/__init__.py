"""Who owns what: registry, ownership, leases and cursors, behind one small port."""

from pathlib import Path

from tidewater_coordination.port import Coordination
from tidewater_coordination.sqlite import SqliteCoordination
from tidewater_core.settings import CoordinationTls, WorkerSettings


def connect(
    place: str,
    *,
    prefix: str = "tidewater",
    tls: CoordinationTls | None = None,
    user: str = "",
    password: str = "",
) -> Coordination:
    """Return the store at a place (`WorkerSettings.coordination`); `start` opens it.

    A path of an SQLite file, or etcd endpoints (`http://…` or `https://…`) joined by commas. All
    else is etcd's: below which prefix everything stands, and how we show who we are.
    """
    if not place.startswith(("http://", "https://")):
        return SqliteCoordination(Path(place))
    # Only where it is needed: loading gRPC takes as long as starting the rest.
    from tidewater_coordination.etcd.login import Login
    from tidewater_coordination.etcd.store import EtcdCoordination

    tls = tls or CoordinationTls()
    login = Login(ca=tls.ca, cert=tls.cert, key=tls.key, user=user, password=password)
    return EtcdCoordination(tuple(part.strip() for part in place.split(",")), prefix, login)


def connect_as(settings: WorkerSettings) -> Coordination:
    """Return the store that a worker's settings name."""
    return connect(
        settings.coordination,
        prefix=settings.coordination_prefix,
        tls=settings.coordination_tls,
        user=settings.coordination_user,
        password=settings.coordination_password,
    )
