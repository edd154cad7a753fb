"""Set up logging, parse options, and convert errors to exit codes."""

import argparse
import errno
import gc
import io
import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Sized
from pathlib import Path
from typing import IO, Any, NoReturn, TextIO


try:
    import yaml
    from tqdm import tqdm
except ModuleNotFoundError:
    fix = "Run: source .venv/bin/activate, or pip install -r requirements.txt"
    print(f"error: {sys.executable} does not have the required packages. {fix}", file=sys.stderr)
    sys.exit(2)

from gpt2_repro.errors import RunFailed, UserError, did_you_mean, in_a_line, nearest
from gpt2_repro.manifest import MANIFEST
from gpt2_repro.run_record.supervision import MISTAKE, note


KINDS = {  # name of an option's type: description of the value, and an example
    "int": ("a whole number", "100"),
    "positive_count": ("a whole number from 1 to 1e9", "8"),
    "positive_number": ("a number above 0", "100"),
    "float": ("a number", "0.5"),
    "TokenCount": ("a whole number of tokens", "1e6"),
    "string_to_bool": ("true or false", "true"),
    "Overrides": ("key=value,key=value or JSON", "n_inner=3072"),
}
UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "%": 0.01}
OTHER_NAMES = Path(__file__).with_name("other_names.yaml")
MODEL_OPTION = re.compile("--?(model|checkpoint|ckpt|run|m)(_?(path|dir|name|name_or_path|args|file))?")
OUTPUT_OPTION = re.compile("--?(out|output|save|o)(_?(path|dir|file))?")
DISK_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
WAIT_FOR_MESSAGE = 2.0  # seconds in which the main process of a machine can print its message
LINE_SECONDS = 30.0  # between two progress lines if stderr is not a terminal


def is_local_main_process() -> bool:
    """Return whether this process has local rank 0 or was started without a launcher."""
    return os.environ.get("LOCAL_RANK", "0") == "0" or "MASTER_ADDR" not in os.environ


def run(main: Callable[[list[str]], None], *, prints_results: bool = True) -> None:
    """Call `main` with the command-line arguments, and convert errors to exit codes.

    The message of a UserError (exit code 2) or RunFailed (exit code 1) is printed on stderr as one line.

    Args:
        prints_results: whether stdout is the result of the command. If not, a full disk loses lines of stdout instead
            of ending the command. This is always so for stderr.
    """
    sys.stderr = _without_disk_errors(sys.stderr)
    if not prints_results:
        sys.stdout = _without_disk_errors(sys.stdout)
    gc.set_threshold(1_000_000)  # imports create millions of objects, and take 12 % less time without collections
    if {"--help", "-h"} & set(sys.argv[1:]):
        # Importing torch takes seconds. transformers can list its arguments without torch, after a warning.
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
    # OpenMP threads wait for each other in a busy loop. If another program uses one of the cores, a short loop makes
    # training on a CPU about five times faster (dev/LOG.md). torch reads this variable when it is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    level = logging.INFO if is_local_main_process() else logging.WARNING
    log = _LogHandler(sys.stderr if "--json" in sys.argv else sys.stdout)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, handlers=[log])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows ? instead of ✓
    if not sys.stderr.isatty():
        _disable_bars()
    logging.getLogger("gpt2_repro").setLevel(level)
    # Saving a model imports DeepSpeed, which then warns on each machine without a GPU.
    logging.getLogger("DeepSpeed").addFilter(lambda record: "accelerator to CPU" not in record.getMessage())
    try:
        try:
            # A shell does not expand a quoted ~, nor that of --output_dir=~/runs.
            main([re.sub(r"^(--\w+=)?~(?=/|$)", rf"\1{Path.home()}", word) for word in sys.argv[1:]])
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            fix = "If the disk is full, free some space. Otherwise change the permissions, or pass another path."
            if error.errno == errno.EFBIG:
                fix = "Raise the limit for the size of files (ulimit -f), or use another file system."
            where = error.filename or "a file or the output of this command"
            raise UserError(f"{error.strerror}: {where}. {fix}") from None
        except ImportError as error:
            if "pip install" not in str(error):
                raise
            raise UserError(in_a_line(error)) from None  # an optional package, such as bitsandbytes
        except Exception as error:
            if "os error 28" not in str(error) or isinstance(error, UserError | RunFailed):
                raise
            # The libraries tokenizers and safetensors raise other exceptions than OSError.
            raise UserError("The disk is full. Free some space, or pass a folder on another disk.") from None
        sys.stdout.flush()
    except (UserError, RunFailed) as error:
        message = str(error).rpartition("UserError: ")[2].strip()  # DataLoader workers add a traceback
        line = "error: " + re.sub(r"[\r\n]", lambda sign: repr(sign[0])[1:-1], message)
        error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if error_file:
            # The launcher prints a traceback, and then the message in this file. torch elastic reads "message" as a
            # text, or as a mapping with the time that orders the failures.
            Path(error_file).write_text(json.dumps({"message": line}), encoding="utf-8")
        if is_local_main_process():
            if isinstance(error, UserError):
                note(MISTAKE, message)  # before printing, because the supervisor then drops stderr
            for bar in list(getattr(tqdm, "_instances", ())):
                bar.close()
            print(line, file=sys.stderr, flush=True)
        else:
            time.sleep(WAIT_FOR_MESSAGE)  # the launcher ends all processes after the first exit
        sys.exit(2 if isinstance(error, UserError) else 1)
    except BrokenPipeError:
        # The reader of stdout, such as `head`, has exited.
        _discard(sys.stdout)
        sys.exit(1)
    except KeyboardInterrupt:
        if is_local_main_process():
            print("\nInterrupted.", file=sys.stderr)
        sys.exit(130)


