"""Tokenizers without torch: fetch or train one, save it beside the data, and encode documents with it."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from gpt2_repro.errors import UserError


END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt")


def save_tokenizer(name: str, destination: Path, *, sequence_length: int) -> None:
    """Copy the tokenizer of a local folder or a Hub id to `destination`, so that AutoTokenizer loads it from there.

    Raises UserError where there is no such tokenizer, or none with a tokenizer.json.
    """
    destination.mkdir(parents=True, exist_ok=True)
    if Path(name).is_dir():
        found = [Path(name, file) for file in TOKENIZER_FILES if Path(name, file).is_file()]
    else:
        found = _download_tokenizer(name)
    for path in found:
        shutil.copyfile(path, destination / path.name)
    if not (destination / "tokenizer.json").is_file():
        raise UserError(f"{name} has no tokenizer.json: name a Hub id or a folder with a fast tokenizer, or train:N")
    _complete_config(destination, sequence_length)


def _download_tokenizer(name: str) -> list[Path]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, HTTPError, LocalEntryNotFoundError

    found = []
    for file in TOKENIZER_FILES:
        try:
            found.append(Path(hf_hub_download(name, file)))
        except (EntryNotFoundError, HTTPError, HFValidationError, OSError) as error:
            # Offline, a file that was never fetched and one that does not exist look alike: only the first must be.
            absent = isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError)
            if absent or found:
                continue
            raise UserError(
                f"the tokenizer {name} is no local folder and cannot be fetched ({str(error).strip().splitlines()[0]}): "
                "name a local folder with --tokenizer FOLDER"
            ) from None
    return found


def _complete_config(folder: Path, sequence_length: int) -> None:
    """Name a class and the end-of-text token where the tokenizer's own configuration leaves them out."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    config.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    config.setdefault("model_max_length", sequence_length)
    description = json.loads((folder / "tokenizer.json").read_text())
    special = [token["content"] for token in description.get("added_tokens", [])]
    if END_OF_TEXT in special:
        config.setdefault("bos_token", END_OF_TEXT)
        config.setdefault("eos_token", END_OF_TEXT)
    path.write_text(json.dumps(config, indent=2) + "\n")


def train_tokenizer(documents: Iterable[str], vocab_size: int, destination: Path, *, sequence_length: int) -> None:
    """Train a byte-level BPE of `vocab_size` ids, the last one end-of-text, and save it as save_tokenizer does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < 257:
        raise UserError(
            f"train:{vocab_size} is too small: a byte-level BPE needs 256 bytes and end-of-text, train:257"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.add_special_tokens([END_OF_TEXT])
    destination.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(destination / "tokenizer.json"))
    _complete_config(destination, sequence_length)


def expected_vocab_size(name: str) -> int | None:
    """How many ids a tokenizer will have, where its name alone tells."""
    if name == "openai-community/gpt2":
        return 50_257
    kind, _, size = name.partition(":")
    return int(size) if kind == "train" and size.isdigit() else None


def tokenizer_hash(folder: Path) -> str:
    """sha256 of the file that decides the ids."""
    return hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()


class Encoder:
    """Encodes documents to ids. Special tokens are known by id alone: text that spells one is encoded as text."""

    def __init__(self, folder: Path, *, separator: str) -> None:
        # Workers are processes, one a file; threads inside them would only compete.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tokenizers import Tokenizer

        description = json.loads((folder / "tokenizer.json").read_text())
        whole = Tokenizer.from_str(json.dumps(description))
        self.vocab_size = whole.get_vocab_size()
        self.dtype = np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)
        end = [] if separator == "none" else [_end_of_text_id(folder, whole)]
        self._before, self._after = (end, []) if separator == "before" else ([], end)
        self._tokenizer = Tokenizer.from_str(json.dumps({**description, "added_tokens": []}))

    def encode(self, documents: list[str]) -> list[np.ndarray]:
        """The ids of each document with its separator, each an array [length] of `dtype`; empty for an empty one."""
        encoded = []
        for document in self._tokenizer.encode_batch_fast(documents, add_special_tokens=False):
            ids = [*self._before, *document.ids, *self._after] if document.ids else []
            encoded.append(np.array(ids, dtype=self.dtype))
        return encoded


def _end_of_text_id(folder: Path, tokenizer: Any) -> int:
    token = json.loads((folder / "tokenizer_config.json").read_text()).get("eos_token", END_OF_TEXT)
    content = token["content"] if isinstance(token, dict) else token
    identifier = tokenizer.token_to_id(content)
    if identifier is None:
        raise UserError("the tokenizer has no end-of-text token to separate documents with: use --separator none")
    return identifier
