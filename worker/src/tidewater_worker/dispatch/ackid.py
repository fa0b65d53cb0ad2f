"""The text that a consumer acknowledges a delivery with. Pure.

    ack-id := epoch "." partition "." generation "." offset "." lease        (each in hexadecimal)

Opaque to consumers. `lease` numbers the deliveries of a partition within its owner's epoch, so
that a message which went to somebody else since is not taken for acknowledged by the first one.
"""

import re
from typing import Final, NamedTuple

from tidewater_core.errors import Invalid

_TEXT: Final = re.compile(r"([0-9a-f]{1,16})\.([0-9a-f]{1,8})" + r"\.([0-9a-f]{1,16})" * 3)
SHOWN_CHARS_MAX: Final = 80


class AckId(NamedTuple):
    """One delivery of one message."""

    epoch: int
    partition: int
    generation: int
    offset: int
    lease: int

    def __str__(self) -> str:
        """Write it."""
        return f"{self[0]:x}.{self[1]:x}.{self[2]:x}.{self[3]:x}.{self[4]:x}"

    @classmethod
    def parse(cls, text: str) -> "AckId":
        """Read it; raise that it is none."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise Invalid(
                "InvalidAckId", f"{text[:SHOWN_CHARS_MAX]!r} is not an ack_id that a pull gave out"
            )
        return cls._make(int(part, 16) for part in match.groups())
