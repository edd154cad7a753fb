"""Prepare, train, evaluate and load models from Python.

    from gpt2_repro.api import evaluate, load, prepare, train

    data = prepare("recipes/own_text.yaml", data_files="shakespeare.txt")
    run = train("recipes/own_text.yaml", dataset_dir=data, max_steps=200)
    comparison = evaluate(run, tasks=["document_perplexity"], baseline="untrained")
    model, tokenizer = load(run)

The keyword arguments are the options of the commands, with the same checks and results. Without a recipe,
recipes/gpt2_124m.yaml is used. A mistake raises errors.UserError, and a run that fails raises errors.RunFailed. Call
the functions in the main thread. They undo their changes to the signal handlers and the environment variables.
"""

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpt2_repro
from gpt2_repro import cli
from gpt2_repro.console import console
from gpt2_repro.processes import without_main_module


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from gpt2_repro.evaluation.comparison import Comparison

UNCATCHABLE = {signal.SIGKILL, signal.SIGSTOP}


def prepare(recipe: str | Path | None = None, **options: Any) -> Path:
    """Tokenize text as `prepare_data.py` does, and return the prepared folder."""
    from gpt2_repro.prepare import main

    return _call("prepare", main, _words(recipe, options))


def train(recipe: str | Path | None = None, **options: Any) -> Path:
    """Train as `train.py` does, and return the run directory. An interrupted run is resumed.

    The calling process trains. For several processes, start the calling script with `accelerate launch`.
    """
    from gpt2_repro.train import main

    return _call("train", main, _words(recipe, options))


def evaluate(*checkpoints: str | Path, **options: Any) -> "Comparison":
    """Score checkpoints as `evaluate.sh` does, print the table, and return it."""
    from gpt2_repro.evaluation.__main__ import main

    return _call("evaluate", main, [*map(str, checkpoints), *cli.words_of(options)])


def load(checkpoint: str | Path) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Return the model and the tokenizer of a run, a checkpoint or a Hub id. The model is on the CPU."""
    return _call("load", _load, [str(checkpoint)])


def _load(words: list[str]) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    from gpt2_repro.model.checkpoint import resolve_checkpoint

    found = resolve_checkpoint(words[0], unfinished=True)
    found.log_weights()
    from gpt2_repro.model.load import load_pair  # imports torch

    model, tokenizer = load_pair(found.source)
    # The limit is for transformers' pipelines. With it, generate warns that max_new_tokens takes precedence.
    model.generation_config.max_length = None
    return model, tokenizer


def _words(recipe: str | Path | None, options: dict[str, Any]) -> list[str]:
    """Return the command line of a recipe and options."""
    words = cli.words_of(options)
    if recipe is not None:
        words.insert(0, str(recipe))
    return words


def _call(name: str, main: Callable[[list[str]], Any], words: list[str]) -> Any:
    """Call the function of the command `gpt2-repro NAME` with its command line."""
    gpt2_repro.STARTED = time.monotonic()  # from which the seconds of a run are counted
    with _same_process(), without_main_module():
        sys.argv = [f"gpt2-repro {name}", *words]  # for messages and records
        cli.start_log()
        return main(words)


@contextlib.contextmanager
def _same_process() -> Iterator[None]:
    """Undo changes to the command line, the environment, the signal handlers, the watchdog and the garbage collector."""
    argv = sys.argv
    environment = dict(os.environ)
    handlers: dict[signal.Signals, Any] = {}
    for number in signal.valid_signals() - UNCATCHABLE:
        handlers[number] = signal.getsignal(number)
    try:
        yield
    finally:
        console.close()
        faulthandler.cancel_dump_traceback_later()  # after a failed training, it would end this process
        for number, handler in handlers.items():
            if signal.getsignal(number) != handler:
                signal.signal(number, handler)
        sys.argv = argv
        os.environ.clear()
        os.environ.update(environment)
        gc.unfreeze()
