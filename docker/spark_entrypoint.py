#!/usr/bin/env python3
"""Entry point of the pipeline image: run a command, or become a Spark executor.

Spark's Kubernetes scheduler starts executor pods with the single argument `executor` and describes
the executor in `SPARK_*` variables. pip's pyspark has the backend class but no script for it, so
this one turns the variables into the command line. Everything else is executed as given, replacing
this process, so that the JVM or spark-submit itself receives SIGTERM.
"""

import os
import sys
from collections.abc import Mapping, Sequence

BACKEND = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"

# Option of the backend -> variable that Spark sets in the executor pod.
BACKEND_OPTIONS = {
    "--driver-url": "SPARK_DRIVER_URL",
    "--executor-id": "SPARK_EXECUTOR_ID",
    "--cores": "SPARK_EXECUTOR_CORES",
    "--app-id": "SPARK_APPLICATION_ID",
    "--hostname": "SPARK_EXECUTOR_POD_IP",
    "--resourceProfileId": "SPARK_RESOURCE_PROFILE_ID",
    "--podName": "SPARK_EXECUTOR_POD_NAME",
}


def java_options(environment: Mapping[str, str]) -> list[str]:
    """Return the JVM options in the order of their numbers (SPARK_JAVA_OPT_0 and so on)."""
    prefix = "SPARK_JAVA_OPT_"
    numbers = sorted(int(k.removeprefix(prefix)) for k in environment if k.startswith(prefix))
    return [environment[f"{prefix}{n}"] for n in numbers]


def executor_command(environment: Mapping[str, str]) -> list[str]:
    """Return the command line of the executor that these variables describe."""
    missing = [v for v in BACKEND_OPTIONS.values() if v not in environment]
    if missing:
        message = f"not an executor pod of Spark: {', '.join(missing)} not set"
        raise SystemExit(message)
    memory = environment["SPARK_EXECUTOR_MEMORY"]
    classpath = [f"{environment['SPARK_HOME']}/jars/*"]
    if extra := environment.get("SPARK_CLASSPATH"):
        classpath.insert(0, extra)
    return [
        f"{environment['JAVA_HOME']}/bin/java",
        *java_options(environment),
        f"-Xms{memory}",
        f"-Xmx{memory}",
        "-cp",
        ":".join(classpath),
        BACKEND,
        *(part for option, name in BACKEND_OPTIONS.items() for part in (option, environment[name])),
    ]


def main(arguments: Sequence[str]) -> None:
    """Replace this process by the executor or by the given command."""
    if not arguments:
        raise SystemExit("usage: executor | COMMAND [ARGUMENT …]")
    command = executor_command(os.environ) if arguments[0] == "executor" else list(arguments)
    os.execvp(command[0], command)  # noqa: S606 - that is the whole purpose


if __name__ == "__main__":
    main(sys.argv[1:])
