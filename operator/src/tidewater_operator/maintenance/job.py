"""The manifest of a Spark job: a driver that does the work itself, or has executors. Pure."""

import hashlib
from typing import Final

from tidewater_core.crd.topic import TopicSpec
from tidewater_core.names import (
    ANNOTATION_MAINTAIN,
    API_VERSION,
    LABEL_COMPONENT,
    LABEL_TOPIC,
)
from tidewater_core.units import ByteSize, Duration
from tidewater_operator.maintenance.decide import ANNOTATION_TRIGGER, Trigger
from tidewater_operator.model.names import (
    CATALOG_SECRET,
    PIPELINE_ACCOUNT,
    Manifest,
    shared_labels,
)
from tidewater_operator.model.workers import (
    CONTAINER_SECURITY,
    POD_SECURITY,
    etcd_env,
    settings_files,
)
from tidewater_operator.settings import OperatorSettings

OVERHEAD: Final = ByteSize("768Mi")
"""Of a driver besides its heap: Python, and what the JVM has outside of it."""
TRIES: Final = 2
_NAME_CHARS_MAX: Final = 63
_PREFIX: Final = "tidewater-maintain-"


def job_name(topic: str) -> str:
    """Return the one name of a topic's job: the API server lets no two of them be."""
    name = _PREFIX + topic
    if len(name) <= _NAME_CHARS_MAX:
        return name
    digest = hashlib.sha256(topic.encode()).hexdigest()[:8]
    return f"{name[: _NAME_CHARS_MAX - 9].rstrip('-')}-{digest}"


def wants_executors(spec: TopicSpec, work_bytes: int) -> bool:
    """Tell whether there is enough work for more than one process."""
    spark = spec.maintenance.spark
    return spark.executors > 0 and work_bytes >= spark.local_below


def job(
    topic: Manifest,
    spec: TopicSpec,
    pool: str,
    trigger: Trigger,
    settings: OperatorSettings,
    *,
    work_bytes: int,
    word: str = "",
    etcd_keys: frozenset[str] = frozenset(),
) -> Manifest:
    """Return a topic's job.

    `pool` is whose settings it reads, `word` the person's word that it answers.
    """
    meta = topic["metadata"]
    name = meta["name"]
    labels = {**shared_labels(), LABEL_COMPONENT: "pipeline", LABEL_TOPIC: name}
    # A topic that is deleted needs no upkeep.
    owner = {
        "apiVersion": API_VERSION,
        "kind": "Topic",
        "name": name,
        "uid": meta["uid"],
        "controller": True,
        "blockOwnerDeletion": False,
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": job_name(name),
            "namespace": meta["namespace"],
            "labels": labels,
            "annotations": {ANNOTATION_TRIGGER: str(trigger), ANNOTATION_MAINTAIN: word},
            "ownerReferences": [owner],
        },
        "spec": {
            "backoffLimit": TRIES,
            "activeDeadlineSeconds": int(settings.maintenance.deadline.seconds),
            "ttlSecondsAfterFinished": int(settings.maintenance.keep.seconds),
            "podFailurePolicy": {"rules": _FAILURES},
            "template": {
                "metadata": {"labels": labels},
                "spec": _pod(meta, spec, pool, settings, work_bytes, etcd_keys),
            },
        },
    }


_FAILURES: Final = [
    {
        "action": "FailJob",  # a second try would say the same
        "onExitCodes": {"containerName": "driver", "operator": "In", "values": [2, 3]},
    },
    {
        "action": "Ignore",  # its node was drained
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    },
]


def _pod(
    meta: Manifest,
    spec: TopicSpec,
    pool: str,
    settings: OperatorSettings,
    work_bytes: int,
    etcd_keys: frozenset[str],
) -> Manifest:
    spread = wants_executors(spec, work_bytes)
    pod: Manifest = {
        "restartPolicy": "Never",
        "serviceAccountName": PIPELINE_ACCOUNT,
        # Only who makes executors.
        "automountServiceAccountToken": spread,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 30,
        "securityContext": POD_SECURITY,
        "containers": [_driver(meta, spec, settings, spread, etcd_keys)],
        "volumes": [
            {"name": "tmp", "emptyDir": {}},
            {
                "name": "settings",
                "projected": {"sources": settings_files(pool, settings, etcd_keys)},
            },
        ],
    }
    if settings.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": item} for item in settings.image_pull_secrets]
    return pod


def _driver(
    meta: Manifest,
    spec: TopicSpec,
    settings: OperatorSettings,
    spread: bool,
    etcd_keys: frozenset[str],
) -> Manifest:
    spark = spec.maintenance.spark
    args = ["tidewater-pipeline", "maintain", "--topic", f"{meta['namespace']}/{meta['name']}"]
    args += ["--settings", "/etc/tidewater/settings.json", "--memory", str(spark.driver_memory)]
    # The rest of the time is that of what comes after compaction.
    args += ["--budget", str(Duration(settings.maintenance.deadline.ms // 2))]
    if spread:
        args += ["--executors", str(spark.executors)]
        args += ["--executor-cores", str(spark.executor_cores)]
        args += ["--executor-memory", str(spark.executor_memory)]
    fields = {
        "POD_NAME": "metadata.name",
        "POD_NAMESPACE": "metadata.namespace",
        "POD_IP": "status.podIP",
    }
    env: list[Manifest] = [
        {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for variable, path in fields.items()
    ]
    env.append({"name": "PIPELINE_IMAGE", "value": settings.pipeline_image})
    memory = str(ByteSize(spark.driver_memory + OVERHEAD))
    driver: Manifest = {
        "name": "driver",
        "image": settings.pipeline_image,
        "imagePullPolicy": settings.image_pull_policy,
        "args": args,
        "env": [*env, *etcd_env(etcd_keys)],
        "resources": {
            "requests": {"cpu": settings.maintenance.driver_cpu, "memory": memory},
            "limits": {"memory": memory},
        },
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
            {"name": "settings", "mountPath": "/etc/tidewater", "readOnly": True},
        ],
    }
    if settings.catalog_secret:
        driver["envFrom"] = [{"secretRef": {"name": CATALOG_SECRET}}]
    return driver


def account(head: Manifest) -> Manifest:
    """Return the drivers' service account; `head` has namespace, labels and owners."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {**head, "name": PIPELINE_ACCOUNT},
        "automountServiceAccountToken": False,
    }
