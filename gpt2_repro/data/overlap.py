"""How much of local evaluation files a model has trained on: their n-grams of 13 tokens, looked for in the rows.

13 tokens are the span that GPT-3 was cleaned by (Brown et al. 2020, appendix C, there in words); GPT-2's authors took 8
(Radford et al. 2019, section 4). A text's first n-grams may be missed where the tokenizer gives its first word another
id inside a longer text.
"""

import dataclasses
import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.data.rows import Block, open_rows
from gpt2_repro.data.tokenizer import Encoder
from gpt2_repro.errors import UserError
from gpt2_repro.files import read_json_lines, sha256_of, write_whole
from gpt2_repro.manifest import MANIFEST, FileOverlap


N = 13  # tokens
SHOWN_ITEMS = 10
ENDINGS = (".txt", ".jsonl", ".txt.gz", ".jsonl.gz")

# Odd constants of 64 bits without meaning, the fractions of the golden ratio and of the square root of 3.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_BASE = 0xBB67AE8584CAA73B
_STEP = 2**15  # tokens hashed at once: the arrays stay in a core's cache
# Of the bit table: 8 MiB for a million n-grams, 32 MiB at most.
_BYTES_PER_NGRAM, _MIN_BYTES, _MAX_BYTES = 2**4, 2**10, 2**25
# Three bits of a byte, for each last byte of a hash.
_MASKS = np.resize([sum(1 << bit for bit in bits) for bits in itertools.combinations(range(8), 3)], 256).astype(
    np.uint8
)


