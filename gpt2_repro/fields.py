"""Define the fields of a recipe's sections, with all that is known of them."""

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from gpt2_repro.errors import UserError


# Whether a field changes the loss curve (`fixed`, or `changeable` by --allow_resume_change), something else that is
# measured (`neutral`), or nothing that the title of a run should have (`unnamed`).
Role = Literal["fixed", "changeable", "neutral", "unnamed"]


class Range(NamedTuple):
    """The valid values of a field. Infinity and NaN are in no range."""

    words: str
    contains: Callable[[float], bool]


AT_LEAST_0 = Range("at least 0", lambda value: 0 <= value <= 1e18)
ABOVE_0 = Range("above 0", lambda value: 0 < value <= 1e18)
BELOW_1 = Range("at least 0 and less than 1", lambda value: 0 <= value < 1)
FRACTION = Range("from 0 to 1", lambda value: 0 <= value <= 1)


class Setting(str):
    """The help text of a field, and what else is known of the field.

    HfArgumentParser passes the metadata of a field to argparse, which accepts no keys of ours. It passes the text on
    unchanged.

    Attributes:
        valid: the valid numbers.
        role: see `Role`.
        is_common: whether many users change the field, so that --help shows it. --help all shows every field.
    """

    valid: Range
    role: Role
    is_common: bool

    def __new__(cls, help: str, valid: Range, role: Role, *, is_common: bool) -> "Setting":
        setting = super().__new__(cls, help)
        setting.valid = valid
        setting.role = role
        setting.is_common = is_common
        return setting

    @property
    def is_trajectory(self) -> bool:
        """Whether the field changes the loss curve."""
        return self.role in ("fixed", "changeable")


def option(
    default: Any,
    help: str,
    valid: Range = AT_LEAST_0,
    *,
    role: Role = "neutral",
    common: bool = False,
    **keywords: Any,
) -> Any:
    """Return a field of a section. If `default` is a list or a mapping, every instance gets a copy.

    `common` fields are in the short help. `keywords` are further arguments of argparse.
    """
    metadata = {"help": Setting(help, valid, role, is_common=common), **keywords}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=functools.partial(copy.copy, default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


fixed = functools.partial(option, role="fixed")
changeable = functools.partial(option, role="changeable")
unnamed = functools.partial(option, role="unnamed")


def settings_of(*sections: Any) -> dict[str, Setting]:
    """Return what is known of the fields of sections, by name."""
    settings: dict[str, Setting] = {}
    for section in sections:
        for field in dataclasses.fields(section):
            settings[field.name] = field.metadata["help"]
    return settings


def check_ranges(section: Any) -> None:
    """Raise UserError if a number of the section is out of its range."""
    for name, setting in settings_of(section).items():
        value = getattr(section, name)
        if isinstance(value, int | float) and not setting.valid.contains(value):
            raise UserError(f"--{name} {value} must be {setting.valid.words}.")
