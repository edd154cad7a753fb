"""lm_eval as typed by hand, under accelerate: the same numbers as in this process."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gpt2_repro.errors import RunFailed
from gpt2_repro.evaluation.harness import evaluate_model
from gpt2_repro.evaluation.launch import evaluate_launched, launch_command, read_samples
from gpt2_repro.evaluation.scores import read_scores
from gpt2_repro.evaluation.tasks import write_task_files


pytestmark = pytest.mark.slow


def test_every_setting_is_on_the_command_line() -> None:
    words = launch_command(
        Path("m"),
        task="wikitext",
        task_folder=Path("tasks"),
        max_length=512,
        batch_size=32,
        num_processes=8,
        device="cuda",
        limit=None,
        seed=1234,
        output=Path("out"),
    )
    line = " ".join(words[1:])
    assert (
        "accelerate.commands.launch --config_file" in line and "accelerate_configs/ddp.yaml --num_processes 8" in line
    )
    assert "-m lm_eval run --model hf --model_args pretrained=m,dtype=float32,max_length=512 --tasks wikitext" in line
    assert line.endswith("--batch_size 32 --seed 1234 --output_path out --log_samples --include_path tasks")


def test_the_harness_by_hand_gives_every_digit_of_ours(model, tokenizer, documents, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    data = tmp_path / "validation.jsonl"
    data.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    tasks = ["last_word", "document_perplexity"]
    folder = tmp_path / "tasks"
    write_task_files(dict.fromkeys(tasks, data), folder, tasks)
    options = dict(task_folder=folder, max_length=64, batch_size=4, device="cpu", limit=None, seed=1234)
    for task in tasks:
        by_hand, their_samples = evaluate_launched(tmp_path / "model", task=task, num_processes=1, **options)
        ours, samples = evaluate_model(model, tokenizer, tasks=[task], **options)
        theirs = {key: value for key, value in by_hand["results"][task].items()}
        for key, value in ours["results"][task].items():
            assert theirs[key] == (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value), key
        assert by_hand["max_length"] == 64 and by_hand["config"]["model_dtype"] == "torch.float32"
        (one,), (other,) = (
            read_scores(results, logged, tokenizer) for results, logged in ((ours, samples), (by_hand, their_samples))
        )
        assert one.documents == other.documents
        for mine, hand in zip(one.metrics, other.metrics, strict=True):
            assert (mine.name, mine.aggregation) == (hand.name, hand.aggregation)
            assert hand.array() == pytest.approx(mine.array(), rel=1e-6)


def test_two_processes_score_every_document_once_and_as_one_does(
    model, tokenizer, documents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torchrun on the CPU, for accelerate's launcher wants GPUs for it; behind the launcher all is the same."""

    def on_two_processes(folder: Path, **options: Any) -> list[str]:
        words = launch_command(folder, **options)
        harness = words[words.index("lm_eval") - 1 :]
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *harness]

    monkeypatch.setattr("gpt2_repro.evaluation.launch.launch_command", on_two_processes)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    data = tmp_path / "validation.jsonl"
    assert len(documents) % 2  # one process has a document less
    data.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    write_task_files({"document_perplexity": data}, tmp_path / "tasks", ["document_perplexity"])
    way = dict(task_folder=tmp_path / "tasks", max_length=64, batch_size=4, device="cpu", limit=None, seed=1234)
    two = evaluate_launched(tmp_path / "model", task="document_perplexity", num_processes=2, **way)
    one = evaluate_model(model, tokenizer, tasks=["document_perplexity"], **way)
    (of_two,), (of_one,) = (read_scores(*found, tokenizer) for found in (two, one))
    assert of_two.documents == of_one.documents and of_two.num_documents == len(documents)
    for mine, hand in zip(of_one.metrics, of_two.metrics, strict=True):
        assert hand.value == pytest.approx(mine.value, rel=1e-9)
        assert hand.array() == pytest.approx(mine.array(), rel=1e-6)


def test_samples_are_read_whatever_the_text_holds(tmp_path: Path) -> None:
    lines = [
        {"arguments": {"gen_args_0": {"arg_0": "a\u2028b", "arg_1": " c"}}, "filtered_resps": [["-1.5", "True"]]},
        {"arguments": {"gen_args_0": {"arg_0": "page\x85"}}, "filtered_resps": ["-2.5"]},
    ]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (tmp_path / "samples_t_2026.jsonl").write_text(text, encoding="utf-8")
    first, second = read_samples(tmp_path, "t", "loglikelihood")
    assert first["arguments"] == [("a\u2028b", " c")] and first["filtered_resps"] == [(-1.5, True)]
    assert second["filtered_resps"] == [-2.5]
    (written, _) = read_samples(tmp_path, "t", "generate_until")
    assert written["filtered_resps"] == [["-1.5", "True"]]


def test_a_harness_that_fails_is_told(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="lm_eval ended with exit code 1 on no_such_task"):
        evaluate_launched(
            tmp_path,
            task="no_such_task",
            task_folder=None,
            max_length=64,
            batch_size=4,
            num_processes=1,
            device="cpu",
            limit=None,
            seed=1,
        )
