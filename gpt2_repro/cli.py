"""What every command shares: its log on the terminal, and one line and exit code 2 for a user's mistake."""

import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from gpt2_repro.errors import RunFailed, UserError
from gpt2_repro.supervision import MISTAKE, note


def is_local_main_process() -> bool:
    """Whether this process speaks for its machine: local rank 0 under a launcher, or the only process."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def run(story: Callable[[list[str]], None]) -> None:
    """Call `story` with the command line. A UserError becomes one line on stderr and exit code 2, a RunFailed 1.

    Under a launcher only local rank 0 prints, and each rank leaves the line in $TORCHELASTIC_ERROR_FILE, which
    the launcher quotes last, after a traceback of its own.
    """
    level = logging.INFO if is_local_main_process() else logging.WARNING
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stdout)
    logging.getLogger("gpt2_repro").setLevel(level)
    try:
        story(sys.argv[1:])
        sys.stdout.flush()
    except (UserError, RunFailed) as error:
        line = f"error: {error}"
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
