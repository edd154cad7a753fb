"""Convert JSON to dataclasses, with a tolerant mode for damaged files."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeGuard


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` is a number between -1e30 and 1e30."""
    # Larger numbers cannot be plotted.
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e30 < value < 1e30


def from_json(kind: Any, value: Any, *, tolerant: bool = False, default: Any = None) -> Any:
    """Convert parsed JSON to `kind`: a dataclass, or a list or mapping of dataclasses.

    Keys without a field are ignored.

    Args:
        tolerant: check the types of all values, and treat values of a wrong type inside `value` as missing. If false,
            numbers, strings and bools are accepted without a check.
        default: an instance of `kind` that provides the fields missing in `value`.

    Raises TypeError or AttributeError if `value` does not have the form that `kind` requires (object or list), or if a
    required field is missing. If `tolerant` is false, this also applies to objects and lists inside `value`.
    """
    origin, items = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:  # `X | None`
        return None if value is None else from_json(items[0], value, tolerant=tolerant, default=default)
    fields: dict[Any, Any] | None = typing.get_type_hints(kind) if dataclasses.is_dataclass(kind) else None
    if fields is None and origin not in (list, dict, Mapping):
        fits = kind is Any or (is_number(value) if kind in (int, float) else isinstance(value, kind))
        if tolerant and not fits:
            raise TypeError(f"{value!r} is not of type {kind}")
        return value
    if origin is list and not isinstance(value, list):
        raise TypeError(f"{value!r} is not a list")
    entries: dict[Any, Any] = dict(enumerate(value)) if origin is list else value
    found = {}
    for key, item in entries.items():
        if fields is None or key in fields:
            its_kind, its_default = (fields[key], getattr(default or kind, key, None)) if fields else (items[-1], None)
            try:
                found[key] = from_json(its_kind, item, tolerant=tolerant, default=its_default if tolerant else None)
            except (TypeError, AttributeError):
                if not tolerant:
                    raise
    if fields is None:
        return list(found.values()) if origin is list else found
    return dataclasses.replace(default, **found) if default else kind(**found)
