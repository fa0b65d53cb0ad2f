"""Write crds/*.yaml from the models in core/, or with --check say if they are out of date."""

import argparse
import sys
from pathlib import Path

from tidewater_core.crd.generate import render


def main() -> int:
    """Write the files, or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if stale")
    check: bool = parser.parse_args().check
    folder = Path(__file__).resolve().parent.parent / "crds"
    wanted = render()
    stale = [
        name
        for name, text in wanted.items()
        if not (folder / name).is_file() or (folder / name).read_text() != text
    ]
    extra = [path.name for path in folder.glob("*.yaml") if path.name not in wanted]
    if check:
        for name in stale + extra:
            print(f"crds/{name} is not what the models say; run `make crds`", file=sys.stderr)
        return 1 if stale or extra else 0
    folder.mkdir(exist_ok=True)
    for name in stale:
        (folder / name).write_text(wanted[name])
        print(f"wrote crds/{name}")
    for name in extra:
        (folder / name).unlink()
        print(f"removed crds/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
