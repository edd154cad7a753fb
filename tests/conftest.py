"""Provide fixtures that prepare data, run commands and train a tiny model."""

import json
import os
import random
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.commands import kill_all, start_cold
from tests.warm import start_warm


os.environ["TRITON_INTERPRET"] = "1"  # Triton runs kernels on CPU tensors. Read when triton is imported
ROOT = Path(__file__).parents[1]
REAL_DATA = Path(os.environ.get("GPT2_REPRO_TEST_DATA", ROOT.parent / "shared" / "data"))

TINY = {
    "data": {"source": "files", "tokenizer": "train:300", "sequence_length": 32}
    | {"split": "hash", "validation_fraction": 0.1, "validation_text": True},
    "model": {"n_layer": 2, "n_head": 2, "n_embd": 32, "pad_vocab_to_multiple_of": 64},
    "training": {"tokens_per_step": 256, "max_steps": 8, "per_device_train_batch_size": 8, "dataloader_num_workers": 0}
    | {"learning_rate": 1e-2, "warmup_steps": 3, "use_cpu": True, "bf16": False, "logging_steps": 1, "save_steps": 4}
    | {"eval_tokens": 0, "eval_steps": 4, "per_device_eval_batch_size": 4, "sample_tokens": 8},
    "evaluation": {"tasks": ["document_perplexity"], "baseline": "untrained"},
}


# A shell starts background commands with SIGINT ignored. Every process that a test starts would inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="Run each property test with 30 seeds instead of 3.")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that launch several processes as slow."""
    for item in items:
        launcher = item.callspec.params.get("launcher") if hasattr(item, "callspec") else None
        if isinstance(launcher, tuple) and len(launcher) == 2 and launcher[1] > 1:
            item.add_marker(pytest.mark.slow)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that has an argument `seed` several times, with different seeds."""
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(30 if metafunc.config.getoption("--thorough") else 3))


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Return the folder with public test data; skip the test if the folder is missing."""
    if not REAL_DATA.is_dir():
        pytest.skip(f"No real data in {REAL_DATA}. Set GPT2_REPRO_TEST_DATA.")
    return REAL_DATA


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """Return 120 documents of 20 to 200 random words, and three with unusual text."""
    source = random.Random(1)
    words = ["".join(source.choices("abcdefghij", k=source.randint(2, 6))) for _ in range(80)]
    texts = [" ".join(source.choices(words, k=source.randint(20, 200))) for _ in range(120)]
    return [*texts, "", "spelled <|endoftext|> out", "naïve 日本語 🙂"]


@pytest.fixture(scope="session")
def corpus(documents: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the paths of two .jsonl files that contain the documents."""
    folder = tmp_path_factory.mktemp("corpus")
    paths = [folder / "a.jsonl", folder / "b.jsonl"]
    for path, part in zip(paths, (documents[:50], documents[50:]), strict=True):
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in part), encoding="utf-8")
    return paths


@pytest.fixture(scope="session")
def tiny_recipe(corpus: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare a small data set; return the path of a recipe that trains in seconds."""
    from gpt2_repro.data.arguments import DataArguments
    from gpt2_repro.data.preparation.prepare import prepare

    folder = tmp_path_factory.mktemp("tiny")
    data = TINY["data"] | {"data_files": [str(path) for path in corpus], "dataset_dir": str(folder / "data")}
    prepare(DataArguments(**data))
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY | {"data": data}), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tiny_data(tiny_recipe: Path) -> Path:
    """Return the prepared folder of the tiny recipe."""
    return Path(yaml.safe_load(tiny_recipe.read_text(encoding="utf-8"))["data"]["dataset_dir"])


Run = Callable[..., subprocess.CompletedProcess[str]]


def runner(start: Callable[..., Any], folder: Path) -> Run:
    """Return a function that runs a command and returns its exit code and output.

    The function takes the words of the command, and `start` starts it.
    """
    output, errors = folder / "stdout", folder / "stderr"

    def run(*words: object, timeout: int = 300, **environment: str) -> subprocess.CompletedProcess[str]:
        process = start(words, environment, output, errors)
        try:
            code = process.wait(timeout)
        except BaseException:
            kill_all(process.pid)
            raise
        texts = (path.read_bytes().decode(errors="replace") for path in (output, errors))  # keeps "\r"
        return subprocess.CompletedProcess(words, code, *texts)

    return run


@pytest.fixture(scope="session")
def type_command(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function that runs a command as a user would."""
    return runner(start_cold, tmp_path_factory.mktemp("cold"))


@pytest.fixture(scope="session")
def type_warm(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function like type_command that starts commands faster.

    The command runs in a forked process that has already imported the libraries.
    """
    return runner(start_warm, tmp_path_factory.mktemp("warm"))


@pytest.fixture(scope="session")
def train(tiny_recipe: Path, type_warm: Run) -> Callable[..., Path]:
    """Return a function that trains the tiny recipe and returns the run directory.

    The function takes the run directory, options of train.py, and `launcher`, for example ("launch", 2).
    """

    def run(output: Path, *options: object, launcher: tuple[object, ...] = ("python",)) -> Path:
        done = type_warm(*launcher, "train.py", tiny_recipe, "--output_dir", output, *options)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return output

    return run


@pytest.fixture(scope="session")
def events() -> Callable[[Path], list[dict]]:
    """Return a function that reads the log entries in a run's metrics.jsonl."""
    return lambda run: [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
