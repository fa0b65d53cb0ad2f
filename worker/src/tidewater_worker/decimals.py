"""Numbers that Arrow can bring to a decimal's scale. Pure.

Arrow looks the power of ten between two scales up in a table, and does not ask whether the table
has it: `1e-999999999` ends the process, and `5e-49` may be read as nothing.
"""

from decimal import Decimal
from typing import Final

POWERS_MAX: Final = 38
"""The largest power of ten between two scales of 128 bits."""
POWERS_256_MAX: Final = 76
SIZE_MAX: Final = 200
"""Bytes of a number in memory: some 200 digits. To look at the digits of a larger one, which no
decimal can hold, would take much more than it does."""


def checked(value: Decimal, scale: int) -> Decimal:
    """Return a number that Arrow can bring to a scale; raise that it would be lost there."""
    if not value:
        return Decimal(0)  # however many places it has
    if value.__sizeof__() > SIZE_MAX:
        raise ValueError("a number has more digits than any decimal")
    exponent = value.as_tuple().exponent
    if isinstance(exponent, int) and -exponent - scale > POWERS_MAX:
        raise ValueError(f"a number has {-exponent} places behind the point; {scale} are taken")
    return value
