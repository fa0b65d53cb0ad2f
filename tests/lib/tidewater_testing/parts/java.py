"""Finding a Java that runs the REST catalog server, and getting one where that is allowed."""

import os
import re
import shutil
import subprocess
from pathlib import Path

JAVA_VERSION_MIN = 17


class MissingToolError(RuntimeError):
    """A tool is not there and cannot be installed; the message says what to do."""


def java_version(java: str) -> int | None:
    """Return the major version of a `java` program, or None when it does not run."""
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30)
    except OSError:
        return None
    found = re.search(r'version "(\d+)', answer.stderr)
    return int(found.group(1)) if found else None


def find_java() -> str:
    """Return a Java of at least 17: JAVA_HOME, then PATH, then (as root on Debian) installed."""
    for candidate in _candidates():
        version = java_version(candidate)
        if version is not None and version >= JAVA_VERSION_MIN:
            return candidate
    apt_install("openjdk-17-jre-headless", why=f"no Java of at least {JAVA_VERSION_MIN} was found")
    return "java"


def _candidates() -> list[str]:
    home = os.environ.get("JAVA_HOME")
    found = [str(Path(home) / "bin" / "java")] if home else []
    return [*found, "java"]


def apt_install(package: str, why: str) -> None:
    """Install a Debian package when we may, else say what a person must do."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise MissingToolError(f"{why}: please install it (Debian: apt-get install {package})")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    apt = ["apt-get", "-qq", "-o", "Dpkg::Use-Pty=0"]
    subprocess.run([*apt, "update"], check=True, env=quiet)
    subprocess.run(
        [*apt, "install", "-y", "--no-install-recommends", package], check=True, env=quiet
    )
