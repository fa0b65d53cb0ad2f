"""What etcd holds, read through its JSON gateway: the place where a deleted topic is remembered."""

import base64
from dataclasses import dataclass

from e2e.web import Door, expect, insist, post

PREFIX = "tidewater"


@dataclass(frozen=True)
class Registry:
    """A look at the registry from outside."""

    address: str

    def topics(self, namespace: str) -> set[str]:
        """Return the names of the topics that are registered in a namespace."""
        begin = f"{PREFIX}/{namespace}/meta/topics/{namespace}/"
        # All keys with this prefix: up to the one whose last character is the next.
        end = begin[:-1] + chr(ord(begin[-1]) + 1)
        body = {"key": _b64(begin), "range_end": _b64(end), "keys_only": True}
        door = Door(self.address)
        found = expect(insist(lambda: post(door, "/v3/kv/range", body, timeout_s=10)))
        keys = [base64.b64decode(each["key"]).decode() for each in found.get("kvs", ())]
        return {key.removeprefix(begin) for key in keys}


def _b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
