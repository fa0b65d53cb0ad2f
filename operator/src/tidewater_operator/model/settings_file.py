"""The settings file of a pool's workers. Pure.

One file serves all workers of a pool: what differs is `${POD_NAME}`, which the worker fills in, as
it does with the catalog's keys.
"""

import json
from typing import Any

from tidewater_core.crd.pool import Pool
from tidewater_operator.model.names import FLIGHT_PORT, HTTP_PORT, headless_name
from tidewater_operator.settings import AuthMode, OperatorSettings

DATA_DIR = "/data"
RUN_DIR = "/run/tidewater"
ETCD_DIR = "/etc/tidewater/etcd"
TLS_DIR = "/etc/tidewater/tls"
TOKEN_DIR = "/var/run/secrets/kubernetes.io/serviceaccount"  # noqa: S105
PEER_TOKEN_DIR = "/var/run/secrets/tidewater"  # noqa: S105


def worker_settings(
    pool: Pool, settings: OperatorSettings, etcd_keys: frozenset[str] = frozenset()
) -> str:
    """Return `settings.json`; `etcd_keys` are the keys of the etcd Secret, if there is one."""
    namespace = pool.metadata.namespace
    scheme = "https" if settings.tls.secret_name else "http"
    host = f"${{POD_NAME}}.{headless_name(pool.metadata.name)}.{namespace}.svc"
    found: dict[str, Any] = {
        "worker_id": "${POD_NAME}",
        "log_root": f"{DATA_DIR}/log",
        "run_dir": RUN_DIR,
        "coordination": ",".join(settings.etcd.endpoints),
        "coordination_prefix": registry_prefix(settings, namespace),
        "assigned_only": True,
        "catalog": {
            "name": settings.catalog.name,
            "properties": dict(sorted(settings.catalog.properties.items())),
        },
        "listen_host": "0.0.0.0",  # noqa: S104
        "listen_port": HTTP_PORT,
        "flight_port": FLIGHT_PORT if pool.spec.flight else None,
        "advertise_url": f"{scheme}://{host}:{HTTP_PORT}",
        "limits": pool.spec.limits_settings,
    }
    tls = {
        name: f"{ETCD_DIR}/{key}"
        for name, key in (("ca", "ca.crt"), ("cert", "tls.crt"), ("key", "tls.key"))
        if key in etcd_keys
    }
    if tls:
        found["coordination_tls"] = tls
    if "username" in etcd_keys:
        found["coordination_user"] = "${ETCD_USERNAME}"
        found["coordination_password"] = "${ETCD_PASSWORD}"  # noqa: S105
    if settings.auth.mode is AuthMode.KUBERNETES:
        found["auth"] = {
            "mode": "kubernetes",
            "api_server": "https://kubernetes.default.svc",
            "token_path": f"{TOKEN_DIR}/token",
            "ca_path": f"{TOKEN_DIR}/ca.crt",
            "peer_token_path": f"{PEER_TOKEN_DIR}/token",
        }
    if settings.tls.secret_name:
        found["tls"] = {
            "cert": f"{TLS_DIR}/tls.crt",
            "key": f"{TLS_DIR}/tls.key",
            "ca": f"{TLS_DIR}/ca.crt",
        }
    return json.dumps(found, indent=2, sort_keys=True)


def registry_prefix(settings: OperatorSettings, namespace: str) -> str:
    """Return where a namespace's registry stands in etcd."""
    return f"{settings.etcd.prefix}/{namespace}"
