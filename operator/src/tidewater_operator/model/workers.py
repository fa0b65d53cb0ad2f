"""The manifests of a pool's workers: StatefulSet, Services, and what goes with them. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tidewater_core.crd.pool import Pool, PoolSpec
from tidewater_core.names import LABEL_COMPONENT
from tidewater_core.security import AUDIENCE
from tidewater_operator.model.names import (
    ANNOTATION_CONFIG,
    CATALOG_SECRET,
    ETCD_SECRET,
    FLIGHT_PORT,
    HTTP_PORT,
    MANAGER,
    NAMESPACE_SERVICE,
    WORKER_ACCOUNT,
    WORKER_CONTAINER,
    Manifest,
    headless_name,
    labels,
    owner,
    owners,
    selector_labels,
    set_name,
    shared_labels,
)
from tidewater_operator.model.settings_file import (
    DATA_DIR,
    ETCD_DIR,
    PEER_TOKEN_DIR,
    RUN_DIR,
    TLS_DIR,
)
from tidewater_operator.settings import AuthMode, OperatorSettings

USER: Final = 65532
LEAVE_S: Final = 3
"""A worker that is to stop goes on for so long: nodes learn a moment later that it leaves."""
GRACE_S: Final = 45 + LEAVE_S
"""Time to stop: more than the worker's own `shutdown_deadline` of 30 s."""
PEER_TOKEN_S: Final = 3600
"""Life of the token that workers show each other; the kubelet replaces it before it ends."""
POD_SECURITY: Final[Manifest] = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY: Final[Manifest] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def filled(spec: PoolSpec, settings: OperatorSettings) -> PoolSpec:
    """Fill in what a pool leaves out from the operator's defaults."""
    defaults = settings.pool_defaults
    update: dict[str, Any] = {
        name: getattr(defaults, name)
        for name in ("resources", "node_selector", "tolerations", "affinity", "topology_spread")
        if not getattr(spec, name)
    }
    update["image"] = spec.image or defaults.image or settings.worker_image
    if spec.storage.storage_class is None and defaults.storage.storage_class is not None:
        update["storage"] = spec.storage.model_copy(
            update={"storage_class": defaults.storage.storage_class}
        )
    return spec.model_copy(update=update)


def stateful_set(
    pool: Pool,
    settings: OperatorSettings,
    *,
    replicas: int,
    config_hash: str,
    etcd_keys: frozenset[str] = frozenset(),
) -> Manifest:
    """Return the workers themselves; `etcd_keys` are the keys of the etcd Secret, if any."""
    name, spec = pool.metadata.name, filled(pool.spec, settings)
    claim: Manifest = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": str(spec.storage.size)}},
    }
    if spec.storage.storage_class:
        claim["storageClassName"] = spec.storage.storage_class
    template = {
        "metadata": {
            "labels": labels(name),
            "annotations": {**spec.pod_annotations, ANNOTATION_CONFIG: config_hash},
        },
        "spec": _pod(pool, spec, settings, etcd_keys),
    }
    return {
        **_head(pool, "apps/v1", "StatefulSet", set_name(name)),
        "spec": {
            "serviceName": headless_name(name),
            "replicas": replicas,
            # All at once: a worker that cannot start must not keep others from starting. Updates
            # still go one by one.
            "podManagementPolicy": "Parallel",
            "updateStrategy": {"type": "RollingUpdate"},
            "persistentVolumeClaimRetentionPolicy": {
                "whenDeleted": "Retain",
                "whenScaled": "Retain",
            },
            "revisionHistoryLimit": 3,
            "selector": {"matchLabels": selector_labels(name)},
            "template": template,
            "volumeClaimTemplates": [
                {
                    "apiVersion": "v1",
                    "kind": "PersistentVolumeClaim",
                    "metadata": {"name": "data", "labels": labels(name)},
                    "spec": claim,
                }
            ],
        },
    }


