"""Fetches the jars of the REST catalog server once: `python -m tidewater_testing.parts.fetch`.

Maven resolves them (Debian's package is installed when it is missing and we are root). They are
kept under the user's cache directory, keyed by the content of the pom, so that a change of
versions fetches anew and two test runs at once do it once.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tidewater_testing.parts.java import apt_install, find_java

POM = Path(__file__).with_name("rest-catalog.pom.xml")
FETCH_ATTEMPTS_MAX = 3
FETCH_PAUSE_S = 5.0


def cache_root() -> Path:
    """Return where fetched parts are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "tidewater"


def rest_catalog_jars() -> Path:
    """Return the directory of the jars, fetching them first when they are not there."""
    digest = hashlib.sha256(POM.read_bytes()).hexdigest()[:16]
    target = cache_root() / f"rest-catalog-{digest}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "fetch.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():  # another run may have fetched while we waited
            _fetch(target)
    return target


def _fetch(target: Path) -> None:
    if shutil.which("mvn") is None:
        apt_install("maven", why="Maven, which fetches the REST catalog server, was not found")
    find_java()
    _say("fetching the Iceberg REST catalog server (about 85 MB, once) ...")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetching-") as scratch:
        jars = Path(scratch) / "jars"
        _run_maven(jars)
        jars.rename(target)  # whole or not at all
    count = len(list(target.glob("*.jar")))
    _say(f"fetched {count} jars in {time.monotonic() - begun:.0f} s into {target}")


def _run_maven(jars: Path) -> None:
    # The pom is copied beside the jars: Maven writes a target/ directory next to it.
    pom = jars.parent / "pom.xml"
    shutil.copyfile(POM, pom)
    command = ["mvn", "-B", "-q", "-f", str(pom), "dependency:copy-dependencies"]
    for attempt in range(1, FETCH_ATTEMPTS_MAX + 1):
        done = subprocess.run(
            [*command, f"-DoutputDirectory={jars}"], capture_output=True, text=True
        )
        if done.returncode == 0:
            return
        _say(f"attempt {attempt} of {FETCH_ATTEMPTS_MAX} failed:\n{done.stdout[-2000:]}")
        time.sleep(FETCH_PAUSE_S)
    msg = "Maven could not fetch the REST catalog server; its last words stand above"
    raise RuntimeError(msg)


def _say(text: str) -> None:
    sys.stderr.write(f"tests: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.stdout.write(f"{rest_catalog_jars()}\n")
