"""From the quick start to production by one values file: TLS everywhere, two operators, own etcd.

Runs last: another registry is another world for all that was made before.
"""

import base64
import json
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from e2e import faults, outer_etcd
from e2e.install import System, create_namespace, install_chart
from e2e.kubectl import CommandError, Kubectl, Object, PortForward, wait_for
from e2e.leading import Beat, beat, lease, one_writer
from e2e.outer_etcd import OuterEtcd
from e2e.tenant import pool, topic, wait_ready
from tidewater_coordination.etcd.login import Login
from tidewater_core.errors import TidewaterError
from tidewater_testing.parts.certificates import Authority, Pair

pytestmark = pytest.mark.timeout(600)
TLS_SECRET = "tidewater-tls"
ETCD_SECRET = "e2e-etcd-client"
LEASE_S = 5.0
"""As e2e installs the chart."""
BUSY_S = 10.0
"""A renewal that was not seen, and what a busy machine takes."""
PODS = ("tidewater-default-0", "tidewater-default-1")
CA = "/etc/tidewater/tls/ca.crt"
TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount/token"
ASK = """
import json, ssl, sys, urllib.error, urllib.request
url, body, ca, producer = sys.argv[1], sys.argv[2].encode() or None, sys.argv[3], sys.argv[4]
with open(%r) as file:
    headers = {"Authorization": "Bearer " + file.read().strip(), "Content-Type": "application/json"}
if producer:
    headers |= {"Tidewater-Producer": producer, "Tidewater-Sequence": "0"}
context = ssl.create_default_context(cafile=ca or None)
try:
    request = urllib.request.Request(url, body, headers)
    print(urllib.request.urlopen(request, timeout=10, context=context).read().decode())
except (OSError, ValueError) as error:
    print(json.dumps({"failed": repr(error)}))
"""
ASK = ASK % TOKEN
SERVED = "import ssl, sys; print(ssl.get_server_certificate((sys.argv[1], 8080)))"


@dataclass(frozen=True)
class Production:
    """The release by the values of production, and a namespace with two workers."""

    kubectl: Kubectl
    system: System
    authority: Authority
    etcd: OuterEtcd

    @property
    def service(self) -> str:
        """The address that clients use."""
        return f"https://tidewater.{self.kubectl.namespace}.svc:8080"

    def host(self, pod: str) -> str:
        """Return the name of one worker."""
        return f"{pod}.tidewater-default-workers.{self.kubectl.namespace}.svc"

    def ask(self, url: str, body: object = None, ca: str = CA, producer: str = "") -> Any:
        """Send a request from inside a worker's pod, with its token."""
        text = "" if body is None else json.dumps(body)
        return json.loads(self.kubectl.python(PODS[0], ASK, url, text, ca, producer))

    def wait_said(self, key: str, url: str, body: object = None, ca: str = CA) -> Any:
        """Ask until the answer has this key; a message is stored once all the same (G8)."""
        said: list[Any] = []
        producer = f"e2e-{secrets.token_hex(8)}"

        def answered() -> bool:
            said.append(self.ask(url, body, ca, producer if body else ""))
            if not said[-1].get(key):
                raise CommandError(f"{url}: {said[-1]}")
            return True

        wait_for(answered, 60, f"an answer with {key}", interval_s=1.0)
        return said[-1][key]

    def sign(self) -> Pair:
        """Make a certificate for the workers of the namespace."""
        namespace = self.kubectl.namespace
        names = (f"*.tidewater-default-workers.{namespace}.svc", f"tidewater.{namespace}.svc")
        return self.authority.sign("workers", ",".join(f"DNS:{name}" for name in names))

    def write(self, pair: Pair) -> None:
        """Put a certificate where the workers find it."""
        files = {"tls.crt": pair.cert, "tls.key": pair.key, "ca.crt": self.authority.ca}
        data = {key: _b64(path.read_bytes()) for key, path in files.items()}
        self.kubectl.apply([_secret(TLS_SECRET, data)])