class _Output(io.FileIO):
    """A file descriptor that loses data while its disk is full."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return len(data)


def _without_disk_errors(stream: TextIO) -> TextIO:
    """Return a copy of `stream` that loses text while its disk is full."""
    if stream not in (sys.__stdout__, sys.__stderr__):
        return stream  # replaced by a test or a notebook
    buffer = io.BufferedWriter(_Output(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(buffer, stream.encoding, "replace", line_buffering=True)


def _discard(stream: IO[str]) -> None:
    """Redirect an output stream to /dev/null, and discard its buffered text."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Progress(tqdm):
    """A tqdm progress bar, or lines of text if stderr is not a terminal.

    Each line has the completed percentage. Lines are at least LINE_SECONDS seconds apart.
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
    """A log handler that prints messages above the progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        with tqdm.external_write_mode(self.stream):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        if isinstance(sys.exc_info()[1], BrokenPipeError):
            _discard(self.stream)  # the command continues without a reader
        elif not isinstance(sys.exc_info()[1], OSError):  # without space for the message, a run continues
            super().handleError(record)


def _disable_bars() -> None:
    """Disable the progress bars of all libraries, because they would fill a log file."""
    begin = tqdm.__init__

    def disabled(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **options | {"disable": True})

    tqdm.__init__ = disabled


