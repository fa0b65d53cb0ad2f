"""How long a catalog server is waited for; pyiceberg's own clients wait without an end, or retry.

A commit is sent once and then read back, so a catalog's client must neither hang nor repeat it.
"""

from collections.abc import Mapping
from typing import Final

CONNECT_TIMEOUT_S: Final = 5.0
READ_TIMEOUT_S: Final = 30.0
"""A commit without an answer by then counts as one of unknown outcome."""
CONNECT_TIMEOUT_PROPERTY: Final = "tidewater.connect-timeout-s"
READ_TIMEOUT_PROPERTY: Final = "tidewater.read-timeout-s"


def connect_timeout_s(properties: Mapping[str, str]) -> float:
    """Return how long to wait for a connection."""
    return float(properties.get(CONNECT_TIMEOUT_PROPERTY, CONNECT_TIMEOUT_S))


def read_timeout_s(properties: Mapping[str, str]) -> float:
    """Return how long to wait for an answer."""
    return float(properties.get(READ_TIMEOUT_PROPERTY, READ_TIMEOUT_S))