def _secret(name: str, data: Object) -> Object:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": data}


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.fixture(scope="module")
def production(
    namespace: Kubectl, system: System, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Production]:
    """Upgrade the release, and go back at the end."""
    folder: Path = tmp_path_factory.mktemp("tls")
    databases = create_namespace(system.kubectl, f"e2e-databases-{secrets.token_hex(2)}")
    with PortForward(databases, f"app={outer_etcd.NAME}", 2379) as forward:
        etcd = outer_etcd.start(databases, Authority(folder, "etcd-ca"), forward)
        system.kubectl.apply([_secret(ETCD_SECRET, etcd.secret)])
        place = Production(namespace, system, Authority(folder, "workers-ca"), etcd)
        place.write(place.sign())
        install_chart(
            system.kubectl,
            system.tag,
            {
                # Its rights are those of the bindings in this namespace, and no others.
                "operator": {"replicas": 2, "watchNamespaces": [namespace.namespace]},
                "tls": {"secretName": TLS_SECRET},
                "etcd": {
                    "enabled": False,
                    "endpoints": [etcd.endpoint],
                    "secretName": ETCD_SECRET,
                    "prefix": outer_etcd.PREFIX,
                },
            },
        )
        try:
            namespace.apply([pool(2), topic("orders", partitions=4)])
            wait_ready(namespace, "pool/default", "topic/orders")
            yield place
            namespace("delete", "topics,pools", "--all", "--timeout=150s")
        finally:
            install_chart(system.kubectl, system.tag)
    databases("delete", "namespace", databases.namespace, "--ignore-not-found", "--wait=false")


def test_the_operator_has_rights_where_it_watches_alone(production: Production) -> None:
    """It served the topic by them; elsewhere it may not even look."""
    system = production.system.kubectl
    account = f"system:serviceaccount:{system.namespace}:tidewater-operator"

    def may(verb: str, kind: str, namespace: str) -> bool:
        words = ("auth", "can-i", verb, kind, f"--as={account}")
        try:
            return system.within(namespace)(*words).strip() == "yes"
        except CommandError as error:
            if "\nno" not in str(error):  # nobody answered
                raise
            return False

    mine = production.kubectl.namespace
    for verb, kind in (("list", "topics.tidewater.dev"), ("delete", "persistentvolumeclaims")):
        wait_for(lambda verb=verb, kind=kind: may(verb, kind, mine), 30, f"to {verb} {kind}")  # type: ignore[misc]
        assert not may(verb, kind, "default")


def test_https_and_nothing_else(production: Production) -> None:
    """Clients by the Service's name and the CA; each worker passes on to the other, by TLS, too."""
    path = f"/v1/{production.kubectl.namespace}/orders"
    for pod in PODS:
        for partition in range(4):
            url = f"https://{production.host(pod)}:8080{path}/messages?partition={partition}"
            body = {"messages": [{"value": f"{pod} {partition}"}]}
            acks = production.wait_said("acks", url, body)
            assert [ack["partition"] for ack in acks] == [partition]
    options = ("--url", production.service, "--ca", CA, "--token-file", TOKEN)
    consume = ("tidewater", "consume", f"{production.kubectl.namespace}/orders", *options)
    read: list[str] = []

    def consumed() -> bool:
        said = production.kubectl("exec", PODS[1], "--", *consume, "--format=raw", "--quiet")
        read[:] = sorted(said.splitlines())
        return True

    wait_for(consumed, 60, "all to be read", interval_s=1.0)
    assert read == sorted(f"{pod} {p}" for pod in PODS for p in range(4))
    assert production.wait_said("snapshot_id", f"{production.service}{path}/flush", {})

    def is_turned_away() -> bool:
        plain = production.ask(production.service.replace("https", "http") + path)
        assert "failed" in plain, plain
        return True

    wait_for(is_turned_away, 60, "a client without TLS to be turned away", interval_s=1.0)

    def is_told_no_name() -> bool:
        stranger = production.ask(f"{production.service}{path}", ca="")
        assert "failed" in stranger, stranger
        return "CERTIFICATE_VERIFY_FAILED" in stranger["failed"]

    wait_for(is_told_no_name, 60, "a client without the CA to turn away")