class OneLineErrors(argparse.ArgumentParser):
    """An argument parser that raises a UserError with a message of one line.

    Abbreviated option names are not accepted.

    Attributes:
        typed: the arguments of the command line. Arguments made from the fields of a recipe file are not included.
    """

    typed: Sequence[str] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False} | kwargs)
        self.register("type", int, _whole_number)
        self.register("type", float, _finite_number)
        self._negative_number_matcher = re.compile(r"-\.?\d")  # Python 3.11 parses -1e-3 as an option

    def error(self, message: str) -> NoReturn:
        if needed := re.match(r"argument (-[\w-]+).*: expected (at least )?one argument", message):
            action = self._option_string_actions[needed[1]]
            raise UserError(f"{_name(action)} needs a value, such as {_example(action)}.")
        if surplus := re.match(r"argument (-[\w-]+).*: ignored explicit argument", message):
            raise UserError(f"{surplus[1]} takes no value. Remove the value.")
        if missing := re.match(r"the following arguments are required: (RUN|CHECKPOINT|checkpoint)", message):
            raise UserError(f"No {missing[1].upper()} was passed. Example: {self.prog} runs/demo")
        if re.match(r"unrecognized arguments:  +-", message):
            raise UserError("An option begins with a space. If a line ends with \\, remove the spaces after it.")
        if surplus := re.match(r"unrecognized arguments: (\S+)", message):
            fix = (
                f"Pass one recipe, before the options: {self.prog} RECIPE --key value. Quote a value that has spaces."
            )
            place = self.typed.index(surplus[1]) if surplus[1] in self.typed else 0
            before = self._option_string_actions.get(self.typed[place - 2]) if place >= 2 else None
            is_recipe = surplus[1].endswith((".yaml", ".yml"))
            if before is not None and before.nargs is None and not is_recipe:
                fix = f"{_name(before)} takes one value. Quote a value with spaces."
            name, equals, value = surplus[1].lstrip("-\u2013\u2014").partition("=")
            if f"--{name}" in self._option_string_actions and (equals or name != surplus[1]):
                fix = f"Write --{name}, with two hyphens" + (f": --{name} {value}" if equals else ".")
            if surplus[1].lower() in ("true", "false"):
                fix = "An option such as --no_bf16 takes no value."
            is_text = Path(surplus[1]).exists() and Path(surplus[1]).suffix not in (".yaml", ".yml")
            if is_text and "--data_files" in self._option_string_actions:
                fix = f"Pass --data_files {surplus[1]}."
            if Path(surplus[1], MANIFEST).is_file():
                fix = f"Pass --dataset_dir {surplus[1]} to use a prepared folder."
            raise UserError(f"Unexpected argument {surplus[1]!r}. {fix}")
        raise UserError(f"{message.removeprefix('argument ')}. Pass --help to list the options.")

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        try:
            if text or not action.default:
                return super()._get_value(action, text)
        except argparse.ArgumentError:
            if text.endswith((".yaml", ".yml")):
                raise UserError(f"Pass the recipe before the options: {self.prog} {text} {_name(action)} …") from None
        number = self._meant(action, text)
        example = f"{_name(action)} {number}" if number else _example(action)
        raise UserError(f"{_name(action)} cannot be {text!r}. It needs {_kind(action)[0]}, such as {example}.")

    def _meant(self, action: argparse.Action, text: str) -> str:
        """Convert `text`, a value with a unit or a decimal comma, to a plain number.

        If the value of an option is invalid, the error message suggests this number. For example, the result for `10M`
        is 10000000, and the result for `1,5e-3` is 0.0015. The result is "" if `text` cannot be converted, or if the
        option (`action`) does not accept the number.
        """
        # Not k, m and b for a float: 5m would be minutes in --save_minutes.
        units = "%" if action.type is float else "kmb%"
        found = re.fullmatch(rf"\$?(\d+(?:[.,]\d+)?(?:e[+-]?\d+)?) ?([{units}]?)", text.lower())
        if not found:
            return ""
        number = f"{float(found[1].replace(',', '.')) * UNITS.get(found[2], 1):.12g}"
        try:
            super()._get_value(action, number)
        except argparse.ArgumentError:
            return ""
        return number

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise UserError(f"{_name(action)} cannot be {str(value)!r}. {did_you_mean(str(value), action.choices)}")


def _whole_number(text: str) -> int:
    """Parse an integer such as `100`, `1_000` or `1e2`.

    Raises ValueError if `text` is not an integer.
    """
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


def positive_count(text: str) -> int:
    """Parse a whole number from 1 to a billion. Raises ValueError for other text."""
    if not 1 <= (number := _whole_number(text)) <= 10**9:
        raise ValueError(text)
    return number


def positive_number(text: str) -> float:
    """Parse a number from 1e-9 to 1e18. Raises ValueError for other text."""
    if not 1e-9 <= (number := _finite_number(text)) <= 1e18:
        raise ValueError(text)
    return number


def _name(action: argparse.Action) -> str:
    return next(iter(action.option_strings), action.dest)


def _place(action: argparse.Action) -> str:
    """Return a positional argument's placeholder in the usage line, such as `RECIPE`."""
    return str(action.metavar or action.dest.upper())


def _kind(action: argparse.Action) -> tuple[str, str]:
    """Return a description of an option's value, and an example value."""
    return KINDS.get(getattr(action.type, "__name__", ""), ("a value", _place(action)))


