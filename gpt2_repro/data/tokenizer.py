"""Tokenizers without torch: fetch one, train one or count the characters, and save it beside the data."""

import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from gpt2_repro.errors import UserError


logger = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
# A trainer holds every different word: beyond this much text it learns little and takes gigabytes.
TRAINING_BYTES = 500_000_000
TOKENIZER_FILES = ["tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"]


def save_tokenizer(name: str, destination: Path, *, sequence_length: int) -> None:
    """Copy the tokenizer of a local folder or a Hub id to `destination`, so that AutoTokenizer loads it from there.

    Raises UserError where there is no such tokenizer, or none with a tokenizer.json.
    """
    from tokenizers import Tokenizer

    destination.mkdir(parents=True, exist_ok=True)
    source = Path(name) if Path(name).is_dir() else _download_tokenizer(name)
    for file in TOKENIZER_FILES:
        if (source / file).is_file():
            shutil.copyfile(source / file, destination / file)
    if not (destination / "tokenizer.json").is_file():
        raise UserError(f"{name} has no tokenizer.json: pass a --tokenizer that has one, train:N or char")
    try:
        Tokenizer.from_file(str(destination / "tokenizer.json"))
        _complete_config(destination, sequence_length)
    except Exception as error:  # `tokenizers` raises nothing narrower
        line = " ".join(str(error).split())[:200]
        raise UserError(f"the tokenizer {name} cannot be read ({line}): name another --tokenizer") from None


def _download_tokenizer(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError

    try:
        return Path(snapshot_download(name, allow_patterns=TOKENIZER_FILES))
    except (HTTPError, HFValidationError, OSError) as error:
        line = str(error).strip().splitlines()[0]
        raise UserError(f"the tokenizer {name} cannot be fetched ({line}): pass --tokenizer FOLDER") from None


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
        raise UserError(f"train:{vocab_size} is too small: 256 bytes and end-of-text need train:257")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.add_special_tokens([END_OF_TEXT])
    _save(tokenizer, destination, sequence_length)


def count_characters(documents: Iterable[str], destination: Path, *, sequence_length: int) -> None:
    """Save a tokenizer whose ids are the characters of the documents in their order, as nanoGPT's shakespeare_char.

    It knows no other character and has no end-of-text.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    characters = sorted(set().union(*map(set, documents)))
    if not characters:
        raise UserError("the source holds no text: there are no characters to count")
    tokenizer = Tokenizer(models.WordLevel({character: place for place, character in enumerate(characters)}, ""))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    _save(tokenizer, destination, sequence_length)


def _save(tokenizer: Any, destination: Path, sequence_length: int) -> None:
    destination.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(destination / "tokenizer.json"))
    _complete_config(destination, sequence_length)


def obtain_tokenizer(
    name: str, destination: Path, documents: Callable[[], Iterable[str]], *, sequence_length: int
) -> None:
    """Fetch, train or count the tokenizer `name` and save it, whole or not at all.

    Args:
        documents: training text, for a tokenizer that is made of it.
    """
    if destination.is_dir():
        return
    partial = destination.with_name(f"{destination.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    kind, _, size = name.partition(":")
    if kind == "train":
        if not size.isdecimal():
            raise UserError(f"the tokenizer {name} needs a number of ids, as in train:4096")
        logger.info("training a tokenizer of %s ids", size)
        train_tokenizer(_beginning(documents()), int(size), partial, sequence_length=sequence_length)
    elif name == "char":
        count_characters(documents(), partial, sequence_length=sequence_length)
    else:
        save_tokenizer(name, partial, sequence_length=sequence_length)
    partial.rename(destination)


def _beginning(documents: Iterable[str]) -> Iterator[str]:
    characters = 0
    for document in documents:
        yield document
        characters += len(document)
        if characters >= TRAINING_BYTES:
            logger.info("the tokenizer is trained on the first %.0f MB of the text", TRAINING_BYTES / 1e6)
            return


def expected_vocab_size(name: str) -> int | None:
    """How many ids a tokenizer will have, where its name alone tells."""
    if name == "openai-community/gpt2":
        return 50_257
    kind, _, size = name.partition(":")
    return int(size) if kind == "train" and size.isdecimal() else None
