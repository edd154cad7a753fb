"""A refactoring must not change the numbers in tests/golden/.

After a deliberate change, update the numbers with `pytest tests/test_golden.py --update_golden`.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.preparation.prepare import prepare


GOLDEN = Path(__file__).parent / "golden"
FOLDERS = {
    "concat": {},
    "wrap": {"packing": "wrap", "min_length": 4},
    "hash": {"split": "hash", "validation_fraction": 0.1},
    "separator after": {"separator": "after"},
    "characters": {"tokenizer": "char", "separator": "none"},
}
APART = "intermediate_size=48,tie_word_embeddings=false"
EXPERTS = f"{APART},num_local_experts=4,num_key_value_heads=2"
RUNS = {
    "one": (),
    "accumulated": ("--per_device_train_batch_size", 4),
    "dropout": ("--dropout", 0.1, "--seed", 7),
    "constant": ("--lr_scheduler_type", "constant", "--max_grad_norm", 0.1),
    "llama": ("--model_type", "llama", "--config_overrides", APART),
    "mixtral": ("--model_type", "mixtral", "--config_overrides", EXPERTS),
}
LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], Any]:
    """Return a function that returns the expected value stored under a name."""

    def check(file: str, name: str, value: Any) -> Any:
        path = GOLDEN / f"{file}.json"
        kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        if request.config.getoption("--update_golden"):
            GOLDEN.mkdir(exist_ok=True)
            path.write_text(json.dumps(kept | {name: value}, indent=1, sort_keys=True) + "\n", encoding="utf-8")
            return value
        return kept[name]

    return check


@pytest.mark.parametrize("name", FOLDERS)
def test_prepared_folders(corpus: list[Path], golden, tmp_path: Path, name: str) -> None:
    files = [str(path) for path in corpus]
    form = {"tokenizer": "train:300", "sequence_length": 32, "validation_tokens": 500} | FOLDERS[name]
    prepare(DataArguments(data_files=files, dataset_dir=str(tmp_path / "out"), **form))
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))
    facts = {key: manifest[key] for key in ("sha256", "counts", "tokenizer_sha256")}
    assert facts == golden("folders", name, facts)


@pytest.mark.parametrize("name", RUNS)
def test_runs(train, events, golden, tmp_path: Path, name: str) -> None:
    logged = events(train(tmp_path / "run", *RUNS[name]))
    numbers = {f"step {its['step']} {key}": its[key] for its in logged for key in LOGGED if its.get(key) is not None}
    expected = golden("runs", name, numbers)
    # CPUs differ in the last bits. dev/compare_commits.py compares two commits bit for bit on one machine.
    assert numbers == pytest.approx(expected, rel=1e-5)
