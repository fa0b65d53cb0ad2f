"""An etcd that is not the chart's: TLS both ways, users with passwords, one member."""

import asyncio
import base64
import http.client
import json
import secrets
import ssl
from dataclasses import dataclass

from e2e.install import render
from e2e.kubectl import Kubectl, Object, PortForward, wait_for
from tidewater_coordination.etcd import wire
from tidewater_coordination.etcd.client import EtcdClient
from tidewater_coordination.etcd.login import Login
from tidewater_testing.parts.certificates import Authority

NAME = "outer-etcd"
USER = "tidewater"
PREFIX = "production"
TLS_FILES = ("tls.crt", "tls.key", "ca.crt")


@dataclass(frozen=True)
class OuterEtcd:
    """Where it is, and what it asks for."""

    endpoint: str
    secret: Object
    """Data for a Secret, as the chart's `etcd.secretName` wants it."""
    login: Login
    """The same for a client here."""
    forward: PortForward

    def call(self, path: str, body: object) -> tuple[int, bytes]:
        """Ask its JSON gateway, which knows no users: only until they are turned on."""
        context = ssl.create_default_context(cafile=self.login.ca)
        context.load_cert_chain(self.login.cert, self.login.key)
        host, _, port = self.forward.address.rpartition(":")
        connection = http.client.HTTPSConnection(host, int(port), timeout=10, context=context)
        try:
            connection.request("POST", path, json.dumps(body))
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def count(self, login: Login, prefix: str = PREFIX) -> int:
        """Count the keys below a prefix as somebody; raises if that one may not."""

        async def ask() -> int:
            client = EtcdClient([f"https://{self.forward.address}"], login)
            client.open()
            try:
                begin = f"{prefix}/".encode()
                return len((await client.range(begin, wire.prefix_end(begin))).kvs)
            finally:
                await client.close()

        return asyncio.run(ask())


def start(kubectl: Kubectl, authority: Authority, forward: PortForward) -> OuterEtcd:
    """Run it in a namespace and turn its users on; `forward` leads to it."""
    host = f"{NAME}.{kubectl.namespace}.svc"
    pair = authority.sign(NAME, f"DNS:{host},DNS:localhost,IP:127.0.0.1")
    client = authority.sign(f"{NAME}-client", "DNS:client")
    files = (pair.cert, pair.key, authority.ca)
    served = {name: _b64(path.read_bytes()) for name, path in zip(TLS_FILES, files, strict=True)}
    password = secrets.token_hex(8)
    shown = {
        "ca.crt": _b64(authority.ca.read_bytes()),
        "tls.crt": _b64(client.cert.read_bytes()),
        "tls.key": _b64(client.key.read_bytes()),
        "username": _b64(USER.encode()),
        "password": _b64(password.encode()),
    }
    kubectl.apply(_objects(kubectl.namespace, served))
    kubectl("wait", f"pod/{NAME}", "--for=condition=Ready", "--timeout=120s")
    login = Login(
        ca=str(authority.ca),
        cert=str(client.cert),
        key=str(client.key),
        user=USER,
        password=password,
    )
    etcd = OuterEtcd(f"https://{host}:2379", shown, login, forward)
    wait_for(lambda: etcd.call("/v3/maintenance/status", {})[0] == 200, 60, "the outer etcd")
    _turn_users_on(etcd)
    return etcd


def _turn_users_on(etcd: OuterEtcd) -> None:
    """Let our user have the keys below our prefix and no other."""
    ours = {
        "permType": "READWRITE",
        "key": _b64(f"{PREFIX}/".encode()),
        "range_end": _b64(f"{PREFIX}0".encode()),
    }
    for path, body in (
        ("role/add", {"name": USER}),
        ("role/grant", {"name": USER, "perm": ours}),
        ("user/add", {"name": USER, "password": etcd.login.password}),
        ("user/grant", {"user": USER, "role": USER}),
        ("role/add", {"name": "root"}),
        ("user/add", {"name": "root", "password": secrets.token_hex(8)}),
        ("user/grant", {"user": "root", "role": "root"}),
        ("enable", {}),
    ):
        status, said = etcd.call(f"/v3/auth/{path}", body)
        assert status == 200, (path, said)


def _objects(namespace: str, served: Object) -> list[Object]:
    """Return a pod like the chart's etcd, but for TLS, and a name for it."""
    (chart,) = [
        each
        for each in render()
        if each["kind"] == "StatefulSet" and each["metadata"]["name"] == "tidewater-etcd"
    ]
    pod = chart["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    files = "/etc/etcd/tls"
    container["command"] = [
        "/usr/local/bin/etcd",
        f"--name={NAME}",
        "--data-dir=/data/etcd",
        "--listen-client-urls=https://0.0.0.0:2379",
        f"--advertise-client-urls=https://{NAME}.{namespace}.svc:2379",
        "--listen-peer-urls=http://127.0.0.1:2380",
        "--initial-advertise-peer-urls=http://127.0.0.1:2380",
        f"--initial-cluster={NAME}=http://127.0.0.1:2380",
        f"--cert-file={files}/tls.crt",
        f"--key-file={files}/tls.key",
        f"--trusted-ca-file={files}/ca.crt",
        "--client-cert-auth",
    ]
    for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
        container.pop(probe, None)  # the kubelet has no certificate
    container["readinessProbe"] = {"tcpSocket": {"port": 2379}, "periodSeconds": 1}
    container["volumeMounts"] = [
        {"name": "data", "mountPath": "/data"},
        {"name": "tls", "mountPath": files},
    ]
    pod["volumes"] = [
        {"name": "data", "emptyDir": {}},
        {"name": "tls", "secret": {"secretName": NAME}},
    ]
    labels = {"app": NAME}
    return [
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": NAME}, "data": served},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": NAME},
            "spec": {"clusterIP": "None", "selector": labels, "ports": [{"port": 2379}]},
        },
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": NAME, "labels": labels},
            "spec": pod,
        },
    ]


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()
