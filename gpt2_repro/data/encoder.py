"""Documents to ids: by fastokens where it is known to give the same ids, by `tokenizers` everywhere else."""

import functools
import importlib.util
import json
import logging
import os
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gpt2_repro.data.tokenizer import END_OF_TEXT
from gpt2_repro.errors import UserError


logger = logging.getLogger(__name__)

Engine = Literal["auto", "fastokens", "tokenizers"]


class Encoder:
    """Encodes documents to ids. Special tokens are known by id alone: text that spells one is encoded as text.

    Args:
        folder: a tokenizer as save_tokenizer leaves it.
        separator: where the end-of-text id goes: before or after each document, or none.
        engine: `auto` takes fastokens for byte-level BPE, 20 to 100 times as fast, and `tokenizers` otherwise.
    """

    def __init__(self, folder: Path, *, separator: str, engine: Engine = "auto") -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tokenizers import Tokenizer

        self._description = json.loads((folder / "tokenizer.json").read_text())
        vocabulary = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have gaps
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)
        self.separator = separator
        self.end_of_text = None if separator == "none" else _end_of_text_id(folder, vocabulary)
        added = self._description.get("added_tokens", [])
        self._description["added_tokens"] = [token for token in added if not token.get("special")]
        # What a tokenizer was saved with for batches of a model would cut documents short and fill them up.
        self._description |= {"truncation": None, "padding": None}
        wanted = engine != "tokenizers" and _is_byte_level_bpe(self._description, vocabulary)
        if engine == "fastokens" and not wanted:
            raise UserError("--encoder fastokens encodes byte-level BPE alone: use --encoder auto")
        self.engine = "fastokens" if wanted and _has_fastokens(needed=engine == "fastokens") else "tokenizers"

    @functools.cached_property
    def _fast(self) -> Any:
        # Workers are processes; threads inside them would only compete.
        os.environ.setdefault("RAYON_NUM_THREADS", "1")
        from fastokens import Tokenizer

        return Tokenizer.from_json_str(json.dumps(self._description))

    @functools.cached_property
    def _reference(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_str(json.dumps(self._description))

    def encode(self, documents: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of the documents with their separators one after another [tokens], and how many each has [documents].

        An empty document has none, and no separator.
        """
        ids, lengths = self._plain(documents)
        if self.end_of_text is None:
            return ids, lengths
        ends = np.cumsum(lengths)
        places = ends - lengths if self.separator == "before" else ends
        return np.insert(ids, places[lengths > 0], self.end_of_text), lengths + (lengths > 0)

    def encode_each(self, documents: list[str]) -> list[np.ndarray]:
        """The ids of each document with its separator, an array [length] each."""
        ids, lengths = self.encode(documents)
        return np.split(ids, np.cumsum(lengths))[:-1]

    def check(self, documents: list[str], source: str) -> None:
        """Raise UserError if the engine gives a document, or the beginning of a long one, other ids than `tokenizers`."""
        for text in (document[:50_000] for document in documents if self.engine != "tokenizers"):
            if self._plain([text])[0].tolist() != self._reference.encode(text, add_special_tokens=False).ids:
                raise UserError(f"{self.engine} encodes {text[:40]!r} of {source} wrongly: pass --encoder tokenizers")

    def _plain(self, documents: list[str]) -> tuple[np.ndarray, np.ndarray]:
        if self.engine == "fastokens":
            content, ends = self._fast.encode_batch_flat(documents)
            offsets = np.frombuffer(ends, np.uint64).astype(np.int64)
            return np.frombuffer(content, np.uint32).astype(self.dtype), np.diff(offsets)
        try:
            encoded = self._reference.encode_batch_fast(documents, add_special_tokens=False)
        except Exception as error:  # `tokenizers` raises nothing narrower
            raise UserError(f"the tokenizer cannot encode this text ({error}): use another --tokenizer") from None
        arrays = [np.array(document.ids, dtype=self.dtype) for document in encoded]
        return np.concatenate([np.empty(0, self.dtype), *arrays]), np.array([len(array) for array in arrays], int)


def _is_byte_level_bpe(description: dict[str, Any], vocabulary: dict[str, int]) -> bool:
    """Whether a tokenizer is of the form for which fastokens was seen to give the ids of `tokenizers`."""
    step = description.get("pre_tokenizer") or {}
    plain = description.get("normalizer") is None and not description["added_tokens"]
    plain = plain and len(vocabulary) == max(vocabulary.values()) + 1  # ids with gaps it does not load
    byte_level = step.get("type") == "ByteLevel" and not step.get("add_prefix_space")
    return description["model"].get("type") == "BPE" and byte_level and plain


def _has_fastokens(*, needed: bool) -> bool:
    if importlib.util.find_spec("fastokens"):
        return True
    if needed:
        raise UserError("fastokens is not installed: pip install -r requirements.txt, or use --encoder auto")
    logger.warning("fastokens is not installed: `tokenizers` encodes, at a fraction of the speed")
    return False


def _end_of_text_id(folder: Path, vocabulary: dict[str, int]) -> int:
    token = json.loads((folder / "tokenizer_config.json").read_text()).get("eos_token", END_OF_TEXT)
    content = token["content"] if isinstance(token, dict) else token
    if content not in vocabulary:
        raise UserError("the tokenizer has no end-of-text token to separate documents with: use --separator none")
    return vocabulary[content]
