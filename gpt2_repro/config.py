"""Read a recipe and a command line, and return one dataclass instance per section.

A recipe is a YAML file with the sections data, model, training and evaluation. Its values become the defaults of an
HfArgumentParser, which then parses the command line.
"""

import argparse
import dataclasses
import json
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from transformers.hf_argparser import HfArgumentParser

from gpt2_repro.cli import CommandParser
from gpt2_repro.errors import UserError, did_you_mean, in_a_line
from gpt2_repro.fields import Setting, settings_of
from gpt2_repro.launchers import ROOT


DEFAULT = Path("recipes/gpt2_124m.yaml")  # if no recipe is passed
SECTIONS = ("data", "model", "training", "evaluation")

R = TypeVar("R", bound="Recipe")
Options = Mapping[str, dict[str, Any]]


class JsonObject:
    """A mapping, or the text of one: a JSON object, `key=value,key=value`, or "" for an empty mapping."""

    def __init__(self, content: str | Mapping[str, Any]) -> None:
        if isinstance(content, str):
            content = _parse_mapping(content)
        self.values = dict(content)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JsonObject) and self.values == other.values

    def __hash__(self) -> int:  # dataclasses accept only hashable defaults
        return hash(str(self))

    def __str__(self) -> str:
        return json.dumps(self.values)


def _parse_mapping(text: str) -> dict[str, Any]:
    """Return the mapping in a text. Raises ValueError if the text has another form."""
    if not text.strip():
        return {}
    if text.lstrip().startswith("{"):
        return dict(json.loads(text))
    values: dict[str, Any] = {}
    for pair in text.split(","):
        key, value = pair.split("=")
        try:
            values[key.strip()] = json.loads(value)
        except ValueError:
            values[key.strip()] = value.strip()
    return values


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe with the overrides of the command line.

    Subclasses have a field for each section that a command uses, annotated with the dataclass of the section.
    """

    path: Path
    typed: frozenset[str]  # names of the fields and options on the command line
    written: Mapping[str, Mapping[str, Any]]  # the sections in the file, without defaults and overrides
    options: argparse.Namespace  # the options that are not fields of a recipe

    @property
    def sections(self) -> dict[str, Any]:
        """The sections that the command uses, by name."""
        return {name: getattr(self, name) for name in SECTIONS if hasattr(self, name)}

    def is_stated(self, name: str) -> bool:
        """Return whether a field is set on the command line or in the file, and not by its default."""
        return name in self.typed or any(name in section for section in self.written.values())

    def overrides(self) -> dict[str, Any]:
        """Return the values of the fields on the command line, by name."""
        overrides: dict[str, Any] = {}
        for section in self.sections.values():
            for name, value in values_of(section).items():
                if name in self.typed:
                    overrides[name] = value
        return dict(sorted(overrides.items()))

    @property
    def title(self) -> str:
        """The name of the recipe and the overrides that change the run, such as `gpt2_124m seed=43`."""
        settings = settings_of(*self.sections.values())
        words = [self.path.stem]
        for name, value in self.overrides().items():
            if settings[name].role != "unnamed":
                words.append(f"{name}={value}")
        return " ".join(words)

    def to_yaml(self) -> str:
        """Return the resolved recipe as YAML text, which is a valid recipe."""
        sections: dict[str, dict[str, Any]] = {}
        for name, section in self.sections.items():
            values = values_of(section)
            sections[name] = {key: value for key, value in values.items() if value is not None}
        plain = json.loads(json.dumps(sections))  # YAML does not support TokenCount
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
    values: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        values[field.name] = value.values if isinstance(value, JsonObject) else value
    return values


class _UniqueKeys(yaml.SafeLoader):
    """A YAML loader that refuses a repeated key. PyYAML would use the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: list[Any] = []
        for key, _ in node.value:
            if key.value in keys:
                raise yaml.YAMLError(f"the key {key.value!r} occurs twice")
            keys.append(key.value)
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
    not_a_recipe = f"{path} is not a recipe. A recipe has the sections {', '.join(SECTIONS)}."
    if not isinstance(document, dict):
        raise UserError(not_a_recipe)
    sections: dict[str, dict[str, Any]] = {}
    for name, content in document.items():
        keys = content or {}  # a section without keys is None
        if not isinstance(keys, dict):
            raise UserError(not_a_recipe)
        sections[name] = keys
    for name in sections:
        if name not in SECTIONS:
            raise UserError(f"{path} has no section {str(name)!r}. {did_you_mean(str(name), SECTIONS)}")
    return sections


