"""A run that keeps attention inside documents, as typed."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import train as train_story
from gpt2_repro.data.rows import open_rows
from gpt2_repro.errors import UserError


def naive_loss(run: Path, dataset: Path) -> float:
    """The mean loss of `final/` on the validation rows, each document run alone at its place in the row."""
    model = AutoModelForCausalLM.from_pretrained(run / "final").eval()
    separator = AutoTokenizer.from_pretrained(dataset / "tokenizer").eos_token_id
    losses = []
    rows = open_rows(dataset / "validation")
    for number in range(len(rows)):
        ids = torch.from_numpy(rows[number]["input_ids"].astype("int64"))
        begins = sorted({0, *(ids[:-1] == separator).nonzero().flatten().tolist()})
        for begin, end in zip(begins, [*begins[1:], len(ids) - 1], strict=True):
            with torch.no_grad():
                logits = model(ids[None, begin:end], position_ids=torch.arange(begin, end)[None]).logits[0]
            losses.append(F.cross_entropy(logits, ids[begin + 1 : end + 1], reduction="none"))
    return float(torch.cat(losses).mean())


def test_it_trains_validates_and_resumes(train, events, tiny_recipe: Path, tmp_path: Path) -> None:
    straight, run = train(tmp_path / "straight", "--document_mask"), tmp_path / "resumed"
    environment = json.loads((straight / "environment.json").read_text())
    assert environment["document_mask"] is environment["trajectory"]["document_mask"] is True
    assert "document_mask" not in (straight / "final" / "config.json").read_text()

    # What it trains and measures is not what the same run measures across documents.
    dataset = Path(yaml.safe_load(tiny_recipe.read_text())["data"]["dataset_dir"])
    last = events(straight)[-1]
    assert last["step"] == 8 and last["eval_loss"] == pytest.approx(naive_loss(straight, dataset), abs=1e-5)
    across = train(tmp_path / "across")
    trajectory = json.loads((across / "environment.json").read_text())["trajectory"]
    assert trajectory["document_mask"] is False
    assert abs(events(across)[-1]["eval_loss"] - last["eval_loss"]) > 1e-4

    train(run, "--document_mask", "--stop_at_step", 5)
    with pytest.raises(UserError, match="document_mask True -> False"):
        train_story.main([str(tiny_recipe), "--output_dir", str(run)])
    train(run, "--document_mask")
    for ours, theirs in zip(*([e for e in events(each) if "loss" in e] for each in (run, straight)), strict=True):
        assert (ours["step"], ours["loss"]) == (theirs["step"], theirs["loss"])
