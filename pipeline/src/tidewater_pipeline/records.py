"""What a run writes down as a property of a table: what it must keep to whenever it goes on.

A catalog overwrites a property without a look at what was there. So what was written first is read
back, and nobody writes over what he does not know: that is another run of the same id. Where there
is a coordination store, a lease keeps that one out before.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

from tidewater_core.errors import Retryable
from tidewater_pipeline.session import TopicTable

Hold: TypeAlias = Callable[[str], AbstractContextManager[None]]
"""Takes a lease by its name, and has it as long as the context lasts."""


def unheld(_lease: str) -> AbstractContextManager[None]:
    """Take none: nobody is there to ask."""
    return nullcontext()


class Record:
    """One property, as the run that holds this has seen it last."""

    def __init__(self, table: TopicTable, key: str) -> None:
        self._table, self._key = table, key
        self.text = self._read()
        """None: no run of this id has begun."""

    def begin(self, text: str) -> str:
        """Write the first one, unless there is one, and return the one that counts."""
        if self.text is None:
            self._table.set_properties({self._key: text})
            self.text = self._read() or text
        return self.text

    def write(self, text: str) -> None:
        """Replace it, if it is still what we know."""
        if self._read() != self.text:
            raise Retryable(
                "RunBusy", f"another run has written {self._key}: run this again when it is done"
            )
        self._table.set_properties({self._key: text})
        self.text = text

    def _read(self) -> str | None:
        return self._table.load().properties.get(self._key)
