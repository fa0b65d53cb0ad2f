"""The jars that Spark needs beside its own: found in its directory, in the cache, or fetched once.

An image has them among Spark's jars. Elsewhere Maven fetches them into the user's cache directory;
each is checked against its SHA-256. Without Maven, Spark's own resolver is asked to fetch.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tidewater_core.errors import Retryable

ICEBERG: Final = "1.12.0"
ATTEMPTS_MAX: Final = 3


@dataclass(frozen=True, slots=True)
class Artifact:
    """One jar in a Maven repository."""

    group: str
    name: str
    version: str
    sha256: str

    @property
    def file(self) -> str:
        """The name of the file."""
        return f"{self.name}-{self.version}.jar"

    @property
    def coordinate(self) -> str:
        """How Maven and Spark write it."""
        return f"{self.group}:{self.name}:{self.version}"


ARTIFACTS: Final = (
    Artifact(
        "org.apache.iceberg",
        "iceberg-spark-runtime-4.1_2.13",
        ICEBERG,
        "3123c3798af642dd537230923548e013ef41cc28b6626e5225808cf5670a0f82",
    ),
    Artifact(
        "org.apache.iceberg",
        "iceberg-aws-bundle",
        ICEBERG,
        "dd7e49ffa4ac9b215bed846581991259e3aec9bb2fa08d6cec029c46cd66d957",
    ),
    Artifact(
        "org.postgresql",
        "postgresql",
        "42.7.14",
        "73914527305a40cce504b0d3d90b23caf565136912d607ae8ae7c5895512332c",
    ),
    Artifact(
        "org.xerial",
        "sqlite-jdbc",
        "3.50.3.0",
        "a3f53a2aa15ae9425a9e793bbe9c8e5288febeb4b65ef5c1a4e80d4c2045cf08",
    ),
)


@dataclass(frozen=True, slots=True)
class Jars:
    """What the session is told."""

    classpath: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    """Coordinates that Spark is to fetch itself."""


def find_jars(spark_jars: Path, cache: Path, say: Callable[[str], None]) -> Jars:
    """Return the jars that are not among Spark's own, fetching them first if need be."""
    missing = [each for each in ARTIFACTS if not (spark_jars / each.file).exists()]
    # An image carries Iceberg; the driver of the embedded catalog has no use there.
    if not missing or [each.name for each in missing] == ["sqlite-jdbc"]:
        return Jars()
    target = cache / f"spark-{_digest()}"
    if not target.is_dir():
        if shutil.which("mvn") is None:
            say("Maven was not found: Spark fetches the Iceberg jars itself")
            return Jars(packages=tuple(each.coordinate for each in missing))
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / "spark.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_dir():  # another process may have fetched while we waited
                _fetch(target, say)
    return Jars(classpath=tuple(str(target / each.file) for each in missing))


def _digest() -> str:
    text = " ".join(f"{each.coordinate}@{each.sha256}" for each in ARTIFACTS)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _fetch(target: Path, say: Callable[[str], None]) -> None:
    say("fetching the Iceberg jars (132 MB, once) ...")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetching-") as scratch:
        jars = Path(scratch) / "jars"
        pom = Path(scratch) / "pom.xml"
        pom.write_text(pom_text())
        for attempt in range(1, ATTEMPTS_MAX + 1):
            done = subprocess.run(
                [  # noqa: S607 - Maven is wherever the PATH says
                    "mvn",
                    "-B",
                    "-q",
                    "-f",
                    str(pom),
                    "dependency:copy-dependencies",
                    "-DexcludeTransitive=true",
                    f"-DoutputDirectory={jars}",
                ],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode == 0:
                break
            say(f"attempt {attempt} of {ATTEMPTS_MAX} failed: {done.stdout[-500:].strip()}")
        else:
            raise Retryable("JarsMissing", "Maven could not fetch the Iceberg jars")
        for each in ARTIFACTS:
            _check(jars / each.file, each)
        os.replace(jars, target)  # whole or not at all


def _check(path: Path, artifact: Artifact) -> None:
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != artifact.sha256:
        raise Retryable("JarsDamaged", f"{path.name}: SHA-256 is {found}, not {artifact.sha256}")


def pom_text() -> str:
    """Write the project that makes Maven fetch the jars."""
    entries = "".join(
        f"<dependency><groupId>{each.group}</groupId><artifactId>{each.name}</artifactId>"
        f"<version>{each.version}</version></dependency>"
        for each in ARTIFACTS
    )
    return (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>dev.tidewater</groupId><artifactId>spark-jars</artifactId><version>1</version>"
        f"<packaging>pom</packaging><dependencies>{entries}</dependencies></project>\n"
    )
