"""The terminal side of every command: log, options, errors and exit codes."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from gpt2_repro.errors import RunFailed, UserError, did_you_mean
from gpt2_repro.supervision import MISTAKE, note


def is_local_main_process() -> bool:
    """Whether this process speaks for its machine: local rank 0 under a launcher, or the only process."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def run(main: Callable[[list[str]], None]) -> None:
    """Call `main` with the command line. A UserError becomes one line on stderr and exit code 2, a RunFailed 1.

    Under a launcher only local rank 0 prints, and each rank leaves the line in $TORCHELASTIC_ERROR_FILE, which
    the launcher quotes last, after a traceback of its own.
    """
    level = logging.INFO if is_local_main_process() else logging.WARNING
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stdout)
    logging.getLogger("gpt2_repro").setLevel(level)
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except (UserError, RunFailed) as error:
        line = "error: " + str(error).rpartition("UserError: ")[2].strip()  # a DataLoader's worker adds its traceback
        error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if error_file:
            # Elastic reads "message" as text, or as a mapping with the time that ranks the failures.
            Path(error_file).write_text(json.dumps({"message": line}))
        if is_local_main_process():
            print(line, file=sys.stderr, flush=True)
            if isinstance(error, UserError):
                note(MISTAKE, str(error))
        sys.exit(2 if isinstance(error, UserError) else 1)
    except BrokenPipeError:
        # Whoever read the output, `head` say, has read enough; what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


class CommandParser(argparse.ArgumentParser):
    """argparse whose complaints are UserErrors. Options are never abbreviated; a wrong one names the nearest."""

    def __init__(self, *, prog: str, description: str | None, **kwargs: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=prog, description=description, formatter_class=formatter, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}; see {self.prog} --help")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The options. Raises UserError for unknown ones and impossible values."""
        # Before Python 3.12.8 parse_known_args refuses positional arguments after options that follow others.
        takes_command = any(action.nargs == argparse.REMAINDER for action in self._actions)
        parse = self.parse_known_args if takes_command else self.parse_known_intermixed_args
        options, unknown = parse(argv)
        if unknown:
            flag = unknown[0].split("=")[0]
            known = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
            raise UserError(f"there is no option {flag}: {did_you_mean(flag, known)}")
        return options
