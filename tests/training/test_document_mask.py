"""A run that keeps attention inside documents, as typed."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.training.by_hand import nll, rows_of, targets_of


def naive_loss(run: Path, data: Path) -> float:
    """The mean loss of `final/` on the validation rows, each document run alone at its place in the row."""
    model = AutoModelForCausalLM.from_pretrained(run / "final").eval()
    separator = AutoTokenizer.from_pretrained(data / "tokenizer").eos_token_id
    rows, total = rows_of(data, "validation"), 0.0
    for ids in rows:
        begins = sorted({0, *(ids[:-1] == separator).nonzero().flatten().tolist()})
        for begin, end in zip(begins, [*begins[1:], len(ids) - 1], strict=True):
            total += nll(model, ids[begin : end + 1], begin=begin)
    return total / targets_of(rows)


def test_it_trains_and_validates(straight, train, typed, events, data: Path, tmp_path: Path) -> None:
    masked = train(tmp_path / "masked", "--document_mask")
    records = [json.loads((each / "environment.json").read_text()) for each in (masked, straight)]
    assert [record["document_mask"] for record in records] == [True, False]
    assert "document_mask" not in (masked / "final" / "config.json").read_text()
    # What it trains and measures is not what the same run measures across documents.
    last, across = events(masked)[-1], events(straight)[-1]
    assert last["step"] == 8 and last["eval_loss"] == pytest.approx(naive_loss(masked, data), abs=1e-5)
    assert abs(across["eval_loss"] - last["eval_loss"]) > 1e-4
    refused = typed(masked)
    assert refused.returncode == 2 and "document_mask True -> False" in refused.stderr
