"""TLS follows its files: a Secret's link is swapped, Flight too; a broken pair does nothing."""

import os
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import flight

from tidewater_core.security import TlsSettings
from tidewater_testing.parts.certificates import Authority, Pair
from tidewater_testing.parts.secured import SecuredWorker
from tidewater_testing.parts.worker import topic_manifest
from tidewater_testing.process import wait_until
from tidewater_worker.tls import POLL_S

WAIT_S = POLL_S + 15
TOPIC = "shop/orders"


class Secret:
    """A directory as the kubelet mounts a Secret: files are links into what `..data` links to."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        self._version = 0

    def put(self, **files: bytes) -> None:
        """Exchange all files at once."""
        self._version += 1
        new = self.directory / f"..v{self._version}"
        new.mkdir()
        for name, data in files.items():
            (new / name).write_bytes(data)
            link = self.directory / name
            if not link.is_symlink():
                link.symlink_to(f"..data/{name}")
        (self.directory / "..data_tmp").symlink_to(new.name)
        os.replace(self.directory / "..data_tmp", self.directory / "..data")


def serial(worker: SecuredWorker, port: int, ca: Path) -> str:
    """Return the number of the certificate that a port shows."""
    context = ssl.create_default_context(cafile=str(ca))
    if port == worker.settings.flight_port:
        context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as tls,
    ):
        certificate = tls.getpeercert()
    assert certificate is not None
    return str(certificate["serialNumber"])


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


def files(pair: Pair, ca: Path) -> dict[str, bytes]:
    return {"crt": pair.cert.read_bytes(), "key": pair.key.read_bytes(), "ca": ca.read_bytes()}


@pytest.fixture
def secret(tmp_path: Path, authority: Authority) -> Secret:
    made = Secret(tmp_path / "tls")
    made.put(**files(authority.sign("first"), authority.ca))
    return made


@pytest.fixture
def worker(tmp_path: Path, secret: Secret) -> Iterator[SecuredWorker]:
    where = secret.directory
    tls = TlsSettings(cert=where / "crt", key=where / "key", ca=where / "ca")
    with SecuredWorker(tmp_path / "w", [topic_manifest(TOPIC, {"partitions": 1})], tls=tls) as part:
        yield part


def test_a_new_certificate_while_it_runs(
    worker: SecuredWorker, secret: Secret, authority: Authority
) -> None:
    ports = [worker.settings.listen_port, worker.settings.flight_port]
    before = {port: serial(worker, port, authority.ca) for port in ports if port}
    assert len(set(before.values())) == 1
    kept = worker.connection()
    kept.request("GET", "/healthz")
    assert kept.getresponse().read() == b"ok\n"
    client = worker.fly()
    descriptor = flight.FlightDescriptor.for_path(*TOPIC.split("/"))
    batch = pa.record_batch({"value": pa.array([b"one"], pa.binary())})
    writer, reader = client.do_put(descriptor, batch.schema)
    writer.write_batch(batch)
    reader.read()

    # A pair that does not fit together: half of a renewal.
    first, second = authority.sign("first-again"), authority.sign("second")
    mixed = files(second, authority.ca) | {"key": first.key.read_bytes()}
    secret.put(**mixed)
    time.sleep(POLL_S + 1)
    for port in before:
        assert serial(worker, port, authority.ca) == before[port], "a broken pair changes nothing"

    secret.put(**files(second, authority.ca))
    for port, old in before.items():
        wait_until(
            lambda port=port, old=old: serial(worker, port, authority.ca) != old,  # type: ignore[misc]
            WAIT_S,
            f"a new certificate on port {port}",
            0.2,
        )
    kept.request("GET", "/healthz")
    assert kept.getresponse().read() == b"ok\n", "an open connection goes on"
    kept.close()
    writer.write_batch(batch)
    assert b'"offset":1' in reader.read().to_pybytes(), "an open stream goes on"
    writer.close()
    client.close()
    for _ in range(10):
        assert serial(worker, worker.settings.flight_port or 0, authority.ca) not in before.values()
    with worker.fly() as again:
        info = again.get_flight_info(descriptor)
        assert info.total_records == 2
    assert worker.stop() == 0


def test_clients_with_certificates_only(tmp_path: Path, authority: Authority) -> None:
    pair, guest = authority.sign("worker"), Authority(tmp_path / "guests", "guests")
    tls = TlsSettings(cert=pair.cert, key=pair.key, ca=authority.ca, client_ca=guest.ca)
    worker = SecuredWorker(tmp_path / "w", [topic_manifest(TOPIC, {"partitions": 1})], tls=tls)
    mine = guest.sign("guest")

    def trust(pair: Pair | None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(authority.ca))
        if pair is not None:
            context.load_cert_chain(pair.cert, pair.key)
        return context

    def status(pair: Pair | None) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worker, "trust", lambda: trust(pair))
            return worker.ask("GET", "/healthz").status

    worker.start(wait=False)
    try:

        def answers() -> bool:
            try:
                return status(mine) == 200
            except OSError:
                return False

        wait_until(answers, 60, "the worker to answer", 0.2)
        with pytest.raises((ssl.SSLError, OSError)):
            status(None)
        with pytest.raises((ssl.SSLError, OSError)):
            status(authority.sign("somebody-else"))
        with worker.fly() as nobody, pytest.raises(flight.FlightUnavailableError):
            list(nobody.list_flights())
        options = {
            "tls_root_certs": authority.ca.read_bytes(),
            "cert_chain": mine.cert.read_bytes(),
            "private_key": mine.key.read_bytes(),
        }
        where = f"grpc+tls://127.0.0.1:{worker.settings.flight_port}"
        with flight.connect(where, **options) as known:
            assert len(list(known.list_flights())) == 1
    finally:
        worker.process.kill()


def test_files_that_cannot_be_used_at_the_start(tmp_path: Path, authority: Authority) -> None:
    one, other = authority.sign("one"), authority.sign("other")
    tls = TlsSettings(cert=one.cert, key=other.key)
    worker = SecuredWorker(tmp_path / "w", tls=tls)
    worker.start(wait=False)
    try:
        wait_until(
            lambda: "the files of the setting tls" in worker.process.log_tail(), 30, "a reason", 0.2
        )
    finally:
        worker.process.kill()
