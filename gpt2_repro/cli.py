"""The terminal side of every command: log, options, errors and exit codes."""

import argparse
import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

from gpt2_repro.errors import RunFailed, UserError, did_you_mean
from gpt2_repro.supervision import MISTAKE, note


KINDS = {  # the types of options, by name, with an example
    "int": ("a whole number", "100"),
    "_count": ("a whole number of at least 1", "100"),
    "float": ("a number", "0.5"),
    "TokenCount": ("a whole number of tokens", "1e6"),
    "string_to_bool": ("true or false", "true"),
    "Overrides": ("key=value,key=value or JSON", "n_inner=3072"),
}
LINE_SECONDS = 30.0  # between two lines of progress in a file


def is_local_main_process() -> bool:
    """Whether this process speaks for its machine: local rank 0 under a launcher, or the only process."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def run(main: Callable[[list[str]], None]) -> None:
    """Call `main` with the command line. A UserError becomes one line on stderr and exit code 2, a RunFailed 1.

    Under a launcher only local rank 0 prints, and each rank leaves the line in $TORCHELASTIC_ERROR_FILE, which
    the launcher quotes last, after a traceback of its own.
    """
    if {"--help", "-h"} & set(sys.argv[1:]):
        # Importing torch takes seconds. transformers lists its arguments without it, after a warning.
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    level = logging.INFO if is_local_main_process() else logging.WARNING
    logging.basicConfig(format="%(message)s", level=logging.WARNING, handlers=[_LogHandler(sys.stdout)])
    if not sys.stderr.isatty():
        _disable_bars()
    logging.getLogger("gpt2_repro").setLevel(level)
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except (UserError, RunFailed) as error:
        message = str(error).rpartition("UserError: ")[2].strip()  # a DataLoader's worker adds its traceback
        line = f"error: {message}"
        error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if error_file:
            # Elastic reads "message" as text, or as a mapping with the time that ranks the failures.
            Path(error_file).write_text(json.dumps({"message": line}))
        if is_local_main_process():
            if isinstance(error, UserError):
                note(MISTAKE, message)  # before it is printed: the supervisor prints it last, and nothing else
            for bar in list(getattr(tqdm, "_instances", ())):
                bar.close()
            print(line, file=sys.stderr, flush=True)
        sys.exit(2 if isinstance(error, UserError) else 1)
    except BrokenPipeError:
        # Whoever read the output, `head` say, has read enough; what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        if is_local_main_process():
            print("\nInterrupted.", file=sys.stderr)
        sys.exit(130)


class Progress(tqdm):
    """A progress bar. If stderr is not a terminal: a line of text every LINE_SECONDS.

    Args:
        iterable, options: of tqdm.
        hidden: show nothing.
    """

    total: float | None

    def __init__(
        self, iterable: Iterable[Any] | None = None, *, desc: str, hidden: bool = False, **options: Any
    ) -> None:
        in_lines = not hidden and not sys.stderr.isatty()
        super().__init__(iterable, desc=desc, disable=hidden or in_lines, dynamic_ncols=True, **options)
        self._text, self._written_at = desc if in_lines else "", time.monotonic()
        if in_lines and self.total is None and isinstance(iterable, Sized):
            self.total = len(iterable)

    def __iter__(self) -> Iterator[Any]:
        for item in self.iterable:
            yield item
            self.update()

    def update(self, n: float | None = 1) -> bool | None:
        if not self._text:
            return super().update(n)
        self.n += n
        if self.total and time.monotonic() - self._written_at >= LINE_SECONDS:
            self._written_at = time.monotonic()
            print(f"{self._text}: {self.n / self.total:.0%}", file=sys.stderr, flush=True)
        return None


class _LogHandler(logging.StreamHandler):
    """Writes each message on a line of its own, above the progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(self.stream):
            super().emit(record)


def _disable_bars() -> None:
    """Disable the progress bars of all libraries: in a file each frame of a bar would be kept."""
    begin = tqdm.__init__

    def disabled(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **options | {"disable": True})

    tqdm.__init__ = disabled


class OneLineErrors(argparse.ArgumentParser):
    """argparse whose errors are UserErrors of one line, each with an example of a good value. No abbreviations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False} | kwargs)
        self.register("type", int, _whole_number)
        self.register("type", float, _finite_number)
        self._negative_number_matcher = re.compile(r"-\.?\d")  # Python 3.11 takes -1e-3 for an option

    def error(self, message: str) -> NoReturn:
        if needed := re.match(r"argument (-[\w-]+).*: expected (at least )?one argument", message):
            action = self._option_string_actions[needed[1]]
            raise UserError(f"{_name(action)} needs a value, such as {_example(action)}")
        if surplus := re.match(r"argument (-[\w-]+).*: ignored explicit argument", message):
            raise UserError(f"{surplus[1]} takes no value. Pass it alone.")
        if surplus := re.match(r"unrecognized arguments: (\S+)", message):
            fix = f"Name the recipe first, then options: {self.prog} RECIPE --key value"
            if Path(surplus[1]).is_dir():
                fix = f"Pass a prepared folder as --dataset_dir {surplus[1]}"
            raise UserError(f"Unexpected {surplus[1]!r}. {fix}")
        raise UserError(f"{message.removeprefix('argument ')}; see --help")

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        try:
            if text or not action.default:
                return super()._get_value(action, text)
        except argparse.ArgumentError:
            if text.endswith((".yaml", ".yml")):
                raise UserError(f"The recipe comes first: {self.prog} {text} {_name(action)} …") from None
        raise UserError(
            f"{_name(action)} cannot be {text!r}. It needs {_kind(action)[0]}, such as {_example(action)}."
        )

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise UserError(f"{_name(action)} cannot be {str(value)!r}: {did_you_mean(str(value), action.choices)}")


def _whole_number(text: str) -> int:
    """Read `100`, `1_000` or `1e2`. Raises ValueError for everything else."""
    try:
        return int(text)
    except ValueError:
        number = _finite_number(text)
        if not number.is_integer():
            raise
        return int(number)


def _finite_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _name(action: argparse.Action) -> str:
    return next(iter(action.option_strings), action.dest)


def _kind(action: argparse.Action) -> tuple[str, str]:
    """What the values of an option are, and one of them."""
    value = str(action.metavar or action.dest.upper())
    return KINDS.get(getattr(action.type, "__name__", ""), ("a value", value))


def _example(action: argparse.Action) -> str:
    """An option with a good value: its default, or one that fits its type."""
    values = action.default if isinstance(action.default, list) else [action.default]
    if action.choices is not None:
        values = [next(iter(action.choices))]
    default = " ".join(str(value) for value in values if value and value is not True)
    return f"{_name(action)} {default or _kind(action)[1]}"


class CommandParser(OneLineErrors):
    """The parser of the commands without a recipe. A wrong option names the nearest one."""

    def __init__(self, *, prog: str, description: str | None, **kwargs: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=prog, description=description, formatter_class=formatter, **kwargs)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the options. Raises UserError for unknown ones and impossible values."""
        # Before Python 3.12.8 parse_known_args refuses positional arguments after options that follow others.
        takes_command = any(action.nargs == argparse.REMAINDER for action in self._actions)
        parse = self.parse_known_args if takes_command else self.parse_known_intermixed_args
        options, unknown = parse(argv)
        if unknown:
            flag = unknown[0].split("=")[0]
            names = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
            known = [name for name in names if name != "--help"]
            raise UserError(f"{self.prog} has no option {flag}: {did_you_mean(flag, known)}")
        return options
