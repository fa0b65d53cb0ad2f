"""Where a run finds things: the catalog and the coordination store, from a file with variables.

A worker's settings file serves as it is: only what names the two places is read, so a field that
this version does not know is no obstacle. Pure: the environment is an argument.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tidewater_core.errors import Invalid
from tidewater_core.settings import CatalogSettings, CoordinationTls

_PLACEHOLDER: Final = re.compile(r"\$\{([A-Z][A-Z0-9_]*)\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreSettings:
    """The coordination store, and who we are there."""

    place: str
    """A path of an SQLite file, or etcd endpoints joined by commas."""
    prefix: str = "tidewater"
    """Of etcd's keys."""
    tls: CoordinationTls | None = None
    user: str = ""
    password: str = field(default="", repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """What a settings file names."""

    catalog: CatalogSettings
    store: StoreSettings | None = None


def read_places(text: str, environment: Mapping[str, str]) -> Places:
    """Read catalog and coordination store from a JSON file; ${NAME} is a variable's value."""
    try:
        whole = json.loads(text)
        catalog = _expanded(whole["catalog"], environment)
        properties = {str(k): str(v) for k, v in catalog.get("properties", {}).items()}
        keys = ("place", "prefix", "tls", "user", "password")
        names = {key: "coordination" if key == "place" else f"coordination_{key}" for key in keys}
        given = {
            key: _expanded(whole[name], environment)
            for key, name in names.items()
            if whole.get(name)
        }
        if "tls" in given:
            given["tls"] = CoordinationTls(**given["tls"])
        store = StoreSettings(**given) if "place" in given else None
        return Places(
            catalog=CatalogSettings(name=catalog.get("name", "tidewater"), properties=properties),
            store=store,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Invalid("InvalidSettings", f"the settings file cannot be used: {error!r}") from error


def _expanded(value: Any, environment: Mapping[str, str]) -> Any:
    """Replace ${NAME} in every text of a JSON value."""
    if isinstance(value, dict):
        return {key: _expanded(each, environment) for key, each in value.items()}
    if not isinstance(value, str):
        return value

    def variable(match: re.Match[str]) -> str:
        if match[1] not in environment:
            raise Invalid("MissingVariable", f"the settings need the variable {match[1]}")
        return environment[match[1]]

    return _PLACEHOLDER.sub(variable, value)
