"""Executors as pods: Spark's settings for a driver pod in client mode. Pure.

The driver is the pod that we run in; it needs `pods` (get, list, watch, create, delete,
deletecollection) in its own namespace and nothing else. Executors belong to the driver's pod: when
that is deleted, so are they.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tidewater_core.errors import Invalid
from tidewater_core.units import ByteSize

MASTER: Final = "k8s://https://kubernetes.default.svc"
DRIVER_PORT: Final = 7078
BLOCK_PORT: Final = 7079
CONTAINER: Final = "executor"
USER_ID: Final = 65532
VARIABLES: Final = ("POD_NAME", "POD_NAMESPACE", "POD_IP", "PIPELINE_IMAGE")
"""What the pod must be told of itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorOptions:
    """How many, and how large."""

    count: int
    cores: int = 1
    memory: ByteSize = ByteSize("1Gi")
    """Heap of each; the pod gets Spark's overhead on top."""


def executor_conf(
    options: ExecutorOptions, environment: Mapping[str, str], template: str
) -> dict[str, str]:
    """Return the settings of a session with executor pods; `template` is their pod template."""
    missing = [name for name in VARIABLES if not environment.get(name)]
    if missing:
        raise Invalid(
            "NotInAPod",
            f"--executors needs the variables {', '.join(missing)} (see maintenance.md)",
        )
    return {
        "spark.submit.deployMode": "client",
        "spark.driver.host": environment["POD_IP"],
        "spark.driver.bindAddress": "0.0.0.0",  # noqa: S104 - the pod's own address, no other
        "spark.driver.port": str(DRIVER_PORT),
        "spark.driver.blockManager.port": str(BLOCK_PORT),
        "spark.executor.cores": str(options.cores),
        "spark.executor.memory": spark_memory(options.memory),
        # Executors come for the work there is, and go when it is done.
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.shuffleTracking.enabled": "true",
        "spark.dynamicAllocation.minExecutors": "1",
        "spark.dynamicAllocation.initialExecutors": "1",
        "spark.dynamicAllocation.maxExecutors": str(options.count),
        "spark.dynamicAllocation.executorIdleTimeout": "30s",
        "spark.kubernetes.namespace": environment["POD_NAMESPACE"],
        "spark.kubernetes.driver.pod.name": environment["POD_NAME"],
        "spark.kubernetes.container.image": environment["PIPELINE_IMAGE"],
        "spark.kubernetes.executor.podTemplateFile": template,
        "spark.kubernetes.executor.podTemplateContainerName": CONTAINER,
        "spark.kubernetes.executor.label.app.kubernetes.io/name": "tidewater",
        "spark.kubernetes.executor.label.app.kubernetes.io/component": "maintenance-executor",
        # Nothing but pods is asked of the API.
        "spark.kubernetes.executor.disableConfigMap": "true",
        "spark.kubernetes.driver.ownPersistentVolumeClaim": "false",
        "spark.kubernetes.driver.reusePersistentVolumeClaim": "false",
        "spark.kubernetes.driver.service.deleteOnTermination": "false",
    }


def spark_memory(size: ByteSize) -> str:
    """Write a size as Spark reads it, in whole MiB."""
    return f"{int(size) // 1024**2}m"


def pod_template() -> str:
    """Write the pod template of executors: what the restricted Pod Security level asks for."""
    pod: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "spec": {
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER_ID,
                "runAsGroup": USER_ID,
                "fsGroup": USER_ID,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": CONTAINER,
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                    "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108
                }
            ],
            "volumes": [{"name": "tmp", "emptyDir": {}}],
        },
    }
    return json.dumps(pod)
