"""`python -m tidewater_testing.chaos --minutes 10`: chaos for as long as it is wanted."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tidewater_testing.chaos.run import Chaos


def main() -> int:
    """Run; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of events (10)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="what happens when")
    parser.add_argument("--store", choices=("etcd", "sqlite"), default="etcd")
    parser.add_argument("--keep", type=Path, help="leave logs and tables in this directory")
    args = parser.parse_args()

    def say(line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    with tempfile.TemporaryDirectory(prefix="tidewater-chaos-") as scratch:
        directory = args.keep or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        chaos = Chaos(
            directory, seed=args.seed, seconds=args.minutes * 60, store=args.store, say=say
        )
        outcome = chaos.run()
    say(outcome.told())
    return 1 if outcome.found else 0


if __name__ == "__main__":
    sys.exit(main())
