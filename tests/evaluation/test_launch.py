"""One process, two processes and stock lm_eval give the same scores."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpt2_repro.evaluation import harness
from gpt2_repro.evaluation.comparison import EvaluationSettings
from gpt2_repro.evaluation.harness import evaluate_model, launch_command, score_launched, score_task
from gpt2_repro.evaluation.scores import Job, read_scores
from gpt2_repro.evaluation.tasks import write_task_files
from tests.evaluation.conftest import write_rows


TASKS = ["last_word", "document_perplexity"]
SETTINGS = EvaluationSettings(max_length=64, batch_size=4, seed=1234, device="cpu", limit=None)


@pytest.fixture
def folder(model, tokenizer, documents, tmp_path: Path) -> Path:
    """A folder with a saved model (model/) and task files (tasks/)."""
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    assert len(documents) % 2  # with two processes, one of them has one document less
    data, items = tmp_path / "validation.jsonl", tmp_path / "hellaswag.jsonl"
    write_rows(data, ({"text": document} for document in documents))
    endings = [" ".join(text.split()[:5]) for text in documents[:4]]
    write_rows(items, ({"ctx": t[:80].strip(), "endings": endings, "label": n % 4} for n, t in enumerate(documents)))
    write_task_files({**dict.fromkeys(TASKS, data), "hellaswag_completion": items}, tmp_path / "tasks")
    return tmp_path


@pytest.mark.slow
def test_scores_equal_those_of_stock_lm_eval(model, tokenizer, folder: Path) -> None:
    words = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--device", "cpu", "--batch_size", "4"]
    words += ["--model_args", f"pretrained={folder / 'model'},dtype=float32,max_length=64", "--seed", "1234"]
    words += ["--tasks", *TASKS, "--include_path", str(folder / "tasks"), "--output_path", str(folder / "out")]
    subprocess.run(words, check=True, capture_output=True)
    (path,) = (folder / "out").glob("*/results_*.json")
    stock = json.loads(path.read_text(encoding="utf-8"))["results"]
    for task in TASKS:
        results, samples = evaluate_model(model, tokenizer, Job(task, SETTINGS, folder / "tasks"))
        ours = results["results"][task]
        assert ours.keys() == stock[task].keys()
        for key in ours.keys() - {"acc_stderr,none", "perplexity_stderr,none"}:
            number = stock[task][key]
            assert ours[key] == (pytest.approx(number, rel=1e-6) if isinstance(number, float) else number), key
        for metric in read_scores(results, samples, tokenizer):
            if isinstance(error := stock[task].get(f"{metric.name}_stderr,none"), float):
                assert metric.stderr == (error if metric.name == "acc" else pytest.approx(error, rel=0.05))


@pytest.mark.slow
def test_two_processes_share_the_documents_and_score_as_one_does(
    model, tokenizer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes share the documents and give the scores of one process."""

    def on_two_processes(job: Path, _: int) -> list[str]:
        worker = launch_command(job, 2)[-2:]
        # accelerate's launcher needs GPUs for data parallelism.
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", *worker]

    assert {"--num_processes", "--main_process_port"} < set(launch_command(folder, 2))  # none from the user
    monkeypatch.setattr(harness, "launch_command", on_two_processes)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for task in ("document_perplexity", "hellaswag_completion"):
        _, two = score_launched(folder / "model", Job(task, SETTINGS, folder / "tasks"), num_processes=2)
        _, one = score_task(model, tokenizer, Job(task, SETTINGS, folder / "tasks"))
        for mine, launched in zip(one, two, strict=True):
            assert (mine.documents, mine.num_documents) == (launched.documents, launched.num_documents)
            assert launched.value == pytest.approx(mine.value, rel=1e-6)
            assert launched.array() == pytest.approx(mine.array(), rel=1e-5)


TEXTS, GROUP = ("bits_per_byte_texts", 8, None, 3), ("group", 8, None, 1)  # a file is a document


@pytest.mark.parametrize(
    ("task", "gpus", "limit", "processes"),
    [TEXTS, GROUP, ("bits_per_byte_texts", 8, 2, 2), ("last_word", 4, 3, 2)],
)
def test_each_process_has_a_document_of_each_task(
    task: str, gpus: int, limit: int | None, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the harness fails in a process without documents."""
    for name in ("text", "texts/1", "texts/2", "texts/3"):
        write_rows(tmp_path / f"{name}.txt", [f"{name} is a text."])
    write_rows(tmp_path / "two.jsonl", [{"text": " ".join(["the river was old"] * 12)}] * 2)
    sources = {"bits_per_byte_text": tmp_path / "text.txt", "bits_per_byte_texts": tmp_path / "texts"}
    write_task_files(sources | {"last_word": tmp_path / "two.jsonl"}, tmp_path / "tasks")
    group = {"group": "group", "task": ["bits_per_byte_texts", "bits_per_byte_text"]}
    (tmp_path / "tasks" / "group.yaml").write_text(json.dumps(group), encoding="utf-8")
    started = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr(harness, "score_task", lambda *_: started.append(1))
    monkeypatch.setattr(harness, "score_launched", lambda *_, num_processes: started.append(num_processes))
    settings = dataclasses.replace(SETTINGS, device="cuda", limit=limit)
    (tmp_path / "model").mkdir()
    harness._score_task(None, None, Job(task, settings, tmp_path / "tasks"), tmp_path / "model")
    assert started == [processes]
