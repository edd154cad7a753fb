"""Prepared folders of random documents equal those of a naive implementation."""

import json
import math
import random
from pathlib import Path

import pytest
from datasets import load_from_disk

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.preparation import writing
from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.data.preparation.staging import is_held_out
from gpt2_repro.data.sources import local_files
from gpt2_repro.data.tokenizer import Encoder, obtain_tokenizer
from tests.reference import encode_each, write_jsonl


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    args = DataArguments(tokenizer="train:260", sequence_length=8)
    obtain_tokenizer(args, folder, lambda: ["abc ab a " * 50], 0)
    return folder


def naive(
    texts: list[str], args: DataArguments, encoder: Encoder
) -> dict[str, tuple[list[str], list[list[int]], list[int]]]:
    """Return the documents, rows and document lengths of each split, computed naively."""
    encoded = [ids.tolist() for ids in encode_each(encoder, texts)]
    starts = [sum(map(len, encoded[:number])) for number in range(len(texts))]
    below = args.max_tokens or math.inf
    total = min(below, sum(map(len, encoded)))
    used = [each for each in zip(starts, texts, encoded, strict=True) if each[0] < below]
    head = round(min(args.validation_tokens, 0.1 * total))
    cut = max(args.validation_tokens, sum(len(ids) for start, _, ids in used if start < head)) > 0.1 * total
    if args.split == "hash":
        hashed = [sum(len(ids) for _, text, ids in used if is_held_out(text, args) == on) for on in (True, False)]
        cut = min(hashed) <= args.sequence_length
        head = round(args.validation_fraction * total)
    splits: dict[str, list[tuple[str, list[int]]]] = {"validation": [], "train": []}
    for start, text, ids in used:
        held_out = is_held_out(text, args) if args.split == "hash" and not cut else start < head
        inside = head - start
        if cut and 0 < inside < len(ids):
            text = encoder.cut(text, inside)
            splits["validation"].append((text, ids[:inside]))
            splits["train"].append((text, ids[inside:]))
        else:
            splits["validation" if held_out else "train"].append((text, ids))
    wanted = {}
    for split, of_split in splits.items():
        encoded = [ids for _, ids in of_split]
        pieces = encoded if args.packing == "wrap" else [sum(encoded, [])]
        length = args.sequence_length
        least = max(1, args.min_length) if args.packing == "wrap" else length
        windows = [ids[a : a + length + 1] for ids in pieces for a in range(0, max(0, len(ids) - 1), length)]
        rows = [window for window in windows if len(window) > least]
        wanted[split] = [text for text, _ in of_split], rows, list(map(len, encoded))
    return wanted


def test_a_preparation_equals_the_naive_one(
    seed: int, arguments, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random.Random(seed)
    length = source.choice([1, 2, 8, 8])
    monkeypatch.setattr(local_files, "PART_BYTES", source.choice([90, 400, 2**26]))
    monkeypatch.setattr(writing, "BLOCK_IDS", source.choice([70, 200, 2**25]))
    monkeypatch.setattr(writing, "PIECE_TOKENS", source.choice([1, 30, 2**22]))  # tokens in memory
    separator = source.choice(["before", "after", "none"])
    packing = source.choice(["concat", "wrap"])
    # For length 8 and with a separator: 7 ids fill all targets of a row but one; 8 and 16 ids fill rows exactly.
    sizes = [0, 1, length - 1, length, length + 1, 2 * length - 1, 2 * length, 2 * length + 1, 90]
    documents = ["z" * source.choice(sizes) for _ in range(source.randint(30, 120))]
    documents = [text[:-1] + source.choice("abcdefgh") if text else text for text in documents]
    for name, part in (("a", documents[:20]), ("b", documents[20:])):
        write_jsonl(tmp_path / f"{name}.jsonl", part)
    form = {"sequence_length": length, "packing": packing, "separator": separator, "validation_fraction": 0.3}
    form["min_length"] = source.choice([0, length // 2, length]) if packing == "wrap" else 0
    form |= {"split": source.choice(["head", "hash"]), "max_tokens": source.choice([0, 350])}
    form |= {"validation_tokens": source.choice([20, 100])}
    text = {"data_files": [], "source": f"{tmp_path}/*.jsonl", "validation_text": True}
    args = arguments(**form, **text, tokenizer=str(tokenizer))
    data = prepare(args)
    data.verify()
    wanted = naive(documents, args, Encoder(tokenizer, separator=separator))
    for split, (_, rows, lengths) in wanted.items():
        tokens, empty = sum(lengths), lengths.count(0)
        table = load_from_disk(f"{args.dataset_dir}/{split}")
        assert table["input_ids"][:] == rows and table.features["input_ids"].feature.dtype == "uint16"
        counts = data.manifest.counts[split]
        targets = sum(len(row) - 1 for row in rows)
        firsts = 1 if packing == "concat" else counts.documents
        assert (counts.documents, counts.empty_documents) == (len(lengths) - empty, empty)
        assert (counts.rows, counts.row_tokens, counts.tokens) == (len(rows), targets, tokens)
        assert tokens == firsts + targets + counts.dropped_tokens
    lines = Path(args.dataset_dir, "text", "validation.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["text"] for line in lines] == wanted["validation"][0]


def test_the_hash_holds_out_its_fraction_by_the_text_and_the_seed() -> None:
    held_out = []
    for seed in (0, 1):
        args = DataArguments(source="embedded", split="hash", validation_fraction=0.2, split_seed=seed)
        held_out.append({number for number in range(2000) if is_held_out(f"document {number}", args)})
    assert all(320 < len(numbers) < 480 for numbers in held_out)
    assert len(held_out[0] & held_out[1]) < 160
