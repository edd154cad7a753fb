"""Define the fields of a recipe's sections, with all that is known of them."""

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from gpt2_repro.errors import UserError


class Range(NamedTuple):
    """The valid values of a field. Infinity and NaN are in no range."""

    words: str
    contains: Callable[[float], bool]


AT_LEAST_0 = Range("at least 0", lambda value: 0 <= value <= 1e18)
ABOVE_0 = Range("above 0", lambda value: 0 < value <= 1e18)
BELOW_1 = Range("at least 0 and less than 1", lambda value: 0 <= value < 1)
FRACTION = Range("from 0 to 1", lambda value: 0 <= value <= 1)


class Setting(dict[str, Any]):
    """The metadata of a field: keywords for argparse, which HfArgumentParser copies, and attributes for us.

    Attributes:
        valid: the valid numbers.
        role: whether the field changes the loss curve (`fixed`, or `changeable` by --allow_resume_change), something
            else that is measured (`neutral`), or nothing that the title of a run should have (`unnamed`).
    """

    def __init__(self, valid: Range, role: str, **keywords: Any) -> None:
        super().__init__(keywords)
        self.valid, self.role, self.is_trajectory = valid, role, role in ("fixed", "changeable")

    def __missing__(self, key: str) -> "Setting":
        return self  # dataclasses store the metadata in a proxy, which has no attributes


def option(default: Any, help: str, valid: Range = AT_LEAST_0, *, role: str = "neutral", **keywords: Any) -> Any:
    """Return a field of a section. If `default` is a list or a mapping, every instance gets a copy."""
    metadata = Setting(valid, role, help=help, **keywords)
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=functools.partial(copy.copy, default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


fixed, changeable, unnamed = (functools.partial(option, role=role) for role in ("fixed", "changeable", "unnamed"))


def settings_of(*sections: Any) -> dict[str, Setting]:
    """Return what is known of the fields of sections, by name."""
    return {field.name: field.metadata["setting"] for each in sections for field in dataclasses.fields(each)}


def check_ranges(section: Any) -> None:
    """Raise UserError if a number of the section is out of its range."""
    for name, setting in settings_of(section).items():
        value = getattr(section, name)
        if isinstance(value, int | float) and not setting.valid.contains(value):
            raise UserError(f"--{name} {value} must be {setting.valid.words}.")
