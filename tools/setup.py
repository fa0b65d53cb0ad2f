"""Make .venv: `setup.py run` with what running needs, `setup.py dev` with everything.

`setup.py pipeline` makes .venv-pipeline beside it, for Spark's jobs. Needs only Python's standard
library (3.11 or newer); says what is missing otherwise. Quick when nothing changed: a stamp holds
the hash of all that an environment was made from.
"""

from __future__ import annotations  # an older Python must get as far as the message below

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PIPELINE_VENV = ROOT / ".venv-pipeline"
PIPELINE_STAMP = PIPELINE_VENV / ".ready"
"""`tidewater compact` looks for it."""
BOOTSTRAP = ROOT / "requirements" / "bootstrap.txt"
COMPONENTS = ("core", "coordination", "client", "worker", "operator", "pipeline")
REQUIREMENTS = {"run": ("worker.txt",), "dev": ("dev.txt",), "pipeline": ("pipeline.txt",)}
# The pipeline without PySpark: `tidewater compact` is there, and gets that when it is first used.
RUN_COMPONENTS = ("core", "coordination", "client", "worker", "pipeline")
PIPELINE_COMPONENTS = ("core", "coordination", "pipeline")


def say(text: str) -> None:
    """Tell progress, apart from what a command prints."""
    print(f"setup: {text}", file=sys.stderr, flush=True)


def run(*command: str | Path, env: dict[str, str] | None = None) -> None:
    """Run a command; its own messages say what went wrong."""
    subprocess.run([str(part) for part in command], check=True, cwd=ROOT, env=env)


def has_module(name: str) -> bool:
    """Say if this Python can run a module that Debian packages separately."""
    probe = [sys.executable, "-c", f"import {name}"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


def stamp_of(profile: str) -> str:
    """Hash all that the environment is made from."""
    digest = hashlib.sha256(f"{profile} {sys.version_info[:2]} {ROOT}".encode())
    files = [ROOT / "requirements" / name for name in REQUIREMENTS[profile]]
    files += [ROOT / component / "pyproject.toml" for component in COMPONENTS]
    for path in [*files, BOOTSTRAP, Path(__file__)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def is_current(profile: str) -> bool:
    """Say if there is already what this profile needs; the larger .venv serves the smaller."""
    if profile == "pipeline":
        return PIPELINE_STAMP.is_file() and PIPELINE_STAMP.read_text() == stamp_of(profile)
    profiles = ("run", "dev") if profile == "run" else ("dev",)
    return any(
        (VENV / f".stamp-{name}").is_file()
        and (VENV / f".stamp-{name}").read_text() == stamp_of(name)
        for name in profiles
    )


def apt_install(*packages: str) -> bool:
    """Install Debian packages if this machine lets us."""
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        return False
    say(f"installing {' '.join(packages)} with apt-get")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        run("apt-get", "update", "-qq", env=env)
        run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages, env=env)
    except subprocess.CalledProcessError:
        return False
    return True


def find_uv() -> list[str]:
    """Return the command that runs uv, after making one if there is none."""
    if found := shutil.which("uv"):
        return [found]
    if not (VENV / "bin" / "uv").exists():
        if not has_module("ensurepip") and not has_module("pip"):
            apt_install("python3-venv")
        make_uv()
    for place in (VENV / "bin" / "uv", ROOT / ".cache" / "uv" / "bin" / "uv"):
        if place.exists():
            return [str(place)]
    raise SystemExit("setup: uv was installed but cannot be found")


def make_uv() -> None:
    """Install uv (hash-pinned) by whatever this Python has."""
    pinned = ("--quiet", "--require-hashes", "-r", BOOTSTRAP)
    if has_module("ensurepip"):
        say("installing uv into .venv")
        if not (VENV / "bin" / "python").exists():
            run(sys.executable, "-m", "venv", VENV)
        run(VENV / "bin" / "python", "-m", "pip", "install", *pinned)
    elif has_module("pip"):
        say("installing uv into .cache")
        run(sys.executable, "-m", "pip", "install", *pinned, "--target", ROOT / ".cache" / "uv")
    else:
        raise SystemExit(
            "setup: this Python can make no environment. Install one of: uv, or Debian's "
            "python3-venv (apt-get install python3-venv), then try again."
        )


def install(uv: list[str], venv: Path, profile: str, components: tuple[str, ...]) -> None:
    """Put pinned packages and components of ours into an environment, which is made if need be."""
    python = venv / "bin" / "python"
    if not python.exists():
        run(*uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, venv)
    into: list[str | Path] = [*uv, "pip", "install", "--python", python]
    pinned: list[str | Path] = []
    for name in REQUIREMENTS[profile]:
        pinned += ["-r", ROOT / "requirements" / name]
    say(f"installing the pinned packages for {profile} (once; a few minutes on a slow line)")
    run(*into, "--require-hashes", *pinned)
    editable: list[str | Path] = []
    for name in components:
        editable += ["--editable", ROOT / name]
    say("installing Tidewater's own packages, editable")
    run(*into, "--quiet", "--no-deps", "--build-constraints", BOOTSTRAP, *editable)


def sync(profile: str) -> None:
    """Bring .venv to what the profile says."""
    install(find_uv(), VENV, profile, RUN_COMPONENTS if profile == "run" else COMPONENTS)
    for old in VENV.glob(".stamp-*"):
        old.unlink()
    (VENV / f".stamp-{profile}").write_text(stamp_of(profile))


def sync_pipeline() -> None:
    """Make the environment of Spark's jobs: PySpark is 450 MB, and few need it."""
    PIPELINE_STAMP.unlink(missing_ok=True)
    install(find_uv(), PIPELINE_VENV, "pipeline", PIPELINE_COMPONENTS)
    PIPELINE_STAMP.write_text(stamp_of("pipeline"))


def main() -> int:
    """Do what is missing."""
    if sys.version_info < (3, 11):  # noqa: UP036
        say(f"Python 3.11 or newer is needed; this is {sys.version.split()[0]} ({sys.executable})")
        say("give another one with: make PYTHON=python3.12 …")
        return 1
    profile = sys.argv[1] if len(sys.argv) > 1 else "dev"
    if profile not in REQUIREMENTS:
        say(f"{profile!r} is not one of {', '.join(REQUIREMENTS)}")
        return 2
    if is_current(profile):
        return 0
    begun = time.monotonic()
    try:
        if profile == "pipeline":
            sync_pipeline()
        else:
            sync(profile)
    except subprocess.CalledProcessError as error:
        say(f"failed: {' '.join(map(str, error.cmd))}")
        return 1
    say(f"ready after {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
