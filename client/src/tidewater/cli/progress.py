"""A line on stderr that tells how far long work has come."""

import sys
import time
from typing import Final, TextIO

TTY_PERIOD_S: Final = 0.2
LOG_PERIOD_S: Final = 10.0
"""Without a terminal a line is written this often, so that short work stays silent."""


class Progress:
    """Counts messages and bytes, and shows the rate."""

    def __init__(self, verb: str, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        """Begin to count; `verb` says what happened to the messages ("stored", "read")."""
        self._verb = verb
        self._stream = stream if stream is not None else sys.stderr
        self._tty = self._stream.isatty()
        self._quiet = quiet
        self._began = time.monotonic()
        self._next = self._began + (TTY_PERIOD_S if self._tty else LOG_PERIOD_S)
        self._shown = False
        self.messages = 0
        self.bytes = 0

    def add(self, messages: int, nbytes: int) -> None:
        """Count, and show the line if it is time."""
        self.messages += messages
        self.bytes += nbytes
        if self._quiet:
            return
        now = time.monotonic()
        if now >= self._next:
            self._next = now + (TTY_PERIOD_S if self._tty else LOG_PERIOD_S)
            self._show(now)

    def finish(self, note: str = "") -> None:
        """Write the closing line."""
        if self._quiet:
            return
        if self._shown and self._tty:
            self._stream.write("\r\x1b[K")
        self._stream.write(self.line(time.monotonic()) + (f"; {note}" if note else "") + "\n")
        self._stream.flush()

    def line(self, now: float) -> str:
        """Return the line as it stands at `now`."""
        elapsed_s = max(now - self._began, 1e-9)
        text = f"{self.messages:,} messages {self._verb}, {_size(self.bytes)}"
        if elapsed_s >= 1:
            text += f", {self.messages / elapsed_s:,.0f}/s over {elapsed_s:.0f} s"
        return text

    def _show(self, now: float) -> None:
        self._shown = True
        line = self.line(now)
        self._stream.write(f"\r\x1b[K{line}" if self._tty else f"{line}\n")
        self._stream.flush()


def _size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError
