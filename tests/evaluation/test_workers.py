"""Several processes give the scores of one, and end together."""

import csv
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt2_repro.errors import RunFailed, UserError
from gpt2_repro.evaluation.__main__ import main
from gpt2_repro.evaluation.comparison import ComparedModel
from gpt2_repro.evaluation.harness import choose_devices
from gpt2_repro.evaluation.models import OpenedModel
from gpt2_repro.evaluation.workers import start_workers
from tests.evaluation.conftest import write_rows


@pytest.fixture
def folder(model, tokenizer, prose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a model, and the folder `data` with texts and five HellaSwag items beside it."""
    monkeypatch.chdir(tmp_path)
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    write_rows(Path("data/text/validation.jsonl"), [{"text": text} for text in prose])
    items: list[dict[str, Any]] = []
    for number in range(5):
        words = prose[number].split()
        endings = [" ".join(words[start : start + 4]) for start in (8, 12, 16, 20)]
        context = " ".join(words[:8])
        item = {"ctx_a": context, "ctx_b": "", "ctx": context, "activity_label": "text", "endings": endings}
        items.append(item | {"label": number % 4})
    write_rows(Path("data/hellaswag.jsonl"), items)
    return Path("model")


def scores_of(output: str, *words: str) -> tuple[list[Any], dict[str, Any]]:
    """Run evaluate.sh, and return the rows of the table and lm-eval's results with their samples by file."""
    tasks = ["--tasks", "last_word", "document_perplexity", "hellaswag"]
    main(["model", "--baseline", "untrained", "--local_data", "data", *tasks, "--output_dir", output, *words])
    comparison = json.loads(Path(output, "comparison.json").read_text(encoding="utf-8"))
    results: dict[str, Any] = {}
    for path in sorted(Path(output, "lm_eval").rglob("*.json")):
        results[str(path.relative_to(output))] = json.loads(path.read_text(encoding="utf-8"))["results"]
    return comparison["rows"], results


def test_two_processes_give_the_scores_of_one(folder: Path) -> None:
    """A batch has the same texts in both cases."""
    options = ["--device", "cpu", "--no_cache"]
    assert scores_of("two", *options, "--processes", "2") == scores_of("one", *options)


def test_tables_for_a_paper(folder: Path) -> None:
    words = ["model", "--baseline", "untrained", "--local_data", "data", "--tasks", "last_word", "--device", "cpu"]
    words += ["--output_dir", "out"]
    main([*words, "--table", "latex"])
    text = Path("out/comparison.tex").read_text(encoding="utf-8")
    main([*words, "--table", "csv"])
    assert not Path("out/comparison.tex").exists(), "it would have the scores of another evaluation"
    rows = json.loads(Path("out/comparison.json").read_text(encoding="utf-8"))["rows"]
    expected: list[tuple[str, str, str, float]] = []
    for row in rows:
        for model, score in row["values"].items():
            expected.append((row["task"], row["metric"], model, score["value"]))
    with Path("out/comparison.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["task"], line["metric"], line["model"], float(line["value"])) for line in lines] == expected
    assert [bool(line["difference"]) for line in lines] == [True, False] * len(rows)

    assert text.isascii()
    assert text.count(r"last\_word & ") == len(rows)
    assert text.count(r"\\") == len(rows) + 1


def load() -> tuple[Any, Any]:
    return torch.nn.Linear(1, 1), None


def die(model: Any, batch: int) -> int:
    if batch == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return batch


def report_threads(model: Any, batch: int) -> tuple[int, int]:
    return os.getpid(), torch.get_num_threads()


def test_one_process_that_ends_ends_all() -> None:
    model = OpenedModel(ComparedModel("m", revision="1"), load, 8, 8)
    with pytest.raises(RunFailed, match="m ended"), start_workers(["cpu", "cpu"]) as workers:
        list(workers.passes_of(model)(die, range(8)))


def test_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    model = OpenedModel(ComparedModel("m", revision="1"), load, 8, 8)
    with start_workers(["cpu", "cpu"]) as workers:
        (found,) = workers.passes_of(model)(report_threads, [0])  # with fewer batches than processes
    process, threads = found
    assert process != os.getpid()
    assert threads == 1


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpt2_repro.evaluation.harness.choose_device", lambda name: name or "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert choose_devices(None, None) == choose_devices("cuda", 3) == ["cuda:0", "cuda:1", "cuda:2"]
    assert choose_devices("cuda", 2) == ["cuda:0", "cuda:1"]
    assert choose_devices("cuda", 1) == ["cuda"]
    assert choose_devices("cuda:1", None) == ["cuda:1"]
    assert choose_devices("cpu", None) == ["cpu"]
    assert choose_devices("cpu", 2) == ["cpu", "cpu"]
    for name, processes in ((None, 4), ("cuda:1", 2), ("mps", 2)):
        with pytest.raises(UserError, match="--processes"):
            choose_devices(name, processes)
