"""The tables of `gpt2_repro.diagnose` show a defect, and equal plain loops."""

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gpt2_repro import diagnose
from gpt2_repro.checkpoints import seal
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.errors import UserError
from gpt2_repro.evaluation import diagnosis_rows, diagnosis_tables
from gpt2_repro.evaluation.comparison import DIAGNOSIS_TABLES
from gpt2_repro.evaluation.diagnosis_rows import Domain, Row, domain_of_rows, read_task, rows_to_score, split_passage
from gpt2_repro.evaluation.passages import cut_passages
from tests.evaluation.conftest import write_rows


@pytest.fixture
def folders(model, tokenizer, documents: list[str], tmp_path: Path) -> dict[str, Path]:
    """Folders of a sound model, a run of a model with a defect, prepared data and task data."""
    broken = copy.deepcopy(model)
    broken.transformer.wpe.weight.data[64:] = 0  # positions that were never trained
    for name, one in (("sound", model), ("broken/final", broken)):
        one.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    data = {"dataset_dir": str(tmp_path / "data"), "sequence_length": 64}
    recipe = {"data": data, "evaluation": {"baseline": str(tmp_path / "sound")}}
    write_rows(tmp_path / "broken" / "recipe.yaml", [recipe])
    seal(tmp_path / "broken" / "final", {}, tokens=1, losses={}, environment={"run_identity": {}})
    texts = {"train": documents * 9, "wikitext": documents, "lambada_openai": cut_passages(documents)}
    for name, column in (("train", "text"), ("wikitext", "page"), ("lambada_openai", "text")):
        write_rows(tmp_path / f"{name}.jsonl", ({column: f"{n} {text}"} for n, text in enumerate(texts[name])))
    source = {"data_files": [str(tmp_path / "train.jsonl")], "split": "hash", "validation_fraction": 0.3}
    places = {"tokenizer": str(tmp_path / "sound"), "dataset_dir": str(tmp_path / "data")}
    prepare(DataArguments(sequence_length=128, **source, **places))
    return {name: tmp_path / name for name in ("sound", "broken", "data")} | {"local": tmp_path}


def test_positions_that_were_never_trained_show_in_their_table(folders, capsys, caplog) -> None:
    """The run brings its data and its baseline. The window is longer than its rows, so that the positions are found."""
    caplog.set_level("WARNING")
    words = [str(folders["broken"]), "--device", "cpu", "--tokens", "4000"]
    diagnose.main(words)
    assert sum("as --local_data" in line for line in caplog.messages) == 2  # texts of the Hub, without a network
    diagnose.main([*words, "--local_data", str(folders["local"])])
    output = folders["broken"] / "evaluation" / "diagnosis"
    diagnosis, markdown = ((output / f"diagnosis.{kind}").read_text(encoding="utf-8") for kind in ("json", "md"))
    diagnosis = json.loads(diagnosis)
    assert markdown in capsys.readouterr().out and diagnosis["window"] == 128 and "untrained" in caplog.text
    assert [row["label"] for row in diagnosis["domains"]] == ["validation text", "LAMBADA passages", "wikitext"]
    for row in itertools.chain(*(diagnosis[name] for name in DIAGNOSIS_TABLES)):
        shown = f"| {row['label']} | {row['tokens']:,} | {row['ours']:.3f} | {row['theirs']:.3f} |"
        assert shown.replace("-", "−") in markdown
    differences = {row["label"]: abs(row["difference"]["value"]) for row in diagnosis["positions"]}
    trained = [value for label, value in differences.items() if int(label.split()[0]) < 64]
    assert max(trained) < 1e-5 < min(list(differences.values())[len(trained) :])
    assert all(abs(row["difference"]["value"]) < 1e-5 for row in diagnosis["bare"])  # the first 64 ids
    sizes = [sum(row["tokens"] for row in diagnosis[name]) for name in ("domains", "frequencies")]
    assert sizes[0] == sizes[1] > 4000


def test_losses_of_different_tokenizers_are_not_compared(folders, gpt2_tokenizer) -> None:
    gpt2_tokenizer.save_pretrained(folders["broken"] / "final")
    words = [folders["sound"], "--baseline", folders["broken"], "--dataset_dir", folders["data"]]
    with pytest.raises(UserError, match="--baseline"):
        diagnose.main([*map(str, words)])


def text_rows(*lengths: list[int], window: int, tokens: int, tokenizer: Any) -> list[Row]:
    domains = [Domain(str(number), [np.arange(length) for length in its]) for number, its in enumerate(lengths)]
    return [row for row in rows_to_score(domains, tokenizer, window=window, tokens=tokens) if row.part == "text"]


