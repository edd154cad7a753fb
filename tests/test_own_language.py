"""Languages without spaces between words: from the text to the report, with the commands of docs/own-language.md."""

import json
import random
from pathlib import Path

import pytest

from gpt2_repro.evaluation.__main__ import main as evaluate
from gpt2_repro.export import main as export
from gpt2_repro.report.__main__ import main as report


SCRIPTS = {
    "chinese": "".join(map(chr, range(0x4E00, 0x4F00))),
    "thai": "".join(map(chr, [*range(0x0E01, 0x0E2F), *range(0x0E30, 0x0E3A)])),
}
TINY = ("--n_layer", 1, "--n_head", 1, "--n_embd", 16, "--sequence_length", 32, "--tokens_per_step", 256)
TINY += ("--per_device_train_batch_size", 4, "--max_steps", 4, "--warmup_steps", 1, "--use_cpu", "--eval_steps", 4)


def paragraph(source: random.Random, letters: str, *, lines: bool) -> str:
    text = "".join(source.choices(letters, k=400))
    return "\n".join(text[at : at + 80] for at in range(0, 400, 80)) if lines else text


@pytest.mark.parametrize(("script", "lines"), [("chinese", False), ("thai", True)])
def test_a_language_without_spaces_is_scored_and_reported(script: str, lines: bool, type_warm, tmp_path: Path) -> None:
    source = random.Random(0)
    texts = [paragraph(source, SCRIPTS[script], lines=lines) for _ in range(80)]
    rows = [json.dumps({"text": text}) + "\n" for text in texts]
    (tmp_path / "texts.jsonl").write_text("".join(rows), encoding="utf-8")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/news.txt").write_text(texts[0], encoding="utf-8")
    recipe, data, run = Path(__file__).parents[1] / "recipes/own_language.yaml", tmp_path / "data", tmp_path / "run"

    def typed(*words: object) -> None:
        done = type_warm(*words)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    files = ("--data_files", tmp_path / "texts.jsonl", "--dataset_dir", data, "--sequence_length", 32)
    vocabulary = ("--tokenizer", "train:300", "--validation_fraction", 0.4)
    typed("python", "prepare_data.py", recipe, *files, *vocabulary)
    typed("python", "train.py", recipe, "--dataset_dir", data, "--output_dir", run, *TINY)
    words = [str(run), "--baseline", "untrained", "--device", "cpu", "--no_cache", "--tasks", "document_perplexity"]
    evaluate([*words, "--bits_per_byte", str(tmp_path / "other")])
    text = (run / "evaluation/comparison.json").read_text(encoding="utf-8")
    scores = {(row["task"], row["metric"]): row for row in json.loads(text)["rows"]}
    metrics = {metric for task, metric in scores if task == "document_perplexity"}
    assert metrics == {"byte_perplexity", "bits_per_byte", "nats_per_token"}
    assert ("bits_per_byte_news", "bits_per_byte") in scores
    for row in scores.values():
        for score in row["values"].values():
            assert score["value"] > 0 and score["stderr"] is not None
    table = (run / "evaluation/comparison.md").read_text(encoding="utf-8")
    assert "inf" not in table and "nan" not in table
    report([str(run)])
    export([str(run), str(tmp_path / "exported")])
    value = scores["document_perplexity", "bits_per_byte"]["values"]
    (ours,) = (score["value"] for name, score in value.items() if name != "untrained")
    assert f"{ours:.4f}" in (tmp_path / "exported/README.md").read_text(encoding="utf-8")
