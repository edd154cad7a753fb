"""Read the typed fields of a dataclass from JSON that may be damaged."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeGuard, TypeVar


T = TypeVar("T")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` is a finite number. Larger ones cannot be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e30 < value < 1e30


def fill(empty: T, document: object) -> T:
    """Return the dataclass instance `empty` with the values of a JSON object that have the type of their field."""
    entries = document if isinstance(document, Mapping) else {}
    kinds = typing.get_type_hints(type(empty))
    values = {key: _read(entries[key], kinds[key], vars(empty)[key]) for key in kinds.keys() & entries.keys()}
    return dataclasses.replace(empty, **{key: value for key, value in values.items() if value is not None})  # type: ignore[type-var]


def _read(value: object, kind: Any, empty: Any = None) -> Any:
    """Return a JSON value as `kind`, None if it is of another type. Of mappings and lists such items are left out."""
    if dataclasses.is_dataclass(empty):
        return fill(empty, value)
    if isinstance(kind, types.UnionType):
        kind = typing.get_args(kind)[0]  # of `X | None`
    origin, items = typing.get_origin(kind), typing.get_args(kind)
    if origin is Mapping:
        entries = value.items() if isinstance(value, Mapping) else ()
        return {key: its for key, its in entries if items[1] is Any or _read(its, items[1]) is not None}
    if origin is list:
        return [its for item in value if (its := _read(item, items[0]))] if isinstance(value, list) else None
    if kind in (int, float):
        return value if is_number(value) else None
    return value if isinstance(value, kind) else None
