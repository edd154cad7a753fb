"""Whole preparations of random documents against a naive one: tokens in are tokens out and counted losses."""

import json
import random
from pathlib import Path

import pytest
from datasets import load_from_disk

from gpt2_repro.data import shards
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.encoder import Encoder
from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.data.preparation.staged import is_held_out
from gpt2_repro.data.shards import verify
from gpt2_repro.data.sources import text_files
from gpt2_repro.data.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["abc ab a " * 50], 260, folder, sequence_length=8)
    return folder


def naive(documents: list[str], args: DataArguments, encoder: Encoder) -> dict[str, tuple[list[list[int]], int]]:
    """Of each split the rows and the tokens, one document after another."""
    encoded, length = [ids.tolist() for ids in encoder.encode_each(documents)], args.sequence_length
    splits: dict[str, list[list[int]]] = {"validation": [], "train": []}
    before = 0
    for text, ids in zip(documents, encoded, strict=True):
        held_out = is_held_out(text, args) if args.split == "hash" else before < args.validation_tokens
        if not args.max_tokens or before < args.max_tokens:
            splits["validation" if held_out else "train"].append(ids)
        before += len(ids)
    rows = {}
    for split, of_split in splits.items():
        pieces = of_split if args.packing == "wrap" else [[token for ids in of_split for token in ids]]
        least = max(1, args.min_length) if args.packing == "wrap" else length
        windows = [ids[a : a + length + 1] for ids in pieces for a in range(0, max(0, len(ids) - 1), length)]
        kept = [window for window in windows if len(window) > least]
        rows[split] = kept, sum(map(len, of_split))
    return rows


def test_a_preparation_equals_the_naive_one(
    seed: int, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random.Random(seed)
    length = source.choice([1, 2, 8, 8])
    monkeypatch.setattr(text_files, "PART_BYTES", source.choice([90, 400, 2**26]))
    monkeypatch.setattr(shards, "BLOCK_IDS", source.choice([70, 200, 2**25]))
    separator = source.choice(["before", "after", "none"])
    packing = source.choice(["concat", "wrap"])
    # A separator and 7 others fill the targets of a row but one; 8 and 16 fill them; none, one and very many do not.
    sizes = [0, 1, length - 1, length, length + 1, 2 * length - 1, 2 * length, 2 * length + 1, 90]
    documents = ["z" * source.choice(sizes) for _ in range(source.randint(30, 45))]
    documents = [text[:-1] + source.choice("abcdefgh") if text else text for text in documents]
    for name, part in (("a", documents[:20]), ("b", documents[20:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    args = DataArguments(
        data_files=[str(tmp_path / "*.jsonl")],
        tokenizer=str(tokenizer),
        dataset_dir=str(tmp_path / "out"),
        packing=packing,  # type: ignore[arg-type]
        sequence_length=length,
        min_length=source.choice([0, length // 2, length]) if packing == "wrap" else 0,
        separator=separator,  # type: ignore[arg-type]
        split=source.choice(["head", "hash"]),  # type: ignore[arg-type]
        validation_tokens=100,  # type: ignore[arg-type]
        validation_fraction=0.3,
        max_tokens=source.choice([0, 350]),  # type: ignore[arg-type]
        validation_text=True,
    )
    manifest = prepare(args)
    verify(args.dataset_dir, manifest)
    assert json.loads(Path(args.dataset_dir, "manifest.json").read_text()) == json.loads(json.dumps(manifest))
    assert not Path(args.dataset_dir + ".staging").exists()
    encoder = Encoder(tokenizer, separator=separator)
    for split, (rows, tokens) in naive(documents, args, encoder).items():
        table = load_from_disk(f"{args.dataset_dir}/{split}")
        assert table["input_ids"][:] == rows and table.features["input_ids"].feature.dtype == "uint16"
        counts = manifest["counts"][split]
        targets = sum(len(row) - 1 for row in rows)
        firsts = 1 if packing == "concat" else counts["documents"]
        assert (counts["rows"], counts["row_tokens"], counts["tokens"]) == (len(rows), targets, tokens)
        assert tokens == firsts + targets + counts["dropped_tokens"]
    counts = manifest["counts"]["validation"]
    lines = Path(args.dataset_dir, "text", "validation.jsonl").read_text().splitlines()
    assert len(lines) == counts["documents"] + counts["empty_documents"]
    assert sum(map(len, encoder.encode_each([json.loads(line)["text"] for line in lines]))) == counts["tokens"]
