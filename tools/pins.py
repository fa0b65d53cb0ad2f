"""Pin the requirements of every component, with hashes: requirements/*.in to *.txt.

The development set is resolved first and constrains the others, so that what is tested is what
is shipped. Our own packages are left out: they are installed from their folders.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS = (
    "tidewater",
    "tidewater-core",
    "tidewater-coordination",
    "tidewater-worker",
    "tidewater-operator",
    "tidewater-pipeline",
)
ORDER = ("dev", "worker", "client", "operator", "pipeline", "bootstrap")


def main() -> int:
    """Compile each file in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="take newer versions where allowed")
    upgrade: bool = parser.parse_args().upgrade
    places = (ROOT / ".venv" / "bin" / "uv", ROOT / ".cache" / "uv" / "bin" / "uv")
    uv = shutil.which("uv") or next(str(place) for place in places if place.exists())
    for name in ORDER:
        print(f"pinning requirements/{name}.txt", flush=True)
        command = [uv, "pip", "compile", f"requirements/{name}.in"]
        command += ["--output-file", f"requirements/{name}.txt", "--quiet"]
        command += ["--universal", "--python-version", "3.11", "--generate-hashes"]
        # Where packages came from is a matter of each machine.
        command += ["--no-emit-index-url", "--no-emit-find-links"]
        command += ["--custom-compile-command", "make pins"]
        command += ["--constraints", "requirements/constraints.in"]
        if name not in ("dev", "bootstrap"):
            command += ["--constraints", "requirements/dev.txt"]
        for package in OURS:
            command += ["--no-emit-package", package]
        if upgrade:
            command.append("--upgrade")
        result = subprocess.run(command, cwd=ROOT, check=False)
        if result.returncode != 0:
            return result.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
