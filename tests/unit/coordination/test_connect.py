"""Which store a place names."""

from pathlib import Path

from tidewater_coordination import connect
from tidewater_coordination.etcd.store import EtcdCoordination
from tidewater_coordination.sqlite import SqliteCoordination


def test_a_path_is_sqlite_and_urls_are_etcd(tmp_path: Path) -> None:
    assert isinstance(connect(str(tmp_path / "coordination.db")), SqliteCoordination)
    assert isinstance(connect("https://a:2379, https://b:2379"), EtcdCoordination)
