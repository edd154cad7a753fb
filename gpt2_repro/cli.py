"""Set up logging, parse options, and convert errors to exit codes."""

import argparse
import contextlib
import errno
import io
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO


try:
    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm
except ModuleNotFoundError:
    fix = "Run: source .venv/bin/activate, or pip install -r requirements.txt"
    print(f"error: {sys.executable} does not have the required packages. {fix}", file=sys.stderr)
    sys.exit(2)

from gpt2_repro.console import console
from gpt2_repro.errors import RunFailed, UserError, did_you_mean, error_number, in_a_line
from gpt2_repro.run_record.notes import MISTAKE, note


DISK_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
WAIT_FOR_MESSAGE = 2.0  # seconds in which the main process of a machine can print its message
LINE_SECONDS = 30.0  # between two progress lines if stderr is not a terminal
# Warnings of loggers about what every run does: saving imports DeepSpeed also without a GPU, and the model has fp32
# weights with bf16 products.
EXPECTED = {
    "DeepSpeed": "accelerator to CPU",
    "transformers.modeling_utils": "only supports torch.float16 and torch.bfloat16 dtypes",
}


def is_local_main_process() -> bool:
    """Return whether this process has local rank 0 or was started without a launcher."""
    return os.environ.get("LOCAL_RANK", "0") == "0" or "MASTER_ADDR" not in os.environ


def start_log() -> None:
    """Print the messages of this package, and set up the process for training."""
    # OpenMP threads wait for each other in a busy loop. If another program uses one of the cores, a short loop makes
    # training on a CPU about five times faster (dev/LOG.md). torch reads this variable when it is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("gpt2_repro").setLevel("INFO" if is_local_main_process() else "WARNING")
    for name, text in EXPECTED.items():
        logging.getLogger(name).addFilter(_WithoutText(text))


class _WithoutText(logging.Filter):
    """A filter that drops the messages with a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def filter(self, record: logging.LogRecord) -> bool:
        return self.text not in record.getMessage()


@contextlib.contextmanager
def _mistakes() -> Iterator[None]:
    """Raise UserError for a full or protected disk and for a missing optional package."""
    try:
        yield
    except (UserError, RunFailed):
        raise
    except Exception as error:
        number = error_number(error)
        if isinstance(error, ImportError) and "pip install" in str(error):  # an optional package, such as bitsandbytes
            raise UserError(in_a_line(error)) from error
        if number not in DISK_ERRORS:
            raise
        fix = "If the disk is full, free some space. Otherwise change the permissions, or pass another path."
        where = getattr(error, "filename", None) or "a file or the output of this command"
        raise UserError(f"{os.strerror(number)}: {where}. {fix}") from error


def run(main: Callable[[list[str]], object], *, prints_results: bool = True) -> None:
    """Call `main` with the command-line arguments, and convert errors to exit codes.

    A UserError (exit code 2) or RunFailed (exit code 1) becomes one line on stderr. A full disk, or a reader of the
    output that has exited, ends the command only if it `prints_results` on stdout. Otherwise lines are lost.
    """
    sys.stderr = _without_errors(sys.stderr)
    if not prints_results:
        sys.stdout = _without_errors(sys.stdout)
    logging.raiseExceptions = False  # a message that cannot be written is lost
    start_log()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows ? instead of ✓
    if not sys.stderr.isatty():
        _disable_bars()
    try:
        with _mistakes():
            with logging_redirect_tqdm():  # messages appear above the progress bars
                main(sys.argv[1:])
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of stdout, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the buffered text
        sys.exit(1)
    except KeyboardInterrupt:
        if is_local_main_process():
            print("\nInterrupted.", file=sys.stderr)
        sys.exit(130)
    except (UserError, RunFailed) as error:
        _report(error)
        sys.exit(2 if isinstance(error, UserError) else 1)


def _report(error: UserError | RunFailed) -> None:
    """Print an error as one line on stderr, and write it to the launcher's file."""
    message = str(error).rpartition("UserError: ")[2].strip()  # DataLoader workers add a traceback
    one_line = message.replace("\r", "\\r").replace("\n", "\\n")
    line = f"error: {one_line}"
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        # The launcher prints a traceback, and then the message in this file. torch elastic reads "message" as a
        # text, or as a mapping with the time that orders the failures.
        with contextlib.suppress(OSError):  # the folder of temporary files can be full
            Path(error_file).write_text(json.dumps({"message": line}), encoding="utf-8")
    if not is_local_main_process():
        time.sleep(WAIT_FOR_MESSAGE)  # the launcher ends all processes after the first exit
        return
    if isinstance(error, UserError):
        note(MISTAKE, message)  # before printing, because the supervisor then drops stderr
    for bar in list(getattr(tqdm, "_instances", ())):
        bar.close()
    print(line, file=sys.stderr, flush=True)