def _example(action: argparse.Action) -> str:
    """Return an option with a valid value as text, such as `--seed 42`."""
    values = action.default if isinstance(action.default, list) else [action.default]
    if action.choices is not None:
        values = [next(iter(action.choices))]
    default = " ".join(str(value) for value in values if value and value is not True)
    return f"{_name(action)} {default or _kind(action)[1]}"


def other_name(name: str, options: Collection[str], prog: str = "") -> str | None:
    """Return a hint if `name` is an option of another project, otherwise None.

    For example, the hint for --block_size is "Pass --sequence_length instead of nanoGPT's --block_size."

    Args:
        options: the options of this command.
        prog: the name of this command, `train.py` or `prepare_data.py`. The hint can also name an option of the other
            of these two commands. If `prog` is "", the hint cannot name such an option.
    """
    key = name.lstrip("-").replace("-", "_")
    for project, table in yaml.safe_load(OTHER_NAMES.read_text(encoding="utf-8")).items():
        groups = table.get("names", [])
        ours = next((group["to"] for group in groups if key in group["names"].split()), None)
        ours = ours or table.get("options", {}).get(key)
        if ours is None or (project == "llm.c") == name.startswith("--"):
            continue
        known = {text: re.split("[ ,]", text)[0] in options for text in ([ours] if isinstance(ours, str) else ours)}
        ours = next((text for text in known if known[text]), next(iter(known)))
        theirs = name if project == "common" else f"{project}'s {name}"
        page = f" See {table['page']}." if "page" in table else ""
        if known[ours]:
            return f"Pass {ours} instead of {theirs}.{page}"
        if not prog and (ours.startswith("--") or nearest(name, options)):
            continue  # for example, --token is similar to --tokens
        if not ours.startswith("--"):
            return f"{theirs} is not an option here. {ours}.{page}"
        other = "train.py" if prog == "prepare_data.py" else "prepare_data.py"
        if name == ours:
            return f"{name} is an option of {other}. Pass it to {other}."
        return f"{theirs} is called {ours} in {other}.{page}"
    return None


class CommandParser(OneLineErrors):
    """A parser for commands without a recipe. Errors name the nearest valid option."""

    def __init__(self, *, prog: str, description: str | None, **kwargs: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=prog, description=description, formatter_class=formatter, **kwargs)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the options. Raises UserError for unknown options and invalid values."""
        # Before Python 3.12.8, parse_known_args refuses positional arguments on both sides of an option.
        takes_command = any(action.nargs == argparse.REMAINDER for action in self._actions)
        parse = self.parse_known_args if takes_command else self.parse_known_intermixed_args
        # An unknown option is reported first: argparse would report a missing argument, and it takes an unknown
        # --option=VALUE for a positional argument if VALUE contains a space.
        named = [] if takes_command else [word for word in argv if re.match(r"--[a-z]\w*(=|$)", word)]
        unknown = [word for word in named if word.split("=")[0] not in self._option_string_actions]
        if not unknown:
            options, unknown = parse(argv)
        if unknown:
            flag = unknown[0].split("=")[0]
            if not flag.startswith("-"):
                fix = "Pass --help to list the arguments and options."
                if "--baseline" in self._option_string_actions:
                    fix = f"To compare with another model, pass --baseline {flag}."
                raise UserError(f"Unexpected argument {flag!r}. {fix}")
            names = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
            places = [action for action in self._actions if not action.option_strings]
            if places and MODEL_OPTION.fullmatch(flag):
                raise UserError(
                    f"Pass the {_place(places[0])} without an option name: {self.prog} {_place(places[0])}"
                )
            if places[1:] and OUTPUT_OPTION.fullmatch(flag):
                if places[1].metavar == "PROMPT":
                    # In nanoGPT, --out_dir is the folder of the checkpoint.
                    model = f"Pass the {_place(places[0])} without an option name"
                    raise UserError(f"{self.prog} has no option {flag}. {model}. To write to a file, add: > FILE")
                raise UserError(
                    f"Pass {_place(places[1])} directly after the {_place(places[0])}, without an option name."
                )
            if better := other_name(flag, names):
                raise UserError(better)
            known = [name for name in names if name != "--help"]
            raise UserError(f"{self.prog} has no option {flag}. {did_you_mean(flag, known)}")
        return options
