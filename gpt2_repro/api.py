"""Prepare, train, evaluate, generate and report from Python.

    from gpt2_repro.api import evaluate, generate, prepare, report, train

    data = prepare("own_text", data_files="shakespeare.txt")
    run = train("own_text", dataset_dir=data, max_steps=200)
    comparison = evaluate(run, tasks=["document_perplexity"], baseline="untrained")
    texts = generate(run, "Once upon a time", num_samples=2)
    page = report(run)

Each function has the options of its command as keyword arguments, with the same checks and results. A recipe is a path
or the name of a shipped recipe; without it, the default recipe is used. A mistake raises errors.UserError, and a run
that fails raises errors.RunFailed. The process that calls `train` does the training. To train in several processes,
start the calling script with `accelerate launch`.
"""

import faulthandler
import gc
import importlib
import os
import signal
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpt2_repro
from gpt2_repro import cli


if TYPE_CHECKING:
    from gpt2_repro.evaluation.comparison import Comparison


def prepare(recipe: str | Path | None = None, **options: Any) -> Path:
    """Tokenize text as `prepare_data.py` does, and return the prepared folder.

    With `num_proc` above 1, Python imports the calling script again in each worker. Put the script's calls below
    `if __name__ == "__main__":`.
    """
    return _call("prepare", "main", [] if recipe is None else [recipe], options)


def train(recipe: str | Path | None = None, **options: Any) -> Path:
    """Train as `train.py` does, and return the run directory. An interrupted run is resumed."""
    return _call("train", "main", [] if recipe is None else [recipe], options)


def evaluate(*checkpoints: str | Path, **options: Any) -> "Comparison":
    """Score checkpoints as `evaluate.sh` does, print the table, and return the comparison."""
    return _call("evaluation.__main__", "main", checkpoints, options)


def generate(checkpoint: str | Path, prompt: str = "", **options: Any) -> list[str]:
    """Return `num_samples` texts that start with the prompt, as `python -m gpt2_repro.generate` prints them."""
    return _call("generate", "samples", [checkpoint], {"prompt": prompt} | options)


def report(*runs: str | Path, **options: Any) -> Path:
    """Write the HTML page as `python -m gpt2_repro.report` does, print a summary, and return the page's path."""
    return _call("report.__main__", "main", runs, options)


def _call(module: str, function: str, words: Any, options: dict[str, Any]) -> Any:
    """Call a function of a command with its command line, and undo the function's changes to this process."""
    environment, numbers = dict(os.environ), signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    handlers = {number: signal.getsignal(number) for number in numbers}
    thresholds = gc.get_threshold()
    gpt2_repro.STARTED = time.monotonic()  # from which the seconds of a run are counted
    cli.start_log()
    try:
        with cli.mistakes():
            command = getattr(importlib.import_module(f"gpt2_repro.{module}"), function)
            return command([*map(str, words), *cli.words_of(options)])
    except BaseException as error:
        for cause in filter(None, (error, error.__cause__)):
            traceback.clear_frames(cause.__traceback__)  # they keep the model and the lock of the run
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()  # otherwise, it ends this process after a failed training
        for number, handler in handlers.items():
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)
        os.environ.clear()
        os.environ.update(environment)
        gc.set_threshold(*thresholds)
        gc.unfreeze()
        gc.collect()  # closes the lock file of the run
