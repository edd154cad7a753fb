"""Read a recipe and a command line into typed sections.

A recipe is one YAML file with the sections data, model, training and evaluation. Each section is a dataclass next to the
code that it configures. Its keys become command-line tokens before the user's own, so that a file and a flag pass the
same validation and the command line wins. A dataclass's `refused` maps the fields that something else owns to the reason.
"""

import argparse
import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Generic, TypeVar

import yaml
from transformers.hf_argparser import HfArgumentParser

from gpt2_repro.errors import UserError, did_you_mean


DEFAULT = Path("recipes/gpt2_124m.yaml")  # if no recipe is named
SECTIONS = ("data", "model", "training", "evaluation")
PLACES = {"dataset_dir", "output_dir", "resume_from", "report_to", "run_name", "hellaswag_data"}  # change no run

D = TypeVar("D")
M = TypeVar("M")
T = TypeVar("T")
E = TypeVar("E")


@dataclasses.dataclass(frozen=True)
class Recipe(Generic[D, M, T, E]):
    """A recipe with the overrides of the command line. A section that the command does not use is None.

    Attributes:
        path: the recipe's file.
        typed: names of the fields and options that were typed on the command line.
        stated: names of the fields that were typed or written in the file; all others have their defaults.
        options: the options of the command itself.
        written: the sections as they are in the file.
    """

    path: Path
    data: D
    model: M
    training: T
    evaluation: E
    typed: frozenset[str]
    stated: frozenset[str]
    options: argparse.Namespace
    written: Mapping[str, Mapping[str, Any]]

    @property
    def sections(self) -> dict[str, Any]:
        """The sections that the command uses, by name."""
        return {name: section for name in SECTIONS if (section := getattr(self, name)) is not None}

    @property
    def title(self) -> str:
        """The recipe's name and the typed changes: `gpt2_124m learning_rate=0.0003 seed=43`."""
        values = {key: value for section in self.sections.values() for key, value in values_of(section).items()}
        typed = [f"{key}={values[key]}" for key in sorted(self.typed & values.keys()) if key not in PLACES]
        return " ".join([self.path.stem, *typed])

    def to_yaml(self) -> str:
        """Return the recipe as the same commands read it: own fields of each section, and inherited ones that changed."""
        shown: dict[str, dict[str, Any]] = {}
        for name, section in self.sections.items():
            refused, own = _refused(type(section)), own_fields(type(section))
            defaults = {field.name: field.default for field in dataclasses.fields(section)}
            shown[name] = {
                key: value
                for key, value in values_of(section).items()
                if value is not None and key not in refused and (key in own or value != defaults[key])
            }
        # Through JSON, because YAML does not support TokenCount and enumerations.
        plain = json.loads(json.dumps(shown))
        text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=119)
        return f"# {self.path} as it was resolved\n{text}"


def values_of(section: Any) -> dict[str, Any]:
    """Return the values of a section's fields."""
    return {field.name: getattr(section, field.name) for field in dataclasses.fields(section) if field.init}


class _Parser(HfArgumentParser):
    """HfArgumentParser whose complaints are UserErrors that name the nearest valid word."""

    def error(self, message: str) -> Any:
        message = message.removeprefix("argument ").replace("invalid TokenCount value", "no whole number of tokens")
        message = message.replace("invalid Overrides value", "no mapping, which is key=value,key=value or JSON")
        if message.startswith("unrecognized arguments"):
            message += ", and a recipe is named first"
        raise UserError(f"{message}; see --help")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            hint = did_you_mean(str(value), map(str, action.choices))
            raise UserError(f"{action.option_strings[0]} cannot be {str(value)!r}: {hint}")


def load_sections(path: Path) -> dict[str, dict[str, Any]]:
    """Read a recipe's sections as they are written. Raises UserError for a missing file or an unknown section."""
    if not path.is_file():
        shipped = sorted(str(recipe) for recipe in Path("recipes").glob("*.yaml"))
        raise UserError(f"there is no recipe {path}: {did_you_mean(str(path), shipped or [str(DEFAULT)])}")
    try:
        document = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(document, dict):
        raise UserError(f"{path} must hold the sections {', '.join(SECTIONS)}")
    for section, keys in document.items():
        if section not in SECTIONS:
            raise UserError(f"{path} has no section {section!r} to offer: {did_you_mean(str(section), SECTIONS)}")
        if not isinstance(keys or {}, dict):
            raise UserError(f"{path}: section {section!r} must hold keys and values")
    return {section: keys or {} for section, keys in document.items()}


