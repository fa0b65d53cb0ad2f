"""CloudEvents 1.0 over HTTP: structured, batched and binary, as messages.

The attributes become headers `ce-…`, the data the value, the `partitionkey` extension the key.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

import msgspec

from tidewater_core.errors import Invalid
from tidewater_worker.log.group import Headers

_REQUIRED: Final = ("specversion", "id", "source", "type")
_NOT_HEADERS: Final = frozenset({"data", "data_base64"})
KEY_ATTRIBUTE: Final = "partitionkey"
_Json = dict[str, msgspec.Raw]
_QUOTED: Final = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class Event:
    """One event."""

    headers: Headers
    key: bytes | None
    data: bytes | None
    """As it is stored in a raw topic; for a typed one it is the JSON of the value, digit for
    digit."""


def _event(attributes: Mapping[str, str], data: bytes | None) -> Event:
    for name in _REQUIRED:
        if not attributes.get(name):
            raise Invalid("InvalidCloudEvent", f"the attribute {name!r} is missing")
    if attributes["specversion"] != "1.0":
        raise Invalid(
            "InvalidCloudEvent", f"specversion {attributes['specversion']!r}: only 1.0 is known"
        )
    key = attributes.get(KEY_ATTRIBUTE)
    headers = [(f"ce-{name}", value) for name, value in attributes.items()]
    return Event(headers, key.encode() if key is not None else None, data)


def _of_json(event: _Json) -> Event:
    attributes = {}
    for name, raw in event.items():
        if name in _NOT_HEADERS:
            continue
        value = msgspec.json.decode(raw)
        if value is None:
            continue
        if isinstance(value, dict | list):
            raise Invalid("InvalidCloudEvent", f"the attribute {name!r} is not a simple value")
        attributes[name] = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    data: bytes | None = None
    if "data_base64" in event:
        if "data" in event:
            raise Invalid("InvalidCloudEvent", "an event has data or data_base64, not both")
        data = msgspec.json.decode(event["data_base64"], type=bytes)
    elif "data" in event:
        data = _data(event["data"])
    return _event(attributes, data)


def _data(raw: msgspec.Raw) -> bytes | None:
    """Return text as it is, anything else as compact JSON; numbers keep their digits."""
    text = bytes(raw)
    if text.startswith(b'"'):
        return msgspec.json.decode(text, type=str).encode()
    if msgspec.json.decode(text) is None:  # which also finds text that is not UTF-8
        return None
    return msgspec.json.format(text, indent=-1)


def structured(body: bytes) -> Event:
    """Decode `application/cloudevents+json`."""
    if not body.lstrip().startswith(b"{"):
        raise Invalid("InvalidCloudEvent", "an event is a JSON object")
    return _of_json(msgspec.json.decode(body, type=_Json))


def batch(body: bytes) -> list[Event]:
    """Decode `application/cloudevents-batch+json`."""
    events = msgspec.json.decode(body, type=list[_Json])
    if not events:
        raise Invalid("InvalidCloudEvent", "a batch is a JSON array of at least one event")
    return [_of_json(event) for event in events]


def binary(headers: Mapping[str, str], content_type: str, body: bytes) -> Event:
    """Decode an event whose attributes are HTTP headers."""
    attributes = {
        name[3:]: _attribute(name, value)
        for name, value in headers.items()
        if name.startswith("ce-")
    }
    if content_type:
        attributes["datacontenttype"] = content_type
    return _event(attributes, body or None)


def _attribute(name: str, value: str) -> str:
    """Undo quotes, then one round of percent-encoding, as the HTTP binding says (3.1.3.2)."""
    if len(value) >= 2 and value[0] == value[-1] == '"':
        value = _QUOTED.sub(r"\1", value[1:-1])
    try:
        return unquote(value, errors="strict")
    except UnicodeDecodeError:
        raise Invalid(
            "InvalidCloudEvent", f"the header {name!r} is not percent-encoded UTF-8"
        ) from None
