"""Read a recipe and a command line, and return one dataclass instance per section.

A recipe is a YAML file with the sections data, model, training and evaluation. Its values become the defaults of an
HfArgumentParser, which then parses the command line.
"""

import argparse
import dataclasses
import json
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from transformers.hf_argparser import HfArgumentParser

from gpt2_repro.cli import CommandParser
from gpt2_repro.errors import UserError, did_you_mean, in_a_line
from gpt2_repro.fields import settings_of
from gpt2_repro.launchers import ROOT


DEFAULT = Path("recipes/gpt2_124m.yaml")  # if no recipe is passed
SECTIONS = ("data", "model", "training", "evaluation")
# The recipe.yaml of a run of an earlier version has these values.
EARLIER = {"skip_loss_z": 0.0, "skip_grad_z": 0.0, "extend_to": 0, "sample_by": "document"}

R = TypeVar("R", bound="Recipe")
Options = Mapping[str, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class JsonObject:
    """A mapping, or the text of one: a JSON object, `key=value,key=value`, or "" for an empty mapping."""

    content: dataclasses.InitVar[str | Mapping[str, Any] | Iterable[tuple[str, Any]]]
    values: dict[str, Any] = dataclasses.field(init=False)

    def __post_init__(self, content: str | Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        if isinstance(content, str):
            is_json = not content.strip() or content.lstrip().startswith("{")
            content = json.loads(content or "{}") if is_json else map(_pair, content.split(","))
        object.__setattr__(self, "values", dict(content))

    def __str__(self) -> str:
        return json.dumps(self.values)


def _pair(text: str) -> tuple[str, Any]:
    key, value = text.split("=")
    try:
        return key.strip(), json.loads(value)
    except ValueError:
        return key.strip(), value.strip()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe with the overrides of the command line.

    Subclasses have a field for each section that a command uses, annotated with the dataclass of the section.
    """

    path: Path
    typed: frozenset[str]  # names of the fields and options on the command line
    stated: frozenset[str]  # names of the fields on the command line or in the file
    options: argparse.Namespace  # the options that are not fields of a recipe
    written: Mapping[str, Mapping[str, Any]]  # the sections in the file, without defaults and overrides

    @property
    def sections(self) -> dict[str, Any]:
        """The sections that the command uses, by name."""
        return {name: getattr(self, name) for name in SECTIONS if hasattr(self, name)}

    @property
    def overrides(self) -> dict[str, Any]:
        """The values of the fields on the command line, by name."""
        values = {key: value for section in self.sections.values() for key, value in values_of(section).items()}
        return {key: values[key] for key in sorted(self.typed & values.keys())}

    @property
    def title(self) -> str:
        """The name of the recipe and the overrides that change the run, such as `gpt2_124m seed=43`."""
        settings = settings_of(*self.sections.values())
        named = (f"{key}={value}" for key, value in self.overrides.items() if settings[key].role != "unnamed")
        return " ".join([self.path.stem, *named])

    def to_yaml(self) -> str:
        """Return the resolved recipe as YAML text, which is a valid recipe."""
        sections = {name: values_of(section) for name, section in self.sections.items()}
        shown = {name: {k: v for k, v in values.items() if v is not None} for name, values in sections.items()}
        plain = json.loads(json.dumps(shown))  # YAML does not support TokenCount
        text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=119)
        return f"# Resolved from {self.path}\n{text}"

    def differences(self, other: "Recipe") -> Iterator[tuple[str, str, Any, Any]]:
        """Yield section, key, this recipe's value and the value in `other`, for each field that differs."""
        for name, section in self.sections.items():
            other_values = values_of(other.sections[name])
            for key, value in values_of(section).items():
                if value != other_values[key]:
                    yield name, key, value, other_values[key]


def values_of(section: Any) -> dict[str, Any]:
    """Return the values of a recipe section by field name, with mappings instead of JsonObjects."""
    values = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    return {name: value.values if isinstance(value, JsonObject) else value for name, value in values.items()}


class _UniqueKeys(yaml.SafeLoader):
    """A YAML loader that refuses a repeated key. PyYAML would use the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if repeated := next((key for key in keys if keys.count(key) > 1), None):
            raise yaml.YAMLError(f"the key {repeated!r} occurs twice")
        return super().construct_mapping(node, deep)


def load_sections(path: Path) -> dict[str, dict[str, Any]]:
    """Return the sections of a recipe as written in its file, or raise UserError.

    The path is relative to the current folder or to the repository.
    """
    if not path.is_file() and not (ROOT / path).is_file():
        recipes = sorted(str(file.relative_to(ROOT)) for file in ROOT.glob("recipes/*.yaml"))
        raise UserError(f"There is no recipe {path}. {did_you_mean(str(path), recipes)}")
    if not path.is_file():
        path = ROOT / path
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid YAML: {in_a_line(error)}") from None
    if not isinstance(document, dict) or not all(isinstance(keys or {}, dict) for keys in document.values()):
        raise UserError(f"{path} is not a recipe. A recipe has the sections {', '.join(SECTIONS)}.")
    if unknown := [str(name) for name in document if name not in SECTIONS]:
        raise UserError(f"{path} has no section {unknown[0]!r}. {did_you_mean(unknown[0], SECTIONS)}")
    return {name: keys or {} for name, keys in document.items()}


def parse_recipe(kind: type[R], argv: Sequence[str], *, options: Options | None = None, **about: str | None) -> R:
    """Parse a command line `[RECIPE] [--key value ...]`, or raise UserError.

    Args:
        kind: the subclass of Recipe, whose annotations name the sections and their dataclasses.
        options: the options that are not fields of a recipe, with keyword arguments for `add_argument`.
        about: `prog` and `description` of the argument parser.
    """
    named = bool(argv) and not argv[0].startswith("-")
    path, flags = (Path(argv[0]), list(argv[1:])) if named else (DEFAULT, list(argv))
    classes: dict[str, Any] = {name: cls for name, cls in typing.get_type_hints(kind).items() if name in SECTIONS}
    usage = f"%(prog)s [RECIPE] [--key value ...]     default RECIPE: {DEFAULT}"
    parser = _Parser(classes.values(), usage=usage, **about)
    for name, keywords in (options or {}).items():
        parser.add_argument(f"--{name}", **keywords)
    written = {} if {"--help", "-h"} & set(flags) else load_sections(path)
    fields = {name: {field.name: field for field in dataclasses.fields(cls)} for name, cls in classes.items()}
    for name in classes:
        parser.set_defaults(**_defaults(path, name, written.get(name, {}), fields))
    values = vars(parser.parse(flags))
    for key, field in (item for section in fields.values() for item in section.items()):
        choices = typing.get_args(field.type) if typing.get_origin(field.type) is Literal else None
        if choices and values[key] not in choices:
            raise UserError(f"{key} cannot be {values[key]!r}. {did_you_mean(str(values[key]), choices)}")
    names = {word.removeprefix("--").split("=")[0].replace("-", "_") for word in flags if word.startswith("--")}
    typed = {key for key in values if {key, f"no_{key}"} & names}
    return kind(
        path=path,
        typed=frozenset(typed),
        stated=frozenset(typed.union(*written.values())),
        options=argparse.Namespace(**{name: values[name] for name in options or {}}),
        written=written,
        **{name: cls(**{key: values[key] for key in fields[name]}) for name, cls in classes.items()},
    )


def _defaults(path: Path, section: str, keys: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a section in a file, as text that the parser converts like words of the command line."""
    defaults: dict[str, Any] = {}
    for key, value in (item for item in keys.items() if item not in EARLIER.items()):
        if key not in fields[section]:
            owners = [name for name in fields if key in fields[name]]
            fix = f"It belongs to {owners[0]}." if owners else did_you_mean(str(key), fields[section])
            raise UserError(f"{path}: the section {section} has no key {str(key)!r}. {fix}")
        is_list = typing.get_origin(fields[section][key].type) is list
        if isinstance(value, list) and not is_list:
            raise UserError(f"{path}: {key} needs one value, not a list.")
        if is_list and value is not None:
            defaults[key] = [str(item) for item in (value if isinstance(value, list) else [value])]
        elif value is not None:  # null: the default applies
            defaults[key] = json.dumps(value) if isinstance(value, dict) else str(value)
    return defaults


class _Parser(CommandParser, HfArgumentParser):
    """HfArgumentParser with one-line errors."""
