"""Read a recipe and a command line, and return one dataclass instance per section.

A recipe is a YAML file with the sections data, model, training and evaluation.
"""

import argparse
import dataclasses
import glob
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Generic, NoReturn, TypeVar

import yaml
from transformers.hf_argparser import HfArgumentParser

from gpt2_repro.cli import OneLineErrors, other_name
from gpt2_repro.errors import UserError, did_you_mean, in_a_line, nearest


DEFAULT = Path("recipes/gpt2_124m.yaml")  # if no recipe is passed
SECTIONS = ("data", "model", "training", "evaluation")
SIZES = {"small": "124m", "medium": "350m", "355m": "350m", "large": "774m", "xl": "1558m", "1.5b": "1558m"}
PLACES = {"dataset_dir", "output_dir", "resume_from", "report_to", "run_name", "hellaswag_data"}  # do not change a run

D = TypeVar("D")
M = TypeVar("M")
T = TypeVar("T")
E = TypeVar("E")


@dataclasses.dataclass(frozen=True)
class Recipe(Generic[D, M, T, E]):
    """A recipe with the overrides of the command line.

    A section that the command does not use is None.

    Attributes:
        typed: names of the fields and options on the command line.
        stated: names of the fields on the command line or in the file.
        options: the options that are not fields of a recipe.
        written: the sections as written in the file, without defaults and overrides.
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
        """The recipe's sections by name, without sections that the command does not use."""
        return {name: section for name in SECTIONS if (section := getattr(self, name)) is not None}

    @property
    def title(self) -> str:
        """The name of the recipe and the overrides, such as `gpt2_124m seed=43`."""
        values = {key: value for section in self.sections.values() for key, value in values_of(section).items()}
        typed = [f"{key}={values[key]}" for key in sorted(self.typed & values.keys()) if key not in PLACES]
        return " ".join([self.path.stem, *typed])

    def to_yaml(self) -> str:
        """Return the resolved recipe as YAML text, which is a valid recipe.

        Fields inherited from transformers' TrainingArguments are omitted if they have the default value.
        """
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
        return f"# Resolved from {self.path}\n{text}"


def values_of(section: Any) -> dict[str, Any]:
    """Return the values of a recipe section by field name."""
    return {field.name: getattr(section, field.name) for field in dataclasses.fields(section) if field.init}


class _Parser(OneLineErrors, HfArgumentParser):
    """HfArgumentParser with one-line errors."""


