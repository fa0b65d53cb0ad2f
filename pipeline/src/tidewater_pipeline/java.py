"""Finding a Java that Spark 4 runs on."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Final

from tidewater_core.errors import Invalid

JAVA_VERSION_MIN: Final = 17
PACKAGE: Final = "openjdk-17-jre-headless"
ON_PATH: Final = "java"


def parse_version(text: str) -> int | None:
    """Read the major version from what `java -version` says."""
    found = re.search(r'version "(\d+)', text)
    return int(found.group(1)) if found else None


def choose_java(environment: MutableMapping[str, str]) -> None:
    """Have Spark's scripts start the Java that was found: they take JAVA_HOME before the PATH."""
    java = find_java(environment)
    if java == ON_PATH:
        environment.pop("JAVA_HOME", None)  # there is none, or one that is too old
    else:
        environment["JAVA_HOME"] = str(Path(java).absolute().parents[1])


def find_java(environment: Mapping[str, str]) -> str:
    """Return a `java` of at least 17: JAVA_HOME, then the PATH, then Debian's (as root)."""
    home = environment.get("JAVA_HOME")
    candidates = [str(Path(home) / "bin" / "java")] if home else []
    seen: list[str] = []
    for candidate in [*candidates, ON_PATH]:
        version = _version(candidate)
        if version is not None and version >= JAVA_VERSION_MIN:
            return candidate
        seen.append(f"{candidate}: {'not found' if version is None else f'version {version}'}")
    if _install(environment):
        return ON_PATH
    raise Invalid(
        "JavaMissing",
        f"Spark needs Java {JAVA_VERSION_MIN} or newer ({'; '.join(seen)}). Install one (Debian: "
        f"apt-get install {PACKAGE}) or let JAVA_HOME name one",
    )


def _version(java: str) -> int | None:
    try:
        answer = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_version(answer.stderr)


def _install(environment: Mapping[str, str]) -> bool:
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return False
    quiet = {**environment, "DEBIAN_FRONTEND": "noninteractive"}
    apt = ["apt-get", "-qq"]
    for words in (["update"], ["install", "-y", "--no-install-recommends", PACKAGE]):
        if subprocess.run([*apt, *words], env=quiet, check=False).returncode != 0:
            return False
    return True
