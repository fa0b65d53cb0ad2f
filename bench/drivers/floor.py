"""The floor: write and fdatasync on the same disk, with nothing around them."""

import os
import sys
import time
from typing import Any

from bench import driver, payload

GROW_BYTES = 64 << 20


def main(folder: str) -> None:
    """Serve."""
    appended = os.open(os.path.join(folder, "append"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    reserved = os.open(os.path.join(folder, "reserved"), os.O_CREAT | os.O_WRONLY)
    os.posix_fallocate(reserved, 0, GROW_BYTES)
    os.write(reserved, bytes(GROW_BYTES))
    os.fsync(reserved)
    os.lseek(reserved, 0, os.SEEK_SET)

    def latency(size: int, count: int, into: str) -> dict[str, Any]:
        """Time single writes, each with its own fdatasync."""
        target = appended if into == "append" else reserved
        samples = []
        for message in payload.messages(count, size):
            began = time.perf_counter()
            os.write(target, message)
            os.fdatasync(target)
            samples.append((time.perf_counter() - began) * 1e6)
        return {"us": samples}

    driver.serve({"latency": latency})


if __name__ == "__main__":
    main(sys.argv[1])
