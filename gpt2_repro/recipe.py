"""A recipe is one YAML file that describes one run, in the sections data, model, training and evaluation.

A section's keys become command-line tokens placed before the user's own, so a file and a flag pass the same
validation and the command line wins. Each section belongs to one dataclass, which lives beside the code it configures;
its `refused` maps the fields that something else owns to the reason.
"""

import argparse
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from transformers.hf_argparser import HfArgumentParser

from gpt2_repro.errors import UserError, did_you_mean


DEFAULT = Path("recipes/gpt2_124m.yaml")  # where no recipe is named
SECTIONS = ("data", "model", "training", "evaluation")
PLACES = {"dataset_dir", "output_dir", "resume_from", "report_to", "run_name", "hellaswag_data"}  # change no run


@dataclasses.dataclass(frozen=True)
class ParsedRecipe:
    """What a recipe and a command line say together."""

    path: Path
    sections: Mapping[str, type]
    values: dict[str, dict[str, Any]]  # by section: every field of its dataclass
    typed: frozenset[str]  # the fields that the user typed on the command line
    extras: argparse.Namespace  # options that belong to the command, not to the recipe

    @property
    def title(self) -> str:
        """The recipe and what was typed to change it: `gpt2_124m learning_rate=0.0003 seed=43`."""
        values = {key: value for section in self.values.values() for key, value in section.items()}
        typed = [f"{key}={values[key]}" for key in sorted(self.typed & values.keys()) if key not in PLACES]
        return " ".join([self.path.stem, *typed])

    def resolved(self) -> dict[str, dict[str, Any]]:
        """What a reader needs to run it again: each section's own fields, and inherited ones that were changed."""
        shown: dict[str, dict[str, Any]] = {}
        for section, cls in self.sections.items():
            refused, own = _refused(cls), own_fields(cls)
            defaults = {field.name: field.default for field in dataclasses.fields(cls)}
            shown[section] = {
                key: value
                for key, value in self.values[section].items()
                if value is not None and key not in refused and (key in own or value != defaults[key])
            }
        return shown

    def to_yaml(self, **derived: Any) -> str:
        """The resolved recipe as the same commands read it again; `derived` replaces values."""
        resolved = self.resolved()
        for section, cls in self.sections.items():
            resolved[section] |= {key: value for key, value in derived.items() if key in own_fields(cls)}
        # Through JSON, because YAML knows neither TokenCount nor enumerations.
        plain = json.loads(json.dumps(resolved))
        text = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=119)
        return f"# {self.path} as it was resolved\n{text}"


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
    sections: Mapping[str, type],
    options: Sequence[str] | None = None,
    description: str | None = None,
    prog: str | None = None,
    extras: Mapping[str, dict[str, Any]] | None = None,
    leave_others: bool = False,
) -> ParsedRecipe:
    """Read `[RECIPE] [--key value …]`.

    Args:
        argv: the command line after the program's name.
        sections: the dataclass of each section that is checked; a section of the file that is not named here is
            left to the commands that own it.
        options: the sections whose fields are also flags of this command; all of `sections` by default.
        description: shown by --help, usually the command's docstring.
        prog: how the command is typed, where that is not the name of its file.
        extras: further flags of the command itself, by name, with the keywords of `add_argument`.
        leave_others: pass over flags that are none of these sections': a first look, before the whole is parsed.

    Raises UserError for a missing recipe and for unknown or refused sections, keys, flags and choices.
    """
    named = bool(argv) and not argv[0].startswith("-")
    path, flags = (Path(argv[0]), list(argv[1:])) if named else (DEFAULT, list(argv))
    offered = {name: sections[name] for name in (sections if options is None else options)}
    parser = _build_parser(offered, description, extras or {})
    parser.prog = prog or parser.prog
    if "--help" in flags or "-h" in flags:
        parser.parse_args(["--help"])

    tokens: list[str] = []
    written = load_sections(path)
    for section in sections:
        _check_keys(path, section, written.get(section, {}), sections[section])
        if section in offered:
            tokens += _to_tokens(written.get(section, {}))
    if leave_others:
        known = {option for action in parser._actions for option in action.option_strings}
        typed = {flag.split("=")[0][2:].replace("-", "_") for flag in flags if flag.split("=")[0] in known}
        namespace, _ = parser.parse_known_args(tokens + flags)
    else:
        typed = _typed_fields(flags, offered, parser)
        namespace = parser.parse_args(tokens + flags)
    values = {
        section: {field.name: getattr(namespace, field.name) for field in dataclasses.fields(cls) if field.init}
        if section in offered
        else dataclasses.asdict(read_section(path, section, cls))
        for section, cls in sections.items()
    }
    own = argparse.Namespace(**{name: getattr(namespace, name) for name in extras or {}})
    return ParsedRecipe(path=path, sections=sections, values=values, typed=frozenset(typed), extras=own)


def read_section(path: Path, section: str, cls: type) -> Any:
    """One section of a recipe as its dataclass, with the defaults for what it does not say."""
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


def _typed_fields(flags: Sequence[str], offered: Mapping[str, type], parser: argparse.ArgumentParser) -> set[str]:
    refused = {name: reason for cls in offered.values() for name, reason in _refused(cls).items()}
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
    offered: Mapping[str, type], description: str | None, extras: Mapping[str, Mapping[str, Any]]
) -> _Parser:
    parser = _Parser(
        [],
        usage=f"%(prog)s [RECIPE] [--key value ...]     RECIPE: {DEFAULT} where none is named",
        description=description,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    command = parser.add_argument_group("this command")
    for name, keywords in extras.items():
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