class _Output(io.FileIO):
    """A file descriptor that loses data while its disk is full or nobody reads it."""

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EPIPE):
                raise
            written = len(data)
        console.write(bytes(data[:written]))
        return written


def _without_errors(stream: TextIO) -> TextIO:
    """Return a copy of `stream` that loses text instead of raising an error."""
    if stream not in (sys.__stdout__, sys.__stderr__):
        return stream  # replaced by a test or a notebook
    buffer = io.BufferedWriter(_Output(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(buffer, stream.encoding, "replace", line_buffering=True)


class Progress(tqdm):
    """A tqdm progress bar, or lines of text if stderr is not a terminal.

    Each line has the completed percentage. Lines are at least LINE_SECONDS seconds apart.
    """

    total: float | None

    def __init__(self, iterable: Any = None, *, desc: str, hidden: bool = False, **options: Any) -> None:
        in_lines = not hidden and not sys.stderr.isatty()
        super().__init__(iterable, desc=desc, disable=hidden or in_lines, dynamic_ncols=True, **options)
        self._text = desc if in_lines else ""
        self._written_at = time.monotonic()

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


def _disable_bars() -> None:
    """Disable the progress bars of all libraries, because they would fill a log file."""
    begin = tqdm.__init__

    def disabled(self: Any, *args: Any, **options: Any) -> None:
        options["disable"] = True
        begin(self, *args, **options)

    tqdm.__init__ = disabled


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """A help formatter that shows the default value of each option, and one spelling of its name."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return str(action.metavar or action.dest)
        # HfArgumentParser adds a second spelling with "-" for "_".
        names = ", ".join(name for name in action.option_strings if "-" not in name.lstrip("-"))
        if action.nargs == 0:
            return names
        return f"{names} {self._format_args(action, action.dest.upper())}"

    def _get_help_string(self, action: argparse.Action) -> str:
        if isinstance(action, argparse._StoreFalseAction):  # HfArgumentParser gives it the help of the option
            return f"The opposite of --{action.dest}."
        text = (action.help or "").replace("%", "%%")
        if action.nargs == 0 or str(action.default) in ("None", "", "[]", "{}", argparse.SUPPRESS):
            return text
        return f"{text} (default: {action.default})"


class CommandParser(argparse.ArgumentParser):
    """An argument parser that raises a UserError with a message of one line.

    Abbreviated option names are not accepted.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["allow_abbrev"] = False
        kwargs["formatter_class"] = _HelpFormatter
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}. Pass --help to list the options.")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the options. Raises UserError for unknown options and invalid values.

        For an option without a value, `--name=false` means that it is not passed (see words_of).
        """
        flags: list[str] = []
        for action in self._actions:
            if action.nargs == 0:
                flags += [f"{name}=false" for name in action.option_strings]
        argv = [word for word in argv if word not in flags]
        # Before Python 3.12.8, parse_known_args refuses positional arguments on both sides of an option.
        if any(action.nargs == argparse.REMAINDER for action in self._actions):
            options, unknown = self.parse_known_args(argv)
        else:
            options, unknown = self.parse_known_intermixed_args(argv)
        if unknown:
            names: list[str] = []
            for action in self._actions:
                names += action.option_strings
            raise UserError(f"{self.prog} has no option {unknown[0]!r}. {did_you_mean(unknown[0], names)}")
        return options


def words_of(options: Mapping[str, Any]) -> list[str]:
    """Return options by name as words of a command line. An option that is None is left out."""
    words: list[str] = []
    for name, value in options.items():
        if value is None:
            continue
        if value is True:
            words.append(f"--{name}")
        elif value is False:
            words.append(f"--{name}=false")
        elif isinstance(value, list | tuple):
            words += [f"--{name}", *map(str, value)]
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            if text.startswith("-"):
                words.append(f"--{name}={text}")
            else:
                words += [f"--{name}", text]
    return words


def between(least: float, most: float) -> Callable[[str], float]:
    """Return a parser for numbers from `least` to `most`, which are whole if `least` is an int."""

    def number(text: str) -> float:
        value = type(least)(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} must be at least {least} and at most {most}")
        return value

    return number


positive_count = between(1, 10**9)
positive_number = between(1e-9, 1e18)