def evaluation_texts(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The items of an evaluation file, each with its number and its texts.

    A .txt file is one item, number 1. Each line of a .jsonl file that is not blank is an item, numbered as the line:
    its texts are all strings among its values, those in lists and objects inside it too.
    Raises UserError, with file and line, for what cannot be read.
    """
    if not path.name.endswith(ENDINGS):
        raise UserError(f"{path} is no evaluation file: name .txt or .jsonl files (each may end in .gz)")
    if not path.name.removesuffix(".gz").endswith(".txt"):
        for number, value in read_json_lines(path):
            yield number, list(_strings(value))
        return
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield 1, [file.read().decode("utf-8")]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from None


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def check_files(paths: Sequence[str]) -> None:
    """Raise UserError for an evaluation file that is missing or cannot be read, before anything takes long."""
    for path in paths:
        if next(evaluation_texts(Path(path)), None) is None:
            raise UserError(f"{path} holds no item: leave it out")


def check_overlap(data: PreparedData, paths: Sequence[str]) -> PreparedData:
    """Look for the n-grams of evaluation files in the training rows, and write the result into the manifest."""
    encoder = Encoder(data.path / "tokenizer", separator="none")
    blocks = tqdm(list(open_rows(data.path / "train").blocks()), desc="overlap", unit="block")
    row_length = data.manifest.form.sequence_length + 1
    found = find_overlap([Path(path) for path in paths], encoder.encode_each, blocks, row_length=row_length)
    manifest = dataclasses.replace(data.manifest, overlap=found)
    write_whole(data.path / MANIFEST, json.dumps(manifest.to_json(), indent=2) + "\n")
    return PreparedData(data.path, manifest)


def find_overlap(
    paths: Sequence[Path], encode: Callable[[list[str]], list[np.ndarray]], blocks: Iterable[Block], *, row_length: int
) -> list[FileOverlap]:
    """How many items and different n-grams of each evaluation file the rows of a split hold.

    A row is read on into the next one where it is full and its last id is the first id there, for that is the same
    token: with packing concat the whole stream, with packing wrap a document. Nothing in the rows tells two wrapped
    documents apart of which the first ends with a full row and the second begins with that row's last id; with
    separator before there are none.

    Args:
        encode: gives the ids of each text [tokens], without separators.
        blocks: all rows in order: ids one after another [ids], and the length of each row [rows].
        row_length: ids of a full row, sequence_length + 1.

    Raises UserError for a file that cannot be read.
    """
    files = [_read(path, encode) for path in paths]
    known = np.unique(np.concatenate([np.empty(0, np.uint64), *(file.hashes for file in files)]))
    found = known[_are_in(blocks, known, row_length)]
    return [_describe(file, found) for file in files]


@dataclasses.dataclass(frozen=True)
class _File:
    path: Path
    numbers: np.ndarray  # [items], as evaluation_texts gives them
    items: np.ndarray  # [n-grams], place of the item among the file's
    hashes: np.ndarray  # [n-grams]


def _read(path: Path, encode: Callable[[list[str]], list[np.ndarray]]) -> _File:
    numbers: list[int] = []
    hashes, items = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
    for place, (number, texts) in enumerate(evaluation_texts(path)):
        numbers.append(number)
        for ids in encode(texts) if texts else []:
            hashes.append(ngram_hashes(ids))
            items.append(np.full(len(hashes[-1]), place))
    return _File(path, np.array(numbers), np.concatenate(items), np.concatenate(hashes))


def _are_in(blocks: Iterable[Block], known: np.ndarray, row_length: int) -> np.ndarray:
    """Which of the known hashes, sorted, are those of n-grams of the rows [known].

    Looking for 1,000,000 of them took 14 to 24 ns a token on one core of a shared AMD EPYC, 2026-11-21, which makes
    2 to 4 minutes of 10B tokens; the process had 166 MB then.
    """

    def slots_and_masks(hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return (hashes >> shift).view(np.int64), _MASKS.take(hashes.astype(np.uint8))

    # The first bits of a known hash name a byte, its last byte three bits that are set there. Of a thousand other
    # hashes about two find all three set: nearly all n-grams of the rows end there.
    size = min(_MAX_BYTES, max(_MIN_BYTES, _BYTES_PER_NGRAM * len(known)))
    shift = np.uint64(64 - (size.bit_length() - 1))
    table = np.zeros(2 ** (64 - int(shift)), np.uint8)
    np.bitwise_or.at(table, *slots_and_masks(known))
    found = np.zeros(len(known), bool)
    for ids, starts in _joined(blocks, row_length):
        for first in range(0, len(ids) - N + 1, _STEP):
            hashes = ngram_hashes(ids[first : first + _STEP + N - 1])
            slots, masks = slots_and_masks(hashes)
            likely = np.flatnonzero(table.take(slots) & masks == masks)
            places = np.minimum(np.searchsorted(known, hashes[likely]), len(known) - 1)
            hit = known[places] == hashes[likely]
            places, likely = places[hit], likely[hit] + first
            # Ids in front of the next start belong together.
            next_start = np.searchsorted(starts, likely, side="right")
            found[places[starts[next_start] >= likely + N]] = True
    return found


def ngram_hashes(ids: np.ndarray) -> np.ndarray:
    """A hash of every N consecutive ids, as uint64 [ids - N + 1].

    A polynomial modulo 2**64 over spread ids, put together from the hashes of 1, 3, 6, 12 and 13 ids. Between a million
    n-grams and 10 billion others 1e10 * 1e6 / 2**64 = 0.0005 hashes agree by chance.
    """
    if len(ids) < N:
        return np.empty(0, np.uint64)
    single = ids.astype(np.uint64)
    single *= _SPREAD
    single ^= single >> np.uint64(32)
    hashes, length = single, 1
    for bit in f"{N:b}"[1:]:
        hashes = hashes[:-length] * np.uint64(pow(_BASE, length, 2**64)) + hashes[length:]
        length *= 2
        if bit == "1":
            hashes = hashes[:-1] * np.uint64(_BASE) + single[length:]
            length += 1
    return hashes


def _joined(blocks: Iterable[Block], row_length: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows joined where they continue each other, a block at a time, behind the last N - 1 ids of those before it.

    Yields ids [ids], and the places where an id does not follow the one before it, the end among them [starts + 1].
    """
    ids, starts = np.empty(0, np.uint16), np.empty(0, np.int64)
    last = -1  # last id of the block before, if its row is full
    for block, lengths in blocks:
        if not len(lengths):
            continue
        ends = np.cumsum(lengths)
        firsts = ends - lengths
        continues = np.empty(len(lengths), bool)
        continues[0] = block[0] == last
        continues[1:] = (lengths[:-1] == row_length) & (block[firsts[1:]] == block[ends[:-1] - 1])
        last = int(block[-1]) if lengths[-1] == row_length else -1
        kept = np.ones(len(block), bool)
        kept[firsts[continues]] = False
        # Every row that continues another has lost an id in front of the rows behind it.
        new = (firsts - np.cumsum(continues))[~continues]
        starts = np.concatenate([starts, len(ids) + new, [len(ids) + len(block) - continues.sum()]])
        ids = np.concatenate([ids, block[kept]])
        yield ids, starts
        held = min(len(ids), N - 1)
        starts = starts[:-1] - (len(ids) - held)
        ids, starts = ids[len(ids) - held :], starts[starts > 0]


def _describe(file: _File, found: np.ndarray) -> FileOverlap:
    hits = np.isin(file.hashes, found)
    overlapping = file.numbers[np.unique(file.items[hits])]
    return FileOverlap(
        file=file.path.name,
        sha256=sha256_of(file.path),
        n=N,
        items=len(file.numbers),
        items_too_short=len(file.numbers) - len(np.unique(file.items)),
        items_with_overlap=len(overlapping),
        first_items_with_overlap=overlapping[:SHOWN_ITEMS].tolist(),
        ngrams=len(np.unique(file.hashes)),
        ngrams_found=len(np.unique(file.hashes[hits])),
    )
