"""Mixtures of sources equal those of a naive implementation, and have their shares exactly."""

import collections
import itertools
import json
import math
import random
import shutil
from collections import namedtuple
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import yaml
from datasets import load_from_disk
from tokenizers import Tokenizer

from gpt2_repro.data import tokenizer as tokenizer_module
from gpt2_repro.data.arguments import DataArguments, PreparationOptions
from gpt2_repro.data.preparation import staging, writing
from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.data.preparation.staging import is_held_out
from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.data.sources import local_files
from gpt2_repro.data.tokenizer import Encoder, obtain_tokenizer
from gpt2_repro.errors import UserError
from gpt2_repro.files import write_whole
from tests.reference import encode_each, write_jsonl


class Document(NamedTuple):
    text: str
    ids: list[int]


class NaiveSource(NamedTuple):
    share: Fraction
    passes: int
    documents: list[Document]
    own_validation: list[Document]


class Divided(NamedTuple):
    validation: list[Document]
    train: list[Document]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    args = DataArguments(tokenizer="train:260", sequence_length=8)
    obtain_tokenizer(args, folder, lambda: ["abc ab a " * 50], 0)
    return folder


def tokens_of(documents: list[Document]) -> int:
    return sum(len(document.ids) for document in documents)


def divide_at(documents: list[Document], head: int, *, cut: bool, encoder: Encoder) -> Divided:
    """Hold out the documents that start before `head`."""
    divided = Divided([], [])
    start = 0
    for document in documents:
        inside = head - start
        if inside <= 0:
            divided.train.append(document)
        elif cut and inside < len(document.ids):
            text = encoder.cut(document.text, inside)
            divided.validation.append(Document(text, document.ids[:inside]))
            divided.train.append(Document("", document.ids[inside:]))
        else:
            divided.validation.append(document)
        start += len(document.ids)
    return divided


def divide(source: NaiveSource, most: Fraction, args: DataArguments, encoder: Encoder) -> Divided:
    """Return the validation and the training documents of a source."""
    if args.split == "source":
        return Divided(source.own_validation, source.documents)
    total = min(Fraction(tokens_of(source.documents)), source.share * most)
    if args.split == "hash":
        divided = Divided([], [])
        for document in source.documents:
            split = divided.validation if is_held_out(document.text, args) else divided.train
            split.append(document)
        needed = math.ceil(source.share * most)
        held_out = held_out_before(source.documents, divided, needed)
        if min(tokens_of(held_out), tokens_of(divided.train), needed) > args.sequence_length:
            return divided
        head = round(args.validation_fraction * float(total))
        return divide_at(source.documents, head, cut=True, encoder=encoder)
    requested = float(source.share * args.validation_tokens)
    limit = 0.1 * float(total)
    head = round(min(requested, limit))
    whole = divide_at(source.documents, head, cut=False, encoder=encoder)
    cut = max(requested, tokens_of(whole.validation)) > limit
    return divide_at(source.documents, head, cut=cut, encoder=encoder)


def held_out_before(documents: list[Document], divided: Divided, tokens: int) -> list[Document]:
    """Return the held-out documents before the training document with which training has its tokens."""
    held_out = []
    taken = 0
    for document in documents:
        if taken >= tokens:
            break
        if any(document is other for other in divided.validation):
            held_out.append(document)
        else:
            taken += len(document.ids)
    return held_out