def settings_files(
    pool: str, settings: OperatorSettings, etcd_keys: frozenset[str]
) -> list[Manifest]:
    """Return what stands below /etc/tidewater.

    One volume: inside a mount that is read-only no other can be made.
    """
    found: list[Manifest] = [{"configMap": {"name": set_name(pool)}}]
    for secret, folder, keys in (
        (settings.tls.secret_name, TLS_DIR, {"tls.crt", "tls.key", "ca.crt"}),
        (ETCD_SECRET, ETCD_DIR, etcd_keys & {"tls.crt", "tls.key", "ca.crt"}),
    ):
        if secret and keys:
            place = folder.rpartition("/")[2]
            items = [{"key": key, "path": f"{place}/{key}"} for key in sorted(keys)]
            found.append({"secret": {"name": secret, "items": items}})
    return found


def _pod(
    pool: Pool, spec: PoolSpec, settings: OperatorSettings, etcd_keys: frozenset[str]
) -> Manifest:
    name = pool.metadata.name
    volumes: list[Manifest] = [
        {"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}},
        {"name": "tmp", "emptyDir": {"sizeLimit": str(settings.tmp_bytes)}},
        {"name": "settings", "projected": {"sources": settings_files(name, settings, etcd_keys)}},
    ]
    mounts: list[Manifest] = [
        {"name": "data", "mountPath": DATA_DIR},
        {"name": "run", "mountPath": RUN_DIR},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
        {"name": "settings", "mountPath": "/etc/tidewater", "readOnly": True},
    ]
    if settings.auth.mode is AuthMode.KUBERNETES:
        token = {"path": "token", "audience": AUDIENCE, "expirationSeconds": PEER_TOKEN_S}
        source = {"sources": [{"serviceAccountToken": token}]}
        volumes.append({"name": "peer-token", "projected": source})
        mounts.append({"name": "peer-token", "mountPath": PEER_TOKEN_DIR, "readOnly": True})
    pod: Manifest = {
        "serviceAccountName": WORKER_ACCOUNT,
        # Only to ask who somebody is; other workers are shown the one above.
        "automountServiceAccountToken": settings.auth.mode is AuthMode.KUBERNETES,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_S,
        "securityContext": POD_SECURITY,
        "topologySpreadConstraints": [
            {"labelSelector": {"matchLabels": selector_labels(name)}, **item}
            for item in spec.topology_spread or _SPREAD
        ],
        "containers": [_container(spec, settings, etcd_keys, mounts)],
        "volumes": volumes,
    }
    if spec.node_selector:
        pod["nodeSelector"] = spec.node_selector
    if spec.tolerations:
        pod["tolerations"] = spec.tolerations
    if spec.affinity:
        pod["affinity"] = spec.affinity
    if settings.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": item} for item in settings.image_pull_secrets]
    return pod


_SPREAD: Final = (
    {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
    },
)


def _container(
    spec: PoolSpec, settings: OperatorSettings, etcd_keys: frozenset[str], mounts: list[Manifest]
) -> Manifest:
    scheme = "HTTPS" if settings.tls.secret_name else "HTTP"
    env: list[Manifest] = [
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    ]
    env += etcd_env(etcd_keys)
    ports = [{"name": "http", "containerPort": HTTP_PORT}]
    if spec.flight:
        ports.append({"name": "flight", "containerPort": FLIGHT_PORT})
    container: Manifest = {
        "name": WORKER_CONTAINER,
        "image": spec.image,
        "imagePullPolicy": settings.image_pull_policy,
        "args": ["worker", "--settings=/etc/tidewater/settings.json"],
        "env": env,
        "ports": ports,
        "startupProbe": _probe("/healthz", scheme, 1, 1, 120),
        "readinessProbe": _probe("/readyz", scheme, 2, 2, 3),
        "livenessProbe": _probe("/healthz", scheme, 10, 5, 6),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(LEAVE_S)]}}},
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": mounts,
    }
    if settings.catalog_secret:
        container["envFrom"] = [{"secretRef": {"name": CATALOG_SECRET}}]
    if spec.resources:
        container["resources"] = spec.resources
    return container


def etcd_env(etcd_keys: frozenset[str]) -> list[Manifest]:
    """Return the variables that the settings file needs for etcd."""
    return [
        {
            "name": f"ETCD_{key.upper()}",
            "valueFrom": {"secretKeyRef": {"name": ETCD_SECRET, "key": key}},
        }
        for key in ("username", "password")
        if "username" in etcd_keys
    ]