class _UniqueKeys(yaml.SafeLoader):
    """A YAML loader that refuses a repeated key. PyYAML would use the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if repeated := next((key for key in keys if keys.count(key) > 1), None):
            raise yaml.YAMLError(f"The key {repeated!r} occurs twice. Remove one occurrence.")
        return super().construct_mapping(node, deep)


def load_sections(path: Path) -> dict[str, dict[str, Any]]:
    """Return the sections of a recipe as written in its file.

    Raises UserError if the file is missing, is not a recipe, or has an unknown section.
    """
    if len(recipes := sorted(path.glob("*.yaml"))) == 1:
        raise UserError(f"{path} is a folder. Pass the recipe in it: {recipes[0]}")
    if path.is_dir():
        raise UserError(f"{path} is a folder. Pass a recipe file, or --dataset_dir {path} for prepared data.")
    if not path.is_file():
        raise UserError(f"Recipe not found: {path}. {_similar_recipe(path)}")
    try:
        document = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        document, mark = None, getattr(error, "problem_mark", None)
        if path.suffix in (".yaml", ".yml"):
            where = f", line {mark.line + 1}, is" if mark else " is"
            fix = "Write each field as `key: value`, indented below its section. Quote a value that has a colon."
            if isinstance(error, UnicodeDecodeError):
                fix = "Save the file as UTF-8."
            elif tabbed := [line for line in path.read_text(encoding="utf-8").splitlines() if re.match(r" *\t", line)]:
                fix = f"Indent the line `{tabbed[0].strip()}` with spaces, not with a tab."
            elif blank := [line for line in path.read_text(encoding="utf-8").splitlines() if "\u00a0" in line]:
                fix = f"Replace the non-breaking spaces in this line by spaces: {blank[0].strip()}"
            elif not mark:
                fix = in_a_line(error)  # of _UniqueKeys
            raise UserError(f"{path}{where} not valid YAML. {fix}") from None
    if not isinstance(document, dict):
        fix = f"Prepare text with: python prepare_data.py recipes/own_text.yaml --data_files {path}"
        if path.suffix in (".yaml", ".yml", ".py"):
            fix = f"{DEFAULT} is an example."
        raise UserError(f"{path} is not a recipe. A recipe has the sections {', '.join(SECTIONS)}. {fix}")
    if "compute_environment" in document:
        raise UserError(f"{path} is a launcher config. Run: accelerate launch --config_file {path} train.py RECIPE")
    for section, keys in document.items():
        if section not in SECTIONS:
            has = f"A recipe has the sections {', '.join(SECTIONS)}."
            near = nearest(str(section), SECTIONS)
            fix = f"Did you mean {near!r}? {has}" if near else f"{has} Move the key into one of them, or remove it."
            raise UserError(f"{path} has the key {section!r} at the top level, which is not a section. {fix}")
        if not isinstance(keys or {}, dict):
            raise UserError(f"{path}: section {section!r} must have lines of the form `key: value`.")
    return {section: keys or {} for section, keys in document.items()}


def _similar_recipe(path: Path) -> str:
    """Return the fix for a missing recipe file, for example a similar file name."""
    if (same := path.with_suffix(".yaml" if path.suffix == ".yml" else ".yml")).is_file():
        return f"Did you mean {str(same)!r}?"
    if parts := sorted(path.parent.glob(f"{glob.escape(path.name)} *")):
        return f"Did you mean '{parts[0]}'? Quote names with spaces."
    if "=" in path.name:
        return f"Options start with --. Pass --{path}."
    if path.suffix in (".txt", ".md", ".json", ".jsonl", ".csv", ".parquet", ".gz", ".zst"):
        return "Pass a .yaml file. Prepare text with: python prepare_data.py recipes/own_text.yaml --data_files FILE"
    if not DEFAULT.parent.is_dir():
        return f"Run the command in the root folder of this project, which contains {DEFAULT.parent}/."
    recipes = {recipe.stem: recipe for recipe in sorted(DEFAULT.parent.glob("*.yaml"))} or {DEFAULT.stem: DEFAULT}
    stem = path.stem.lower().replace("-", "_")
    for size, parameters in SIZES.items():
        stem = re.sub(rf"(?<![a-z0-9])({size})(?![a-z0-9])", parameters, stem)
    stem = {"gpt2": DEFAULT.stem, "train_gpt2": DEFAULT.stem}.get(stem, stem)
    near = nearest(stem, recipes)
    return f"Did you mean {str(recipes[near])!r}?" if near else f"{DEFAULT.parent}/ has {', '.join(recipes)}."


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
    groups: Mapping[str, Sequence[str]] | None = None,
) -> Recipe[D, M, T, E]:
    """Parse a command line `[RECIPE] [--key value ...]`, and return the recipe.

    Without RECIPE, recipes/gpt2_124m.yaml is read.

    Args:
        data, model, training, evaluation: the dataclass of each section. Sections without a dataclass are not checked.
        offered: the sections whose fields are also options of this command.
        options: the options that are not fields of a recipe, with keyword arguments for `add_argument`.
        groups: the options that --help lists, by heading. If `groups` is None, --help lists all options.

    Raises UserError if the recipe file does not exist, and for invalid sections, keys, options and choices.
    """
    given = zip(SECTIONS, (data, model, training, evaluation), strict=True)
    classes: dict[str, Any] = {name: cls for name, cls in given if cls is not NoneType}
    named = bool(argv) and not argv[0].startswith("-")
    path, flags = (Path(argv[0]), list(argv[1:])) if named else (DEFAULT, list(argv))
    flagged = {name: cls for name, cls in classes.items() if name in offered}
    parser = _build_parser(flagged, description, options or {})
    parser.prog, parser.typed = prog or parser.prog, flags
    if {"--help", "-h"} & set(flags):
        _print_help(parser, None if "all" in argv else groups)

    written = load_sections(path)
    tokens: list[str] = []
    for name, cls in flagged.items():
        _check_keys(path, name, written.get(name, {}), cls, classes)
        tokens += _to_tokens(path, written.get(name, {}), parser)
    typed = _typed_fields(flags, flagged.values(), parser)
    # The fields of the file come first: they are checked like options, and the command line overrides them.
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
    """Return one section of a recipe as an instance of the dataclass `cls`."""
    keys = load_sections(path).get(section, {})
    _check_keys(path, section, keys, cls, {})
    parser = _Parser([cls], add_help=False)
    return cls(**vars(parser.parse_args(_to_tokens(path, keys, parser))))


def own_fields(cls: type) -> list[str]:
    """Return the fields that a dataclass itself declares, without inherited fields."""
    return [field.name for field in dataclasses.fields(cls) if field.init and field.name in cls.__annotations__]


def _refused(cls: type) -> dict[str, str]:
    """Return the fields of a dataclass that users cannot set, with the reasons."""
    return getattr(cls, "refused", {})


def _check_keys(path: Path, section: str, keys: Mapping[str, Any], cls: type, sections: Mapping[str, type]) -> None:
    valid = {field.name for field in dataclasses.fields(cls) if field.init} - _refused(cls).keys()
    for key in keys:
        if key in _refused(cls):
            raise UserError(f"{path}: {section}.{key} cannot be set: {_refused(cls)[key]}")
        if key not in valid:
            for owner, other in sections.items():
                if key in {field.name for field in dataclasses.fields(other)}:
                    raise UserError(f"{path}: {key} is a key of the section {owner}, not of {section}. Move the key.")
            hint = other_name(f"--{key}", {f"--{name}" for name in valid}) or did_you_mean(str(key), valid)
            raise UserError(
                f"{path}: The section {section} has no key {str(key)!r}. {hint.replace('Pass --', 'Write --').replace('--', '')}"
            )


def _to_tokens(path: Path, keys: Mapping[str, Any], parser: argparse.ArgumentParser) -> list[str]:
    tokens: list[str] = []
    for key, value in keys.items():
        if value is None or value == []:
            continue  # not set: the default applies
        values = value if isinstance(value, list) else [value]
        if isinstance(value, list) and parser._option_string_actions[f"--{key}"].nargs is None:
            raise UserError(f"{path}: {key} is a list, but it needs one value. Write {key}: {value[0]}")
        tokens += [f"--{key}", *(json.dumps(v) if isinstance(v, dict) else str(v) for v in values)]
    return tokens


def _typed_fields(flags: Sequence[str], offered: Iterable[type], parser: argparse.ArgumentParser) -> set[str]:
    refused = {name: reason for cls in offered for name, reason in _refused(cls).items()}
    known = {option: action for action in parser._actions for option in action.option_strings}
    typed = set()
    for flag in flags:
        if not flag.startswith("-") or re.match(r"-([\d.]|inf|nan|$)", flag):
            continue
        name = flag.split("=")[0]
        field = name.removeprefix("--").removeprefix("no_").removeprefix("no-").replace("-", "_")
        if field in refused:
            raise UserError(f"{name} cannot be set: {refused[field]}")
        if name not in known:
            if Path(name).is_file():
                raise UserError(f"{name} looks like an option. Pass the file as ./{name}.")
            if re.match("--no[_-]", name) and f"--{field}" in known:
                raise UserError(f"{name} is not an option. Pass --{field} false.")
            # The parser also accepts each option with hyphens.
            spelled = [word for word in known if "_" in word or "-" not in word[2:]]
            shown = [word for word in spelled if known[word].help != argparse.SUPPRESS]
            raise UserError(
                other_name(name, known, parser.prog) or f"Unknown option {name}. {did_you_mean(name, shown)}"
            )
        if known[name].nargs == "+" and known[name].dest in typed:
            raise UserError(f"{name} was passed twice. Pass it once, with all values: {name} A B")
        typed.add(known[name].dest)
    return typed


def _build_parser(
    offered: Mapping[str, type], description: str | None, options: Mapping[str, Mapping[str, Any]]
) -> _Parser:
    parser = _Parser(
        [],
        usage=f"%(prog)s [RECIPE] [--key value ...]     default RECIPE: {DEFAULT}",
        description=description,
        formatter_class=_HelpFormatter,
    )
    command = parser.add_argument_group("options of this command")
    for name, keywords in options.items():
        command.add_argument(f"--{name}", **keywords)
    inherited = []
    for section, cls in offered.items():
        builder = _Parser([cls], add_help=False)
        group = parser.add_argument_group(f"section `{section}` of the recipe")
        own = set(own_fields(cls))
        for action in builder._actions:
            if action.dest == "report_to":
                action.nargs, action.type = "+", str
            if action.dest in _refused(cls):
                action.help = argparse.SUPPRESS
            elif action.option_strings[0] == f"--no_{action.dest}":
                action.help = f"Turn off --{action.dest}."
            if action.dest in own or action.dest in _refused(cls):
                group._add_action(action)
            else:
                inherited.append(action)
    if inherited:
        group = parser.add_argument_group("inherited from transformers.TrainingArguments")
        for action in inherited:
            group._add_action(action)
    return parser


def _print_help(parser: _Parser, groups: Mapping[str, Sequence[str]] | None) -> NoReturn:
    """Print the help for the options in `groups`, or for all options, and exit."""
    if groups is not None:
        actions = {action.dest: action for action in reversed(parser._actions)}  # --no_x comes after --x
        parser._action_groups = []
        for title, names in groups.items():
            group = parser.add_argument_group(title)
            for name in names:
                group._group_actions.append(actions[name])
        parser.epilog = "Run with --help all to list all options."
    parser.print_help()
    sys.exit()


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """A help formatter that shows one spelling of each option, and the default value.

    Option names are spelled with underscores.
    """

    def _format_action_invocation(self, action: argparse.Action) -> str:
        option = next(iter(action.option_strings), action.dest)
        return f"{option} {self._format_args(action, action.dest.upper())}".rstrip() if action.nargs != 0 else option

    def _get_help_string(self, action: argparse.Action) -> str:
        text = " ".join((action.help or "").replace("%", "%%").split()) if action.help else ""
        if action.default in (None, "", [], argparse.SUPPRESS) or action.nargs == 0 or action.dest == "help":
            return text
        return f"{text} (default: {action.default})"