def test_scores_equal_a_loop_over_rows(model: PreTrainedModel) -> None:
    source = np.random.default_rng(0)
    lengths = [2, 129, 3, 128, 40, 2, 77, *[100] * 50]  # several batches
    rows = [Row(source.integers(0, model.config.vocab_size, length).astype(np.uint16), 1, 0) for length in lengths]
    for row, losses in zip(rows, diagnosis_rows.score_rows(model, rows, device="cpu", name=""), strict=True):
        ids = torch.tensor(row.ids.astype(np.int64))
        with torch.no_grad():
            logits = model(ids[None, :-1]).logits[0]
        assert np.allclose(losses, torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none"), atol=1e-4)


def test_a_sample_has_each_target_once_and_about_as_many_as_asked(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = text_rows([25, 1, 11], [2] * 50, window=10, tokens=1000, tokenizer=tokenizer)
    assert [len(row.ids) for row in rows] == [11, 11, 5, 11, *[2] * 50]
    assert [row.document for row in rows] == [0, 0, 0, 2, *range(3, 53)]
    assert [row.ids.tolist() for row in rows[:3]] == [[*range(11)], [*range(10, 21)], [*range(20, 25)]]
    few = text_rows([101] * 40, [2] * 500, window=10, tokens=200, tokenizer=tokenizer)
    assert [sum(row.targets for row in few if row.domain == number) for number in (0, 1)] == [200, 200]
    assert len({row.document for row in few if row.domain == 0}) == 20  # spread over the documents


def test_packed_rows_give_whole_starts_and_ends(tokenizer: PreTrainedTokenizerBase) -> None:
    end = tokenizer.eos_token_id
    found = domain_of_rows("", [np.array([7, 8, end, 1, 2, end, 3]), np.array([end, 4, 5])], tokenizer, separator=end)
    assert [ids.tolist() for ids in found.starts] == [[1, 2], [3], [4, 5]]
    assert [ids.tolist() for ids in found.ends if len(ids) > 1] == [[7, 8, end], [end, 1, 2, end]]
    assert domain_of_rows("", [np.array([7, end, 8])], tokenizer, separator=None).starts == []


def test_words_are_encoded_as_the_harness_does(model, gpt2_tokenizer, real_data: Path) -> None:
    from lm_eval.models.huggingface import HFLM

    scorer = HFLM(pretrained=model, tokenizer=gpt2_tokenizer, device="cpu")
    domain = read_task("lambada_openai", real_data / "lambada" / "lambada_test.jsonl", gpt2_tokenizer)
    rows = rows_to_score([domain], gpt2_tokenizer, window=1024, tokens=20_000)
    rows = [row for row in rows if row.part == "words"]
    passages = [parts for text in domain.passages if (parts := split_passage(text))]
    assert len(rows) > 300
    for whole, alone in zip(rows[::2], rows[1::2], strict=True):
        text = gpt2_tokenizer.decode(whole.ids)
        earlier, sentence, word = next(its for its in passages if "{}{} {}".format(*its) == text)
        context, target = scorer._encode_pair(earlier + sentence, " " + word)
        assert (whole.ids.tolist(), whole.targets) == ([*context, *target], len(target))
        assert alone.ids[-alone.targets :].tolist() == target and len(alone.ids) < len(whole.ids)


def test_tables_equal_plain_sums(tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
    source = np.random.default_rng(seed)
    rows = text_rows([33] * 20, [16] * 20, window=32, tokens=10**6, tokenizer=tokenizer)
    targets = diagnosis_tables.join(rows, ([source.exponential(3, row.targets) for row in rows] for _ in range(2)))
    edges = diagnosis_tables.position_edges(32)
    counts = np.bincount(targets.token) * 10 ** (np.arange(targets.token.max() + 1) % 6)
    shares = counts[targets.token] / counts.sum()
    first_positions = [max(its for its in edges if its <= at) for at in targets.position]
    for found, of_target in [
        (diagnosis_tables.buckets(targets, targets.domain, ["a", "b"]), targets.domain),
        (diagnosis_tables.by_place(targets, targets.position, edges), first_positions),
        (diagnosis_tables.by_frequency(targets, counts), sum(shares >= limit for limit in (1e-3, 1e-4, 1e-5, 1e-6))),
    ]:
        groups = np.array(of_target)
        expected = {name: targets.ours[groups == name] for name in groups}
        assert sorted(bucket["tokens"] for bucket in found) == sorted(map(len, expected.values()))
        means = sorted(its.mean() for its in expected.values())
        assert sorted(bucket["ours"] for bucket in found) == pytest.approx(means)


def test_errors_are_those_of_documents_not_of_tokens() -> None:
    source = np.random.default_rng(0)
    cluster = np.repeat(np.arange(100), 50)
    draws = (source.normal(size=5000) + np.repeat(source.normal(size=100), 50) for _ in range(300))
    means, errors, _ = zip(*(diagnosis_tables.clustered(draw, cluster) for draw in draws), strict=True)
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.15)
    assert diagnosis_tables.clustered(np.ones(5), np.zeros(5, np.int64)) == (1.0, None, 1)