def parse_recipe(
    argv: Sequence[str],
    *,
    data: type[D] = NoneType,  # type: ignore[assignment]
    model: type[M] = NoneType,  # type: ignore[assignment]
    training: type[T] = NoneType,  # type: ignore[assignment]
    evaluation: type[E] = NoneType,  # type: ignore[assignment]
    offered: Sequence[str] = SECTIONS,
    description: str | None = None,
    prog: str | None = None,
    options: Mapping[str, dict[str, Any]] | None = None,
) -> Recipe[D, M, T, E]:
    """Parse `[RECIPE] [--key value ...]`.

    Args:
        argv: the command line after the program's name.
        data, model, training, evaluation: the dataclasses of the sections. A section of the file without a class is
            left to the commands that own it.
        offered: the sections whose fields are also flags of this command.
        description: shown by --help, usually the command's docstring.
        prog: the name of the command, if it is not the name of its file.
        options: further flags of the command itself, by name, with the keywords of `add_argument`.

    Raises UserError for a missing recipe and for unknown or refused sections, keys, flags and choices.
    """
    given = zip(SECTIONS, (data, model, training, evaluation), strict=True)
    classes: dict[str, Any] = {name: cls for name, cls in given if cls is not NoneType}
    named = bool(argv) and not argv[0].startswith("-")
    path, flags = (Path(argv[0]), list(argv[1:])) if named else (DEFAULT, list(argv))
    flagged = {name: cls for name, cls in classes.items() if name in offered}
    parser = _build_parser(flagged, description, options or {})
    parser.prog = prog or parser.prog
    if "--help" in flags or "-h" in flags:
        parser.parse_args(["--help"])

    written = load_sections(path)
    tokens: list[str] = []
    for name, cls in flagged.items():
        _check_keys(path, name, written.get(name, {}), cls)
        tokens += _to_tokens(written.get(name, {}))
    typed = _typed_fields(flags, flagged.values(), parser)
    namespace = vars(parser.parse_args(tokens + flags))
    sections: dict[str, Any] = dict.fromkeys(SECTIONS)
    for name, cls in classes.items():
        if name in flagged:
            sections[name] = cls(**{its.name: namespace[its.name] for its in dataclasses.fields(cls) if its.init})
        else:
            sections[name] = read_section(path, name, cls)
    return Recipe(
        path,
        **sections,
        typed=frozenset(typed),
        stated=frozenset(typed.union(*written.values())),
        options=argparse.Namespace(**{name: namespace[name] for name in options or {}}),
        written=written,
    )


def read_section(path: Path, section: str, cls: type[D]) -> D:
    """Read one section of a recipe. Fields that the file does not state have their defaults."""
    keys = load_sections(path).get(section, {})
    _check_keys(path, section, keys, cls)
    parser = _Parser([cls], add_help=False, allow_abbrev=False)
    return cls(**vars(parser.parse_args(_to_tokens(keys))))


def own_fields(cls: type) -> list[str]:
    """The fields that a section's dataclass declares itself, inherited ones left out."""
    return [field.name for field in dataclasses.fields(cls) if field.init and field.name in cls.__annotations__]


def _refused(cls: type) -> dict[str, str]:
    return getattr(cls, "refused", {})


def _check_keys(path: Path, section: str, keys: Mapping[str, Any], cls: type) -> None:
    valid = {field.name for field in dataclasses.fields(cls) if field.init} - _refused(cls).keys()
    for key in keys:
        if key in _refused(cls):
            raise UserError(f"{path}: {section}.{key} has another owner: {_refused(cls)[key]}")
        if key not in valid:
            raise UserError(f"{path}: {section} has no key {str(key)!r}: {did_you_mean(str(key), valid)}")


def _to_tokens(keys: Mapping[str, Any]) -> list[str]:
    tokens: list[str] = []
    for key, value in keys.items():
        if value is None or value == []:
            continue  # nothing is said: the default holds
        values = value if isinstance(value, list) else [value]
        tokens += [f"--{key}", *(json.dumps(v) if isinstance(v, dict) else str(v) for v in values)]
    return tokens


def _typed_fields(flags: Sequence[str], offered: Iterable[type], parser: argparse.ArgumentParser) -> set[str]:
    refused = {name: reason for cls in offered for name, reason in _refused(cls).items()}
    known = {option: action for action in parser._actions for option in action.option_strings}
    typed = set()
    for flag in flags:
        if not flag.startswith("-") or re.fullmatch(r"-[\d.][\d.e+-]*", flag):
            continue
        name = flag.split("=")[0]
        field = name.removeprefix("--").removeprefix("no_").removeprefix("no-").replace("-", "_")
        if field in refused:
            raise UserError(f"{name} has another owner: {refused[field]}")
        if name not in known:
            # Each option is also known with hyphens.
            spelled = [word for word in known if "_" in word or "-" not in word[2:]]
            shown = [word for word in spelled if known[word].help != argparse.SUPPRESS]
            raise UserError(f"there is no option {name}: {did_you_mean(name, shown)}")
        typed.add(known[name].dest)
    return typed


def _build_parser(
    offered: Mapping[str, type], description: str | None, options: Mapping[str, Mapping[str, Any]]
) -> _Parser:
    parser = _Parser(
        [],
        usage=f"%(prog)s [RECIPE] [--key value ...]     RECIPE: {DEFAULT} where none is named",
        description=description,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    command = parser.add_argument_group("this command")
    for name, keywords in options.items():
        command.add_argument(f"--{name}", **keywords)
    inherited = []
    for section, cls in offered.items():
        builder = _Parser([cls], add_help=False, allow_abbrev=False)
        group = parser.add_argument_group(f"recipe section {section}")
        own = set(own_fields(cls))
        for action in builder._actions:
            if action.dest in _refused(cls):
                action.help = argparse.SUPPRESS
            if action.dest in own or action.dest in _refused(cls):
                group._add_action(action)
            else:
                inherited.append(action)
    if inherited:
        group = parser.add_argument_group("inherited from transformers.TrainingArguments")
        for action in inherited:
            group._add_action(action)
    return parser


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows each option once, under its name with underscores, with its default."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        option = next(iter(action.option_strings), action.dest)
        return f"{option} {self._format_args(action, action.dest.upper())}".rstrip() if action.nargs != 0 else option

    def _get_help_string(self, action: argparse.Action) -> str:
        text = " ".join((action.help or "").replace("%", "%%").split()) if action.help else ""
        if action.default in (None, argparse.SUPPRESS) or action.nargs == 0 or action.dest == "help":
            return text
        return f"{text} (default: {action.default})"
