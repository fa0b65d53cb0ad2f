"""CloudEvents 1.0 over HTTP: structured, batched and binary, as messages.

The attributes become headers `ce-…`, the data the value, the `partitionkey` extension the key.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from tidewater_core.errors import Invalid
from tidewater_worker.log.group import Headers

_REQUIRED: Final = ("specversion", "id", "source", "type")
_NOT_HEADERS: Final = frozenset({"data", "data_base64"})
KEY_ATTRIBUTE: Final = "partitionkey"


@dataclass(frozen=True, slots=True)
class Event:
    """One event."""

    headers: Headers
    key: bytes | None
    data: bytes | None
    """As it is stored in a raw topic."""

    def data_bytes(self) -> bytes | None:
        """Return the value of a raw topic."""
        return self.data

    def data_object(self) -> Any:
        """Return the value of a typed topic."""
        if self.data is None:
            raise Invalid("InvalidCloudEvent", "an event for a typed topic needs JSON data")
        return msgspec.json.decode(self.data)


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


def _of_json(event: object) -> Event:
    if not isinstance(event, dict):
        raise Invalid("InvalidCloudEvent", "an event is a JSON object")
    attributes = {}
    for name, value in event.items():
        if name in _NOT_HEADERS or value is None:
            continue
        if isinstance(value, dict | list):
            raise Invalid("InvalidCloudEvent", f"the attribute {name!r} is not a simple value")
        attributes[name] = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    data: bytes | None = None
    if "data_base64" in event:
        if "data" in event:
            raise Invalid("InvalidCloudEvent", "an event has data or data_base64, not both")
        data = msgspec.convert(event["data_base64"], bytes)
    elif event.get("data") is not None:
        text = event["data"]
        data = text.encode() if isinstance(text, str) else msgspec.json.encode(text)
    return _event(attributes, data)


def structured(body: bytes) -> Event:
    """Decode `application/cloudevents+json`."""
    return _of_json(msgspec.json.decode(body))


def batch(body: bytes) -> list[Event]:
    """Decode `application/cloudevents-batch+json`."""
    events = msgspec.json.decode(body)
    if not isinstance(events, list) or not events:
        raise Invalid("InvalidCloudEvent", "a batch is a JSON array of at least one event")
    return [_of_json(event) for event in events]


def binary(headers: Mapping[str, str], content_type: str, body: bytes) -> Event:
    """Decode an event whose attributes are HTTP headers."""
    attributes = {name[3:]: value for name, value in headers.items() if name.startswith("ce-")}
    if content_type:
        attributes["datacontenttype"] = content_type
    return _event(attributes, body or None)
