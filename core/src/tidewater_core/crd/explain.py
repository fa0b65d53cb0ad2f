"""Validation errors, said the way a person would: where, what, and what to write instead."""

import difflib
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

PROBLEMS_MAX = 20
"""Most problems told at once; a page of them helps nobody."""

_PLAIN = {
    "missing": "is required",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "list_type": "must be a list",
    "dict_type": "must be a map",
    "model_type": "must be a map of fields",
    "dataclass_type": "must be a map of fields",
    "none_required": "must be left out",
}


def problems(error: ValidationError, model: type[BaseModel] | None = None) -> list[str]:
    """Return one line per problem; with the model, a misspelt field gets a suggestion."""
    found = [
        _problem(detail["loc"], detail["type"], detail["msg"], detail["input"], model)
        for detail in error.errors(include_url=False)
    ]
    if len(found) > PROBLEMS_MAX:
        return [*found[:PROBLEMS_MAX], f"and {len(found) - PROBLEMS_MAX} more"]
    return found


def _problem(
    loc: Sequence[int | str], kind: str, msg: str, value: object, model: type[BaseModel] | None
) -> str:
    where = _path(loc)
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{where}: no such field{_suggestion(loc, model)}"
    text = _PLAIN.get(kind) or msg.removeprefix("Value error, ")
    if kind in _PLAIN and kind != "missing":
        text += f", not {_short(value)}"
    elif kind in ("enum", "literal_error"):
        text = f"{_short(value)} is not one of {msg.removeprefix('Input should be ')}"
    elif not kind.startswith("value_error"):
        text = text.replace("Input should", "must").replace("String should", "must")
        text = text.replace("List should", "must").replace("Dictionary should", "must")
        text = text.removesuffix(" after validation, not 0")
    return f"{where}: {text}" if where else text


def _path(loc: Sequence[int | str]) -> str:
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _suggestion(loc: Sequence[int | str], model: type[BaseModel] | None) -> str:
    fields = _fields_at(loc[:-1], model)
    close = difflib.get_close_matches(str(loc[-1]), fields, n=1)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; the fields here are {', '.join(sorted(fields))}" if 0 < len(fields) <= 20 else ""


def _fields_at(loc: Sequence[int | str], model: type[BaseModel] | None) -> list[str]:
    """Return the field names that a manifest may use at this place."""
    here: Any = model
    for part in loc:
        if here is None or isinstance(part, int):
            continue
        here = next(
            (
                _model_in(field.annotation)
                for name, field in here.model_fields.items()
                if part in (name, field.alias)
            ),
            None,
        )
    return [field.alias or name for name, field in here.model_fields.items()] if here else []


def _model_in(annotation: object) -> type[BaseModel] | None:
    """Find the model inside `Model`, `Model | None` or `list[Model]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        if found := _model_in(inner):
            return found
    return None
