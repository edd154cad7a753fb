"""The tables of `gpt2_repro.diagnose` show a defect, and equal plain loops."""

import copy
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from gpt2_repro import diagnose
from gpt2_repro.checkpoints.manifest import seal
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.errors import UserError
from gpt2_repro.evaluation import diagnosis
from gpt2_repro.evaluation.comparison import DIAGNOSIS_TABLES
from gpt2_repro.evaluation.diagnosis import Row, cut_rows
from gpt2_repro.evaluation.passages import cut_passages
from tests.evaluation.conftest import write_rows


@pytest.fixture
def folders(model, tokenizer, prose: list[str], tmp_path: Path) -> dict[str, Path]:
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
    texts = {"train": prose * 9, "wikitext": prose, "lambada_openai": cut_passages(prose)}
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
    written, markdown = ((output / f"diagnosis.{kind}").read_text(encoding="utf-8") for kind in ("json", "md"))
    tables = json.loads(written)
    assert markdown in capsys.readouterr().out and tables["window"] == 128 and "untrained" in caplog.text
    assert [row["label"] for row in tables["domains"]] == ["validation text", "LAMBADA passages", "wikitext"]
    for row in itertools.chain(*(tables[name] for name in DIAGNOSIS_TABLES)):
        line = f"| {row['label']} | {row['tokens']:,} | {row['ours']:.3f} | {row['theirs']:.3f} |"
        assert line.replace("-", "−") in markdown
    differences = {row["label"]: abs(row["difference"]["value"]) for row in tables["positions"]}
    trained = [value for label, value in differences.items() if int(label.split()[0]) < 64]
    assert max(trained) < 1e-5 < min(list(differences.values())[len(trained) :])
    assert len(tables["ends"]) == 1 and tables["starts"]
    sizes = [sum(row["tokens"] for row in tables[name]) for name in ("domains", "frequencies")]
    assert sizes[0] == sizes[1] > 4000


def test_losses_of_different_tokenizers_are_not_compared(folders, gpt2_tokenizer) -> None:
    gpt2_tokenizer.save_pretrained(folders["broken"] / "final")
    words = [folders["sound"], "--baseline", folders["broken"], "--dataset_dir", folders["data"]]
    with pytest.raises(UserError, match="--baseline"):
        diagnose.main([*map(str, words)])


def test_scores_equal_a_loop_over_rows(model: PreTrainedModel) -> None:
    source = np.random.default_rng(0)
    lengths = [2, 129, 3, 128, 40, 2, 77, *[100] * 50]  # several batches
    rows = [Row(source.integers(0, model.config.vocab_size, length).astype(np.uint16), 0, 0) for length in lengths]
    for row, losses in zip(rows, diagnosis.score_rows(model, rows, device="cpu", name=""), strict=True):
        ids = torch.tensor(row.ids.astype(np.int64))
        with torch.no_grad():
            logits = model(ids[None, :-1]).logits[0]
        assert np.allclose(losses, torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none"), atol=1e-4)


def documents_of(*lengths: list[int]) -> dict[str, list[np.ndarray]]:
    return {str(number): [np.arange(length) for length in of_text] for number, of_text in enumerate(lengths)}


def test_a_sample_has_each_target_once_and_about_as_many_as_asked() -> None:
    rows = cut_rows(documents_of([25, 1, 11], [2] * 50), window=10, tokens=1000)
    assert [len(row.ids) for row in rows] == [11, 11, 5, 11, *[2] * 50]
    assert [row.document for row in rows] == [0, 0, 0, 2, *range(3, 53)]
    assert [row.ids.tolist() for row in rows[:3]] == [[*range(11)], [*range(10, 21)], [*range(20, 25)]]
    few = cut_rows(documents_of([101] * 40, [2] * 500), window=10, tokens=200)
    assert [sum(len(row.ids) - 1 for row in few if row.domain == number) for number in (0, 1)] == [200, 200]
    assert len({row.document for row in few if row.domain == 0}) == 20  # spread over the documents


def test_tables_equal_plain_sums(seed: int) -> None:
    source, end, window = np.random.default_rng(seed), 7, 96
    texts = {name: [source.integers(0, 40, size) for _ in range(9)] for name, size in {"a": 97, "b": 65}.items()}
    rows = cut_rows(texts, window=window, tokens=10**6)
    losses = [[source.exponential(3, len(row.ids) - 1).astype(np.float32) for row in rows] for _ in range(2)]
    counts = 10 ** (np.arange(40) % 6)
    options = {"names": ["a", "b"], "window": window, "separator": end, "counts": counts}
    tables = diagnosis.loss_tables(rows, losses, **options)
    edges = diagnosis.position_edges(window)
    expected: dict[str, dict[object, list[float]]] = {name: {} for name in DIAGNOSIS_TABLES}
    for row, of_row in zip(rows, losses[0], strict=True):
        for index, (token, loss) in enumerate(zip(row.ids[1:].tolist(), of_row.tolist(), strict=True)):
            before = row.ids[: index + 1].tolist()
            share = counts[token] / counts.sum()
            groups = {"domains": row.domain, "frequencies": sum(share >= least for least in (1e-3, 1e-4, 1e-5, 1e-6))}
            groups |= {"positions": max(edge for edge in edges if edge <= index)} if len(row.ids) > window else {}
            groups |= {"ends": 0} if token == end else {}
            if end in before and (distance := before[::-1].index(end) + 1) < 65:
                groups["starts"] = (distance - 1).bit_length()  # 1, 2, 3 to 4, 5 to 8, and so on
            for name, group in groups.items():
                expected[name].setdefault(group, []).append(loss)
    for name, groups in expected.items():
        assert sorted(bucket["tokens"] for bucket in tables[name]) == sorted(map(len, groups.values())), name
        means = sorted(float(np.mean(one)) for one in groups.values())
        assert sorted(bucket["ours"] for bucket in tables[name]) == pytest.approx(means, abs=1e-5), name


def test_errors_are_those_of_documents_not_of_tokens() -> None:
    source = np.random.default_rng(0)
    cluster = np.repeat(np.arange(100), 50)
    draws = (source.normal(size=5000) + np.repeat(source.normal(size=100), 50) for _ in range(300))
    means, errors, _ = zip(*(diagnosis.clustered(draw, cluster) for draw in draws), strict=True)
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.15)
    assert diagnosis.clustered(np.ones(5), np.zeros(5, np.int64)) == (1.0, None, 1)
