"""The table process: `python -m tidewater_worker.table.process SETTINGS.json`."""

import gc
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

# Read by Arrow when it is loaded. With its own allocator freed memory stays with the process
# (200 MB after a busy hour); with the system's it goes back when a topic is idle (140 MB).
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")

from tidewater_core.clock import SystemClock, SystemIds
from tidewater_core.settings import WorkerSettings
from tidewater_worker import memory
from tidewater_worker.link.server import serve
from tidewater_worker.open_files import allow_open_files
from tidewater_worker.ports import TableEngine, TopicState
from tidewater_worker.table.service import Hand, TableService

SOCKET_NAME: Final = "table.sock"
HEAPS_MAX: Final = 2


def main(arguments: list[str]) -> int:
    """Serve the link until SIGTERM."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m tidewater_worker.table.process SETTINGS.json\n")
        return 2
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s table %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    # Chatty at INFO for every file that is opened.
    logging.getLogger("pyiceberg").setLevel(logging.WARNING)
    memory.set_up(HEAPS_MAX)
    allow_open_files()
    settings = WorkerSettings.from_json(Path(arguments[0]).read_bytes())

    def make_engine(notify: Callable[[TopicState], None], hand: Hand) -> TableEngine:
        return TableService(settings, SystemClock(), SystemIds(), notify, hand=hand)

    # What was imported lives as long as the process: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    serve(make_engine, settings.run_dir / SOCKET_NAME, settings.shutdown_deadline.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
