"""The opening of a WebSocket: what a request must say, and the answer. Pure."""

import base64
import binascii
import hashlib
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

from tidewater_core.errors import Forbidden, Invalid

SUBPROTOCOL: Final = "tidewater.v1"
_GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_KEY_BYTES: Final = 16


class UpgradeRequired(Invalid):
    """The client speaks another version, or none."""

    status = 426


def accept(headers: Mapping[bytes, bytes], origins: Sequence[str]) -> bytes:
    """Return the answer that opens the socket; raise what is wrong with the request."""
    if headers.get(b"sec-websocket-version", b"") != b"13":
        raise UpgradeRequired("UpgradeRequired", "a WebSocket of version 13 is spoken here")
    key = headers.get(b"sec-websocket-key", b"")
    try:
        is_key = len(base64.b64decode(key, validate=True)) == _KEY_BYTES
    except binascii.Error:
        is_key = False
    if not is_key:
        raise Invalid("InvalidHandshake", "Sec-WebSocket-Key is 16 bytes in base64")
    check_origin(headers.get(b"origin"), headers.get(b"host", b""), origins)
    token = base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest())
    offered = headers.get(b"sec-websocket-protocol", b"").decode("latin-1")
    chosen = b""
    if offered:
        if SUBPROTOCOL not in [name.strip() for name in offered.split(",")]:
            raise Invalid("UnknownSubprotocol", f"the subprotocol here is {SUBPROTOCOL}")
        chosen = b"sec-websocket-protocol: %b\r\n" % SUBPROTOCOL.encode()
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
        b"sec-websocket-accept: %b\r\n%b\r\n" % (token, chosen)
    )


def check_origin(origin: bytes | None, host: bytes, origins: Sequence[str]) -> None:
    """Refuse a page of another site: a browser lets any page open a socket to any address.

    No `Origin`: not a browser. The host that the page came from may be this one on any port, or
    one that the settings name.
    """
    if origin is None or "*" in origins:
        return
    asked = origin.decode("latin-1")
    if asked in origins:
        return
    ours = _host_of(f"//{host.decode('latin-1')}")
    if ours is None or _host_of(asked) != ours:
        raise Forbidden(
            "ForbiddenOrigin",
            f"pages of {asked[:100]!r} may not open a socket here; the worker's setting "
            "socket_origins names those that may",
        )


def _host_of(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:  # of brackets, for one
        return None