def interleave(streams: list[list[Document]], quotas: list[int], args: DataArguments) -> list[Document]:
    """Take runs of documents from the source that has the smallest part of its tokens, and repeat its documents."""
    run = min(max(sum(quotas) // 2000, args.sequence_length), 2**16)
    taken = [0] * len(quotas)
    places = [0] * len(quotas)
    mixed = []
    while taken != quotas:
        parts = [Fraction(have, quota) if quota else 1 for have, quota in zip(taken, quotas, strict=True)]
        number = parts.index(min(parts))
        stop = min(taken[number] + run, quotas[number])
        while taken[number] < stop:
            documents = streams[number]
            document = documents[places[number] % len(documents)]
            places[number] += 1
            ids = document.ids[: quotas[number] - taken[number]]
            taken[number] += len(ids)
            mixed.append(Document(document.text, ids))
    return mixed


def naive(sources: list[NaiveSource], args: DataArguments, encoder: Encoder) -> Divided:
    """Return the documents of both splits, computed naively."""
    bounds = [source.passes * tokens_of(source.documents) / source.share for source in sources]
    most = min(bounds)
    if args.max_tokens:
        most = min(most, Fraction(args.max_tokens))
    divided = [divide(source, most, args, encoder) for source in sources]
    total = most
    for source, splits in zip(sources, divided, strict=True):
        total = min(total, source.passes * tokens_of(splits.train) / source.share)
    quotas = [round(source.share * total) for source in sources]
    held_out = []
    for source, splits, quota in zip(sources, divided, quotas, strict=True):
        of_source = splits.validation
        is_cut = tokens_of(splits.validation) and splits.validation[-1] not in source.documents
        if args.split == "hash" and quota < tokens_of(splits.train) and not is_cut:
            of_source = held_out_before(source.documents, splits, quota)
        held_out.append(of_source)
    validation = interleave(held_out, [tokens_of(documents) for documents in held_out], args)
    train = interleave([splits.train for splits in divided], quotas, args)
    return Divided(validation, train)


def rows_of(documents: list[Document], args: DataArguments) -> list[list[int]]:
    length = args.sequence_length
    pieces = [document.ids for document in documents]
    fewest = max(1, args.min_length)
    if args.packing == "concat":
        pieces = [sum(pieces, [])]
        fewest = length
    rows = []
    for ids in pieces:
        for start in range(0, max(0, len(ids) - 1), length):
            row = ids[start : start + length + 1]
            if len(row) > fewest:
                rows.append(row)
    return rows


def test_a_mixture_equals_the_naive_one(
    seed: int, arguments, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    length = chance.choice([2, 8, 8])
    monkeypatch.setattr(local_files, "PART_BYTES", chance.choice([90, 400, 2**26]))
    monkeypatch.setattr(writing, "BLOCK_IDS", chance.choice([70, 200, 2**25]))
    monkeypatch.setattr(writing, "PIECE_TOKENS", chance.choice([1, 30, 2**22]))
    separator = chance.choice(["before", "after", "none"])
    encoder = Encoder(tokenizer, separator=separator)
    sizes = [0, 1, length - 1, length, length + 1, 2 * length, 90]
    names = []
    shares = [chance.choice([1, 1, 2, 3.7, 0.25]) for _ in range(chance.choice([2, 3]))]
    sources = []
    for number, share in enumerate(shares):
        texts = []
        for _ in range(chance.randint(30, 70)):
            text = "z" * chance.choice(sizes)
            texts.append(text[:-1] + chance.choice("abcdefgh") if text else text)
        own = [f"own {number} {chance.random()}" for _ in range(5)]
        for name, part in (("a", texts[:20]), ("b", texts[20:]), ("val", own)):
            write_jsonl(tmp_path / f"{number}-{name}.jsonl", part)
        passes = chance.choice([1, 1, 2, 5])
        documents = [
            Document(text, ids.tolist()) for text, ids in zip(texts, encode_each(encoder, texts), strict=True)
        ]
        validation = [Document(text, ids.tolist()) for text, ids in zip(own, encode_each(encoder, own), strict=True)]
        exact = Fraction(str(share)) / sum(Fraction(str(each)) for each in shares)
        sources.append(NaiveSource(exact, passes, documents, validation))
        names.append((f"{tmp_path}/{number}-[ab].jsonl", f"{tmp_path}/{number}-*.jsonl", f"={share}x{passes}"))
    split = chance.choice(["head", "hash", "source"])
    texts_of_source = [(all_files if split == "source" else files) + share for files, all_files, share in names]
    packing = chance.choice(["concat", "wrap"])
    args = arguments(
        data_files=[],
        source=",".join(texts_of_source),
        tokenizer=str(tokenizer),
        sequence_length=length,
        packing=packing,
        min_length=chance.choice([0, length]) if packing == "wrap" else 0,
        separator=separator,
        split=split,
        validation_fraction=0.3,
        validation_tokens=chance.choice([60, 300]),
        max_tokens=chance.choice([0, 350, 900]),
        validation_text=True,
    )
    data = prepare(args)
    data.verify()
    wanted = naive(sources, args, encoder)
    for name, documents in (("train", wanted.train), ("validation", wanted.validation)):
        rows = load_from_disk(f"{args.dataset_dir}/{name}")["input_ids"][:]
        assert rows == rows_of(documents, args)
        assert data.manifest.counts[name].tokens == tokens_of(documents)
        assert sum(data.manifest.tokens_by_source[name].values()) == tokens_of(documents)
    lines = Path(args.dataset_dir, "text", "validation.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["text"] for line in lines] == [document.text for document in wanted.validation]
    total = tokens_of(wanted.train)
    assert data.manifest.mixture is not None
    row_tokens = [mixed.row_tokens for mixed in data.manifest.mixture]
    if packing == "wrap":
        assert sum(row_tokens) == data.manifest.counts["train"].row_tokens
    else:
        assert row_tokens == [None] * len(sources)
    for source, mixed in zip(sources, data.manifest.mixture, strict=True):
        assert mixed.used == data.manifest.tokens_by_source["train"][mixed.source]
        assert math.isclose(mixed.used, source.share * total, abs_tol=1)


def numbered(name: str, count: int, words: int) -> list[str]:
    """Return documents of which no two are equal."""
    return [f"{name} {number} " + "one two three " * words for number in range(count)]


@pytest.fixture
def mixture(arguments, tmp_path: Path):
    """Return a function that builds the arguments of a mixture of two sources, `a` and `b`."""
    write_jsonl(tmp_path / "a.jsonl", numbered("a", 200, 9))
    write_jsonl(tmp_path / "b.jsonl", numbered("b", 90, 12))

    def build(name: str, shares: str = "a.jsonl=0.7,b.jsonl=0.3", **changes: object) -> DataArguments:
        source = ",".join(f"{tmp_path}/{part}" for part in shares.split(","))
        return arguments(name, **({"data_files": [], "source": source, "validation_fraction": 0.1} | changes))

    return build


def texts_of(data: PreparedData, split: str) -> list[str]:
    """Return the documents of a split that was prepared with --tokenizer char and a separator of its own."""
    rows = data.rows(split).joined()[0].reshape(-1, 33)
    ids = [*rows[:, :-1].ravel().tolist(), int(rows[-1, -1])]
    return [text for text in data.tokenizer.decode(ids).split("#") if text]


@pytest.mark.parametrize("split", ["head", "hash"])
def test_workers_and_interruptions_give_the_same_bytes(
    mixture, split: str, content, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_files, "PART_BYTES", 2000)
    form = {"split": split, "validation_text": True, "max_tokens": 2000}
    alone = mixture("alone", **form)
    prepare(alone)
    for number, calls in enumerate((4, 9, 14)):
        killed = mixture(f"killed{number}", **form)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(staging, "write_whole", interrupted_at(calls))
            prepare(killed)
        prepare(killed, PreparationOptions(num_proc=3))
        assert content(killed.dataset_dir) == content(alone.dataset_dir)


def interrupted_at(call: int) -> Callable[..., None]:
    calls = itertools.count(1)

    def write(*words: object) -> None:
        if next(calls) == call:
            raise KeyboardInterrupt
        write_whole(*words)

    return write


@pytest.mark.parametrize("max_tokens", [1000, 100_000])
def test_a_mixture_that_ends_early_names_its_source(
    mixture, max_tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    data = prepare(mixture("out", max_tokens=max_tokens))
    tokens = data.manifest.counts["train"].tokens
    ends_early = f"train has {tokens:,} of the 100,000 tokens of --max_tokens, because "
    assert (ends_early in caplog.text) == (max_tokens > tokens)
    if max_tokens > tokens:
        reason = caplog.text.partition(ends_early)[2]
        assert "a.jsonl has no more" in reason.splitlines()[0]


@pytest.mark.parametrize(("free", "is_enough"), [(0.75, False), (0.85, True)])
def test_the_disk_is_checked_before_a_mixture(
    mixture, free: float, is_enough: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        path = tmp_path / f"{name}.jsonl"
        write_jsonl(path, numbered(name, 200, 500))
    tokens = path.stat().st_size / 4.5  # of each file
    # All of a and 3/7 of b become rows. A tenth more of b is staged, in place of documents that the hash holds out.
    needed = 2 * tokens * (10 / 7 + 1 + 3 / 7 / 0.9)
    disk = namedtuple("usage", "free")(round(free * needed))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    expected = nullcontext() if is_enough else pytest.raises(UserError, match=r"--dataset_dir.*--max_tokens")
    with expected:
        prepare(mixture("out", split="hash"))
    assert (tmp_path / "out").exists() == is_enough


@pytest.mark.parametrize("split", ["head", "hash"])
def test_documents_are_repeated_only_if_asked(mixture, tmp_path: Path, split: str) -> None:
    for name in ("a", "b"):
        texts = [f"{text}#" for text in numbered(name, 200 if name == "a" else 40, 9)]
        write_jsonl(tmp_path / f"{name}.jsonl", texts)
    form = {"tokenizer": "char", "separator": "none", "split": split, "validation_text": True}
    for passes in (1, 3):
        data = prepare(mixture(f"x{passes}", f"a.jsonl=0.5,b.jsonl=0.5x{passes}", **form))
        complete = texts_of(data, "train")[1:-1]  # the first and the last may be cut
        counted = collections.Counter(text for text in complete if len(text) > 100)
        most = {name: 0 for name in ("a", "b")}
        for text, times in counted.items():
            most[text[0]] = max(most[text[0]], times)
        assert most == {"a": 1, "b": passes}
        lines = (data.path / "text" / "validation.jsonl").read_text(encoding="utf-8").splitlines()
        held_out = {json.loads(line)["text"].rstrip("#") for line in lines}
        assert len(held_out) > 2 and {text[0] for text in held_out} == {"a", "b"}
        assert not held_out & counted.keys()


@pytest.mark.parametrize("packing", ["concat", "wrap"])
def test_shares_are_exact_although_the_last_document_is_large(mixture, tmp_path: Path, packing: str) -> None:
    write_jsonl(tmp_path / "b.jsonl", ["b one two", "one two three " * 5000])
    data = prepare(mixture("large", "a.jsonl=0.9,b.jsonl=0.1", packing=packing))
    tokens = data.manifest.tokens_by_source["train"]
    by_name = {Path(source).stem: number for source, number in tokens.items()}
    assert by_name["b"] / sum(tokens.values()) == pytest.approx(0.1, abs=5e-4)
    assert data.manifest.counts["train"].tokens == sum(tokens.values())


def test_dropped_rows_show_in_the_shares_of_the_targets(mixture, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["a one two three " * 40] * 90)
    write_jsonl(tmp_path / "b.jsonl", ["b"] * 2000)  # too short for a row
    data = prepare(mixture("short", "a.jsonl=0.9,b.jsonl=0.1", packing="wrap", min_length=8))
    assert data.manifest.mixture is not None
    a, b = data.manifest.mixture
    assert b.used / (a.used + b.used) == pytest.approx(0.1, abs=5e-4)
    assert (a.row_tokens, b.row_tokens) == (data.manifest.counts["train"].row_tokens, 0)


def test_every_part_of_a_split_has_the_shares(mixture, tmp_path: Path) -> None:
    """Training validates on the first tokens of the validation split."""
    write_jsonl(tmp_path / "a.jsonl", ["a" * 30] * 3000)
    write_jsonl(tmp_path / "b.jsonl", ["b" * 30] * 3000)
    form = {"tokenizer": "char", "separator": "none", "validation_tokens": 8000}
    data = prepare(mixture("even", "a.jsonl=0.8,b.jsonl=0.2", **form))
    for split in ("train", "validation"):
        rows = data.rows(split).joined()[0].reshape(-1, 33)
        for part in np.array_split(rows, 4):
            share = (part == data.tokenizer.convert_tokens_to_ids("b")).mean()
            assert share == pytest.approx(0.2, abs=0.02)


def test_two_columns_of_a_file_and_the_validation_set_of_a_source(mixture, tmp_path: Path) -> None:
    rows = [{"one": text, "two": f"other {text}"} for text in numbered("a", 300, 9)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    sets = [f"two={tmp_path}/a.jsonl#two"]
    data = prepare(mixture("out", "a.jsonl#one=0.6,a.jsonl#two=0.4", validation_sets=sets, split="hash"))
    tokens = data.manifest.tokens_by_source
    one, two = tokens["train"].values()
    assert one / (one + two) == pytest.approx(0.6, abs=5e-4)
    assert tokens["validation_two"] == {f"{tmp_path}/a.jsonl#two": tokens["validation"][f"{tmp_path}/a.jsonl#two"]}


def test_a_tokenizer_is_trained_on_a_mixture_by_its_shares(mixture, tmp_path: Path, monkeypatch) -> None:
    """The training text is limited, so all of it could be the text of the first source."""
    monkeypatch.setattr(tokenizer_module, "TRAINING_BYTES", 30_000)
    for name, word in (("a", "alpha"), ("b", "bravo")):
        write_jsonl(tmp_path / f"{name}.jsonl", [f"{word} " * 50] * 200)
    seen: list[str] = []
    train_tokenizer = tokenizer_module.train_tokenizer

    def noted(texts: Iterable[str], size: int) -> Tokenizer:
        seen.extend(texts)
        return train_tokenizer(seen, size)

    monkeypatch.setattr(tokenizer_module, "train_tokenizer", noted)
    prepare(mixture("mixed", "a.jsonl=1,b.jsonl=9", tokenizer="train:300"))
    assert sum("bravo" in text for text in seen) / len(seen) == pytest.approx(0.9, abs=0.02)


@pytest.mark.parametrize(
    ("shares", "named"),
    [
        ("a.jsonl=0.5,b.jsonl", "b.jsonl"),
        ("a.jsonl=0,b.jsonl=1", "a.jsonl=0"),
        ("a.jsonl=0.5,b.jsonl=0.5x0", "x0"),
        ("a.jsonl=0.5,a.jsonl=0.5", "a.jsonl"),
        ("a.jsonl=0.5,*.jsonl=0.5", "a.jsonl"),
        ("a.jsonl=0.5,nowhere.jsonl=0.5", "nowhere"),
    ],
)
def test_mistakes_in_a_mixture_are_refused(mixture, tmp_path: Path, shares: str, named: str) -> None:
    with pytest.raises(UserError, match=named):
        prepare(mixture("wrong", shares))
    assert not list(tmp_path.glob("wrong*"))


def test_an_existing_file_is_not_a_mixture(arguments, tmp_path: Path) -> None:
    path = tmp_path / "a=0.jsonl=1"
    path.touch()
    assert not arguments("one", data_files=[], source=str(path)).mixture
    path.unlink()
    assert arguments("one", data_files=[], source=str(path)).mixture


def test_the_default_folder_is_named_after_the_sources(tmp_path: Path) -> None:
    folder = DataArguments(source="fineweb-10bt=0.7,own/*.jsonl#body=0.3x2").dataset_dir
    assert folder == "data/fineweb-10bt+own"


def test_a_changed_file_of_a_mixture_is_named(mixture, tmp_path: Path, caplog) -> None:
    prepare(mixture("out"))
    for changed in (False, True):
        if changed:
            write_jsonl(tmp_path / "b.jsonl", ["other"])
        prepare(mixture("out"))
        assert (f"{tmp_path}/b.jsonl changed" in caplog.text) == changed


def test_a_recipe_with_a_mixture_is_prepared_and_trained(
    tiny_recipe: Path, documents: list[str], tmp_path: Path, type_warm
) -> None:
    recipe = yaml.safe_load(tiny_recipe.read_text(encoding="utf-8"))
    for name, texts in (("web", documents[:80]), ("books", documents[80:])):
        write_jsonl(tmp_path / f"{name}.jsonl", texts)
    source = f"{tmp_path}/web.jsonl=0.75,{tmp_path}/books.jsonl=0.25"
    recipe["data"] |= {"source": source, "data_files": [], "dataset_dir": str(tmp_path / "mixed")}
    path = tmp_path / "mixed.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    done = type_warm("python", "prepare_data.py", path)
    assert done.returncode == 0, done.stderr
    tokens = PreparedData.read(tmp_path / "mixed").manifest.tokens_by_source["train"]
    assert tokens[f"{tmp_path}/web.jsonl"] / sum(tokens.values()) == pytest.approx(0.75, abs=5e-4)
    for number in tokens.values():
        assert f"{number:,} tokens" in done.stdout
    done = type_warm("python", "train.py", path, "--output_dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    card = (tmp_path / "run" / "final" / "README.md").read_text(encoding="utf-8")
    assert str(tmp_path) not in card and "web.jsonl" not in card
