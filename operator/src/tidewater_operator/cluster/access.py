"""How to reach the API server: as a pod's service account, or by a kubeconfig (development)."""

import base64
import os
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from tidewater_core.errors import Invalid

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True)
class Access:
    """Where the API server is and how we show who we are."""

    server: str
    ssl: ssl.SSLContext | None
    token_path: Path | None = None
    """A file that is replaced by and by: read anew for each connection."""
    token: str = ""

    def authorization(self) -> dict[str, str]:
        """Return the header that says who we are."""
        token = self.token_path.read_text().strip() if self.token_path else self.token
        return {"Authorization": f"Bearer {token}"} if token else {}


def find_access() -> Access:
    """Return the access of this process; raise Invalid if there is none."""
    if (ACCOUNT / "token").exists():
        host = os.environ.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc")
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        address = f"[{host}]" if ":" in host else host
        context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
        return Access(f"https://{address}:{port}", context, ACCOUNT / "token")
    path = Path(os.environ.get("KUBECONFIG", "~/.kube/config")).expanduser()
    if not path.is_file():
        raise Invalid("NoCluster", f"neither a service account nor {path} is there")
    return from_kubeconfig(yaml.safe_load(path.read_text()))


def from_kubeconfig(config: Any) -> Access:
    """Return the access of a kubeconfig's current context."""

    def named(kind: str, name: str) -> Any:
        return next(item[kind] for item in config[f"{kind}s"] if item["name"] == name)

    context = named("context", config["current-context"])
    cluster, user = named("cluster", context["cluster"]), named("user", context["user"])
    ca = cluster.get("certificate-authority-data")
    trust = ssl.create_default_context(cadata=base64.b64decode(ca).decode() if ca else None)
    if "client-certificate-data" in user:
        # The library takes files alone; they are read at once.
        with tempfile.TemporaryDirectory() as folder:
            cert, key = Path(folder, "cert"), Path(folder, "key")
            cert.write_bytes(base64.b64decode(user["client-certificate-data"]))
            key.touch(mode=0o600)
            key.write_bytes(base64.b64decode(user["client-key-data"]))
            trust.load_cert_chain(cert, key)
    return Access(cluster["server"], trust, token=user.get("token", ""))
