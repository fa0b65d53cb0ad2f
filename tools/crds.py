"""Write crds/*.yaml and the chart's copies from the models in core/, or with --check compare."""

import argparse
import sys
from pathlib import Path

from tidewater_core.crd.generate import render

ROOT = Path(__file__).resolve().parent.parent
# Helm packs nothing that lies outside a chart's folder, hence the second place.
FOLDERS = (ROOT / "crds", ROOT / "charts/tidewater/files/crds")


def main() -> int:
    """Write the files, or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if stale")
    check: bool = parser.parse_args().check
    wanted = {folder / name: text for folder in FOLDERS for name, text in render().items()}
    stale = [p for p, text in wanted.items() if not p.is_file() or p.read_text() != text]
    extra = [p for folder in FOLDERS for p in folder.glob("*.yaml") if p not in wanted]
    if check:
        for path in stale + extra:
            place = path.relative_to(ROOT)
            print(f"{place} is not what the models say; run `make crds`", file=sys.stderr)
        return 1 if stale or extra else 0
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path])
        print(f"wrote {path.relative_to(ROOT)}")
    for path in extra:
        path.unlink()
        print(f"removed {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
