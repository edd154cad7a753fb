"""Tokenize one part of a source file, and write the result to temporary files."""

import functools
import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from gpt2_repro.data.arguments import DataArguments, PreparationOptions
from gpt2_repro.data.sources.base import Part
from gpt2_repro.data.sources.token_files import TokenPart, map_ids
from gpt2_repro.data.tokenizer import Encoder, Engine
from gpt2_repro.errors import UserError
from gpt2_repro.files import sync, write_whole


EXAMPLES = 3  # number of bad documents that the manifest quotes
CHECKED = 1000  # one document in CHECKED is encoded a second time, with `tokenizers`


class StagedPart:
    """Temporary files with the tokens of one part of a source file."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name

    def path(self, ending: str) -> Path:
        return self.folder / f"{self.name}{ending}"

    def exists(self) -> bool:
        return self.path(".json").is_file()

    @functools.cached_property
    def facts(self) -> dict[str, Any]:
        """The content of the .json file that describes one part of a source file.

        The counts are `tokens`, `documents`, `text_bytes`, `longest` (tokens of the longest document) and `bad`
        (unreadable rows). `bad_examples` has error messages. `ids` is the location of the token ids.
        """
        return json.loads(self.path(".json").read_text(encoding="utf-8"))

    def ids(self) -> np.ndarray:
        """Return the part's token ids as a memory-mapped array of shape [tokens]."""
        where = self.facts["ids"]
        path = self.path(".ids") if where["path"] is None else Path(where["path"])
        return map_ids(path, where["offset"], self.facts["tokens"], np.dtype(where["dtype"]))

    def lengths(self) -> np.ndarray:
        """Return an array of shape [documents]: tokens per document, with separators."""
        return np.load(self.path(".lengths.npy")).astype(np.int64)

    def held_out(self) -> np.ndarray:
        """Return which documents --split hash holds out: a bool array of shape [documents]."""
        return np.load(self.path(".held_out.npy"))

    def texts(self) -> dict[int, str]:
        """Return the saved texts of documents, by their number in the part (from 0)."""
        with self.path(".jsonl").open(encoding="utf-8") as lines:
            return dict(map(json.loads, lines))

    def drop_texts(self) -> None:
        self.path(".jsonl").unlink(missing_ok=True)

    def complete(self, facts: dict[str, Any], lengths: np.ndarray, held_out: np.ndarray) -> None:
        for ending, array in ((".lengths.npy", lengths.astype(np.uint32)), (".held_out.npy", held_out)):
            # np.save to a real file would report a full disk as an error without errno.
            content = io.BytesIO()
            np.save(content, array)
            self.path(ending).write_bytes(content.getbuffer())
            sync(self.path(ending))
        facts |= {"documents": len(lengths), "longest": int(lengths.max(initial=0))}
        write_whole(self.path(".json"), json.dumps(facts))  # written last: marks the part as complete


def is_held_out(document: str, args: DataArguments) -> bool:
    """Return whether --split hash puts a document into validation."""
    digest = hashlib.blake2b(document.encode(), digest_size=8, key=args.split_seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") < args.validation_fraction * 2**64


@functools.lru_cache(maxsize=1)
def _encoder(folder: Path, changed: int, separator: str, engine: Engine) -> Encoder:
    return Encoder(folder, separator=separator, engine=engine)


def stage_part(
    part: Part,
    staged: StagedPart,
    *,
    tokenizer: Path,
    args: DataArguments,
    options: PreparationOptions,
    limit: int,
    keep_texts: bool,
) -> None:
    """Tokenize one part of a source file, and write the temporary files `staged`.

    Args:
        limit: stop after this many tokens of the part (0: no limit).
        keep_texts: whether to save the texts of documents that can be in the split `validation`.
    """
    encoder = _encoder(tokenizer, (tokenizer / "tokenizer.json").stat().st_mtime_ns, args.separator, options.encoder)
    facts: dict[str, Any] = {"tokens": 0, "text_bytes": 0, "bad": 0, "bad_examples": []}
    if isinstance(part, TokenPart):
        part.check(encoder.vocab_size)
        where = {"path": str(Path(part.name).resolve()), "offset": part.offset, "dtype": "uint16"}
        lengths = part.lengths(encoder.end_of_text, args.separator)
        return staged.complete(facts | {"tokens": part.tokens, "ids": where}, lengths, np.zeros(len(lengths), bool))

    lengths_of_batches, held_out = [np.empty(0, np.int64)], [np.empty(0, bool)]
    documents = 0
    partial = staged.path(f".{os.getpid()}.partial")
    try:
        with partial.open("wb") as file, staged.path(".jsonl").open("w", encoding="utf-8") as texts:
            for batch in part.read():
                facts["bad"] += len(batch.bad)
                facts["bad_examples"] += batch.bad[: EXAMPLES - len(facts["bad_examples"])]
                check_bad(facts["bad"], facts["bad_examples"], options.max_bad_documents)
                encoder.check(batch.documents[-documents % CHECKED :: CHECKED], part.name)
                ids, lengths = encoder.encode(batch.documents)
                file.write(ids.tobytes())
                held_out.append(_held_out(batch.documents, facts["tokens"] + np.cumsum(lengths) - lengths, args))
                if keep_texts:
                    for place in np.flatnonzero(held_out[-1]).tolist():
                        texts.write(json.dumps([documents + place, batch.documents[place]]) + "\n")
                lengths_of_batches.append(lengths)
                documents += len(lengths)
                facts["tokens"] += len(ids)
                facts["text_bytes"] += sum(len(text.encode()) for text in batch.documents)
                if limit and facts["tokens"] >= limit:
                    break
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if not keep_texts:
        staged.drop_texts()
    sync(partial)
    partial.replace(staged.path(".ids"))
    facts["ids"] = {"path": None, "offset": 0, "dtype": encoder.dtype.name}
    staged.complete(facts, np.concatenate(lengths_of_batches), np.concatenate(held_out))


def _held_out(documents: list[str], starts: np.ndarray, args: DataArguments) -> np.ndarray:
    """Return a bool array of shape [documents]: which documents can be in validation.

    `starts` has the number of tokens before each document in the file part.
    """
    if args.split == "hash":
        return np.array([is_held_out(text, args) for text in documents], bool)
    # With --split head, earlier file parts are not counted, so the result is used only to choose the texts to save.
    return starts < (args.validation_tokens if args.split == "head" else np.inf)


def check_bad(bad: int, examples: list[str], allowed: int) -> None:
    """Raise UserError if more rows are unreadable than --max_bad_documents allows."""
    if bad > allowed:
        more = f"More than {allowed:,} files or rows cannot be read. The first: " if allowed else ""
        fix = f"To skip files and rows that cannot be read, pass --max_bad_documents {max(100, 10 * allowed)}."
        raise UserError(f"{more}{examples[0]}. {fix}")