def test_another_certificate_without_a_restart(production: Production) -> None:
    before = {pod: production.kubectl.incarnation(pod) for pod in PODS}
    pair = production.sign()
    production.write(pair)
    # The kubelet looks at a pod's volumes once a minute, or when the pod changes.
    production.kubectl("annotate", "pods", *PODS, f"e2e/now={time.time()}", "--overwrite")
    wanted = pair.cert.read_text().split()

    def shown(pod: str) -> list[str]:
        return production.kubectl.python(PODS[0], SERVED, production.host(pod)).split()

    def all_shown() -> bool:
        return all(shown(pod) == wanted for pod in PODS)

    wait_for(all_shown, 120, "both workers to show the new certificate", interval_s=1.0)
    assert {pod: production.kubectl.incarnation(pod) for pod in PODS} == before
    path = f"/v1/{production.kubectl.namespace}/orders/messages?partition=0"
    for pod in PODS:
        body = {"messages": [{"value": "after"}]}
        assert production.wait_said("acks", f"https://{production.host(pod)}:8080{path}", body)
    wait_ready(production.kubectl, "topic/orders")


def test_etcd_is_reached_as_its_user_alone(production: Production) -> None:
    """All keys are below our prefix: the user may touch no other."""
    etcd = production.etcd

    def counted() -> bool:
        try:
            return etcd.count(etcd.login) > 5
        except TidewaterError as error:  # the forwarded port, perhaps
            raise ConnectionError(str(error)) from error

    wait_for(counted, 30, "keys below our prefix")
    assert "PERMISSION_DENIED" in _refusal(etcd, etcd.login, "another")
    nobody = replace(etcd.login, user="", password="")
    assert "StoreRefused" in _refusal(etcd, nobody, outer_etcd.PREFIX)


def _refusal(etcd: OuterEtcd, login: Login, prefix: str) -> str:
    """Return in which words etcd refuses to count; that it was not reached is no refusal."""
    said: list[str] = []

    def refused() -> bool:
        try:
            count = etcd.count(login, prefix)
        except TidewaterError as error:
            if error.reason != "StoreRefused":
                raise ConnectionError(str(error)) from error
            said.append(str(error))
            return True
        raise AssertionError(f"{count} keys below {prefix} were counted")

    wait_for(refused, 60, "etcd to refuse")
    return said[-1]


# ---- two operators


@pytest.mark.parametrize("how", ["paused", "deleted"])
def test_the_other_operator_takes_over(production: Production, how: str) -> None:
    """Within the lease's time, with one writer at a time; what is applied meanwhile is served."""
    system, namespace = production.system, production.kubectl
    beats: list[Beat] = []

    def both_there() -> bool:
        beats.append(beat(system))
        return len(beats[-1].writes) == 2 and len(beats[-1].leaders) == 1

    wait_for(both_there, 120, "two operators, of which one leads")
    leader, _, _ = lease(system)
    renewed: list[float] = []

    def taken_over() -> bool:
        holder, _, renewed_at = lease(system)
        if holder == leader:  # one that was deleted may renew it until it is killed
            renewed.append(renewed_at)
        beats.append(beat(system))
        return holder not in ("", leader)

    with _gone(system, leader, how):
        holder, _, renewed_at = lease(system)
        if holder == leader:
            renewed.append(renewed_at)
        namespace.apply([topic(f"late-{how}", partitions=2)])
        wait_for(taken_over, 60, "the other one to lead")
        acquired = lease(system)[1]
        # Both renew and look every fifth of the time; the rest is a busy machine's.
        took_s = acquired - max(renewed, default=acquired)
        assert took_s < LEASE_S * 1.4 + BUSY_S, f"after {took_s:.1f} s"
        wait_ready(namespace, f"topic/late-{how}")
    for _ in range(5):  # the one that was paused goes on where it was, and must not
        beats.append(beat(system))
    one_writer(beats)


@contextmanager
def _gone(system: System, leader: str, how: str) -> Iterator[None]:
    if how == "paused":
        with faults.paused_container(system.kubectl, "operator", leader):
            yield
    else:
        system.kubectl("delete", "pod", leader, "--grace-period=0", "--force")
        yield
