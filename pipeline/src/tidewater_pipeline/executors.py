"""Executors as pods: Spark's settings for a driver pod in client mode. Pure.

The driver is the pod that we run in; it needs `pods` (get, list, watch, create, delete,
deletecollection) in its own namespace and nothing else. Executors belong to the driver's pod: when
that is deleted, so are they. What they need to be pulled and to reach the storage they have from
it: image pull secrets, service account, credentials in variables, where it may run.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tidewater_core.errors import Invalid
from tidewater_core.names import LABEL_COMPONENT, LABEL_PART_OF
from tidewater_core.units import ByteSize

MASTER: Final = "k8s://https://kubernetes.default.svc"
DRIVER_PORT: Final = 7078
BLOCK_PORT: Final = 7079
CONTAINER: Final = "executor"
DRIVER: Final = "driver"
"""Of the containers, as the operator names them."""
USER_ID: Final = 65532
VARIABLES: Final = ("POD_NAME", "POD_NAMESPACE", "POD_IP", "PIPELINE_IMAGE")
"""What the pod must be told of itself."""
STORAGE_VARIABLES: Final = ("AWS_", "AZURE_", "GOOGLE_")
"""Variables of the driver that its executors have, too; of others, such as etcd's, they have no
need. What comes from whole Secrets and ConfigMaps (`envFrom`) they have as well."""
INHERITED: Final = ("imagePullSecrets", "nodeSelector", "tolerations")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorOptions:
    """How many, and how large."""

    count: int
    cores: int = 1
    memory: ByteSize = ByteSize("1Gi")
    """Heap of each; the pod gets Spark's overhead on top."""


def executor_conf(
    options: ExecutorOptions,
    environment: Mapping[str, str],
    template: str,
    pod: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """Return the settings of a session with executor pods.

    `template` is the file of their pod template, `pod` the driver's.
    """
    missing = [name for name in VARIABLES if not environment.get(name)]
    if missing:
        raise Invalid(
            "NotInAPod",
            f"--executors needs the variables {', '.join(missing)} (see maintenance.md)",
        )
    return _inherited_conf(pod or {}) | {
        "spark.submit.deployMode": "client",
        # The driver's ports are open to the cluster's network. Spark draws a secret for each run
        # and gives it to the executors in a variable.
        "spark.authenticate": "true",
        "spark.network.crypto.enabled": "true",
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
        # By these two the chart's NetworkPolicy lets them to the storage.
        f"spark.kubernetes.executor.label.{LABEL_PART_OF}": "tidewater",
        f"spark.kubernetes.executor.label.{LABEL_COMPONENT}": "maintenance-executor",
        # Nothing but pods is asked of the API.
        "spark.kubernetes.executor.disableConfigMap": "true",
        "spark.kubernetes.driver.ownPersistentVolumeClaim": "false",
        "spark.kubernetes.driver.reusePersistentVolumeClaim": "false",
        "spark.kubernetes.driver.service.deleteOnTermination": "false",
    }


def spark_memory(size: ByteSize) -> str:
    """Write a size as Spark reads it, in whole MiB."""
    return f"{int(size) // 1024**2}m"


def _container(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the driver's container; empty if its pod is not known."""
    containers: list[Mapping[str, Any]] = pod.get("spec", {}).get("containers", [])
    return next((each for each in containers if each["name"] == DRIVER), {})


def _inherited_conf(pod: Mapping[str, Any]) -> dict[str, str]:
    conf: dict[str, str] = {}
    if policy := _container(pod).get("imagePullPolicy"):
        conf["spark.kubernetes.container.image.pullPolicy"] = policy
    if account := pod.get("spec", {}).get("serviceAccountName"):
        # For what a cloud gives by it; its token is not mounted.
        conf["spark.kubernetes.authenticate.executor.serviceAccountName"] = account
    return conf


def pod_template(pod: Mapping[str, Any] | None = None) -> str:
    """Write the pod template of executors: what the restricted Pod Security level asks for.

    `pod` is the driver's, of which they have what they need.
    """
    given, container = (pod or {}).get("spec", {}), _container(pod or {})
    variables = [
        each for each in container.get("env", []) if each["name"].startswith(STORAGE_VARIABLES)
    ]
    template: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "spec": {
            **{key: given[key] for key in INHERITED if given.get(key)},
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
                    "env": variables,
                    "envFrom": container.get("envFrom", []),
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
    return json.dumps(template)