def _probe(path: str, scheme: str, period_s: int, timeout_s: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": "http", "scheme": scheme},
        "periodSeconds": period_s,
        "timeoutSeconds": timeout_s,
        "failureThreshold": failures,
    }


def _head(pool: Pool, api_version: str, kind: str, name: str) -> Manifest:
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": pool.metadata.namespace,
            "labels": labels(pool.metadata.name),
            "ownerReferences": [owner(pool)],
        },
    }


def _ports(flight: bool) -> list[Manifest]:
    found: list[Manifest] = [{"name": "http", "port": HTTP_PORT, "targetPort": "http"}]
    if flight:
        found.append({"name": "flight", "port": FLIGHT_PORT, "targetPort": "flight"})
    return found


def around(pool: Pool, settings: OperatorSettings, settings_json: str) -> list[Manifest]:
    """Return what the workers of a pool need besides themselves."""
    name = pool.metadata.name
    ports = _ports(pool.spec.flight)
    match = {"matchLabels": selector_labels(name)}
    found: list[Manifest] = [
        {
            **_head(pool, "v1", "ConfigMap", set_name(name)),
            "data": {"settings.json": settings_json},
        },
        {
            **_head(pool, "v1", "Service", headless_name(name)),
            "spec": {
                "clusterIP": "None",
                # A worker that is not ready for clients must still be found by its peers: they
                # fetch from it what a hand-over needs.
                "publishNotReadyAddresses": True,
                "selector": selector_labels(name),
                "ports": ports,
            },
        },
        {
            **_head(pool, "v1", "Service", set_name(name)),
            "spec": {"selector": selector_labels(name), "ports": ports},
        },
        {
            **_head(pool, "policy/v1", "PodDisruptionBudget", set_name(name)),
            # Workers that are not ready serve nobody: those of a broken pool hold up no node.
            "spec": {
                "maxUnavailable": 1,
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
                "selector": match,
            },
        },
    ]
    if settings.network_policy.enabled:
        doors = [{"port": port["targetPort"], "protocol": "TCP"} for port in ports]
        found.append(
            {
                **_head(pool, "networking.k8s.io/v1", "NetworkPolicy", set_name(name)),
                "spec": {
                    "podSelector": match,
                    "policyTypes": ["Ingress"],
                    "ingress": [{"ports": doors}],
                },
            }
        )
    return found


def of_namespace(
    namespace: str,
    pools: Sequence[Manifest],
    settings: OperatorSettings,
    secrets: Mapping[str, Mapping[str, str]],
) -> list[Manifest]:
    """Return what all pools of a namespace share; it goes when the last of them does.

    `pools` are all of them, those whose spec cannot be read included: their workers run on.
    `secrets` are those to copy, by name, with their data as the API has it (base64).
    """
    head = {
        "namespace": namespace,
        "labels": shared_labels(),
        "ownerReferences": owners(pools),
    }
    with_flight = all((pool.get("spec") or {}).get("flight", True) for pool in pools)
    found: list[Manifest] = [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {**head, "name": WORKER_ACCOUNT},
            "automountServiceAccountToken": False,
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {**head, "name": NAMESPACE_SERVICE},
            "spec": {
                "selector": {
                    "app.kubernetes.io/name": "tidewater",
                    LABEL_COMPONENT: "worker",
                    "app.kubernetes.io/managed-by": MANAGER,
                },
                "ports": _ports(with_flight),
            },
        },
    ]
    found += [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {**head, "name": name},
            "type": "Opaque",
            "data": dict(data),
        }
        for name, data in secrets.items()
    ]
    if settings.auth.mode is AuthMode.KUBERNETES:
        found.append(role_binding(head, WORKER_ACCOUNT, settings.auth.worker_role, WORKER_ACCOUNT))
    return found


def role_binding(head: Manifest, name: str, role: str, account: str) -> Manifest:
    """Return the binding that gives a service account of this namespace a ClusterRole."""
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {**head, "name": name},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": role,
        },
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": head["namespace"]}],
    }