def parse_recipe(kind: type[R], argv: Sequence[str], *, options: Options | None = None, **about: str | None) -> R:
    """Parse a command line `[RECIPE] [--key value ...]`, or raise UserError.

    Args:
        kind: the subclass of Recipe, whose annotations name the sections and their dataclasses.
        options: the options that are not fields of a recipe, with keyword arguments for `add_argument`.
        about: `prog` and `description` of the argument parser.
    """
    path = DEFAULT
    words = list(argv)
    if words and not words[0].startswith("-"):
        path = Path(words.pop(0))
    classes: dict[str, Any] = {}
    for name, annotation in typing.get_type_hints(kind).items():
        if name in SECTIONS:
            classes[name] = annotation
    usage = f"%(prog)s [RECIPE] [--key value ...]     default RECIPE: {DEFAULT}"
    parser = _Parser(classes.values(), usage=usage, **about)
    options = options or {}
    for name, keywords in options.items():
        parser.add_argument(f"--{name}", **keywords)

    written: dict[str, dict[str, Any]] = {}
    if not {"--help", "-h"} & set(words):
        written = load_sections(path)
    elif "all" not in words:
        parser.shorten_help()
    for name in classes:
        defaults = _defaults(path, name, written.get(name, {}), classes)
        parser.set_defaults(**defaults)
    values = vars(parser.parse(words))
    sections: dict[str, Any] = {}
    for name, section in classes.items():
        _check_choices(section, values)
        fields = [field.name for field in dataclasses.fields(section)]
        sections[name] = section(**{field: values[field] for field in fields})
    typed = _names_of_options(words, values)
    others = argparse.Namespace(**{name: values[name] for name in options})
    return kind(path=path, typed=typed, written=written, options=others, **sections)


def _names_of_options(words: Sequence[str], known: Collection[str]) -> frozenset[str]:
    """Return the names of the options in the words of a command line, without a `no_` before them."""
    names = set()
    for word in words:
        if word.startswith("--"):
            name = word.removeprefix("--").split("=")[0].replace("-", "_")
            if name not in known:
                name = name.removeprefix("no_")
            names.add(name)
    return frozenset(names & set(known))


def _check_choices(section: Any, values: Mapping[str, Any]) -> None:
    """Raise UserError if a field that has choices has another value.

    argparse checks the words of the command line only, not the defaults that the file sets.
    """
    for field in dataclasses.fields(section):
        if typing.get_origin(field.type) is Literal:
            choices = typing.get_args(field.type)
            value = values[field.name]
            if value not in choices:
                raise UserError(f"{field.name} cannot be {value!r}. {did_you_mean(str(value), choices)}")


def _defaults(path: Path, section: str, keys: Mapping[str, Any], classes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a section in a file, as text that the parser converts like words of the command line."""
    fields = {field.name: field for field in dataclasses.fields(classes[section])}
    defaults: dict[str, Any] = {}
    for key, value in keys.items():
        if key not in fields:
            fix = did_you_mean(str(key), fields)
            for owner, other_section in classes.items():
                if key in other_section.__dataclass_fields__:
                    fix = f"It belongs to {owner}."
            raise UserError(f"{path}: the section {section} has no key {str(key)!r}. {fix}")
        if value is None:
            continue  # the default applies
        if typing.get_origin(fields[key].type) is list:
            items = value if isinstance(value, list) else [value]
            defaults[key] = [str(item) for item in items]
        elif isinstance(value, list):
            raise UserError(f"{path}: {key} needs one value, not a list.")
        elif isinstance(value, dict):
            defaults[key] = json.dumps(value)
        else:
            defaults[key] = str(value)
    return defaults


class _Parser(CommandParser, HfArgumentParser):
    """HfArgumentParser with one-line errors."""

    def shorten_help(self) -> None:
        """Show only the fields that many users change, and the options that are not fields."""
        hidden = 0
        for action in self._actions:
            setting = action.help
            if isinstance(action, argparse._StoreFalseAction):  # --no_NAME
                action.help = argparse.SUPPRESS
            elif isinstance(setting, Setting) and not setting.is_common:
                action.help = argparse.SUPPRESS
                hidden += 1
        self.epilog = f"--help all lists {hidden} more options."
