"""The order of documents and their split against a naive version; tokens in are tokens out and counted losses."""

import random

import numpy as np

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.preparation.order import runs
from gpt2_repro.data.preparation.staged import is_held_out


class FakePart:
    def __init__(self, lengths: list[int], held_out: list[bool]) -> None:
        self._lengths, self._held_out = lengths, held_out

    def lengths(self) -> np.ndarray:
        return np.array(self._lengths, np.int64)

    def held_out(self) -> np.ndarray:
        return np.array(self._held_out, bool)


def some_streams(source: random.Random, number: int) -> list[list[FakePart]]:
    streams = []
    for _ in range(number):
        sizes = [source.randint(0, 6) for _ in range(source.randint(1, 5))]
        lengths = [[source.choice([0, 1, 2, 5, 17, 40]) for _ in range(size)] for size in sizes]
        streams.append([FakePart(of, [source.random() < 0.3 for _ in of]) for of in lengths])
    return streams


def test_a_mixture_takes_each_stream_in_its_share(seed: int) -> None:
    source = random.Random(seed)
    streams = some_streams(source, source.choice([2, 3]))
    weights = np.array([source.randint(1, 5) for _ in streams], float)
    weights /= weights.sum()
    below = min(sum(sum(p._lengths) for p in stream) / w for stream, w in zip(streams, weights, strict=True))
    documents = []
    for number, (stream, weight) in enumerate(zip(streams, weights, strict=True)):
        before = 0
        for part_number, part in enumerate(stream):
            for document, length in enumerate(part._lengths):
                if before / weight < below:
                    documents.append((before / weight, number, part_number, document, length))
                before += length
    head = source.choice([None, 0.0, 20.0])
    found = [
        (run.stream, run.part, run.first_document + place, int(length), run.split)
        for run in runs(streams, weights, ["validation", "train"], head=head, below=below)
        for place, length in enumerate(run.lengths)
    ]
    start = {tuple(where[:3]): place for place, *where in documents}
    for stream, part, document, _, split in found:
        held_out = streams[stream][part].held_out()[document] if head is None else start[stream, part, document] < head
        assert split == ("validation" if held_out else "train")
    assert sorted(entry[:4] for entry in found) == sorted(tuple(where) for _, *where in documents)
    places = [start[entry[:3]] for entry in found]
    assert places == sorted(places)
    # Wherever one stops, each stream's share is its weight, but for the document that is being read.
    taken = np.zeros(len(streams))
    for stream, _, _, length, _ in found:
        taken[stream] += length
        spread = taken / weights
        assert spread.max() - spread.min() <= (80 / weights).max()


def test_the_hash_holds_out_its_fraction_by_the_text_and_the_seed() -> None:
    held_out = []
    for seed in (0, 1):
        args = DataArguments(source="embedded", split="hash", validation_fraction=0.2, split_seed=seed)
        held_out.append({number for number in range(2000) if is_held_out(f"document {number}", args)})
    assert all(320 < len(numbers) < 480 for numbers in held_out)
    assert len(held_out[0] & held_out[1]) < 160
