"""Tokenizers without torch: fetch one, train one or count the characters, save it beside the data, encode with it."""

import functools
import importlib.util
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gpt2_repro.errors import UserError
from gpt2_repro.hub import check_hub, hub_reason


logger = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
Engine = Literal["auto", "fastokens", "tokenizers"]
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
        raise UserError(
            f"{name} has no tokenizer.json. Pass a --tokenizer that has one, or train, train:4096 or char."
        )
    try:
        Tokenizer.from_file(str(destination / "tokenizer.json"))
        _complete_config(destination, sequence_length)
    except Exception as error:  # `tokenizers` raises nothing narrower
        line = " ".join(str(error).split())[:200]
        raise UserError(f"the tokenizer {name} cannot be read ({line}): name another --tokenizer") from None


def _download_tokenizer(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError

    check_hub()
    try:
        return Path(snapshot_download(name, allow_patterns=TOKENIZER_FILES))
    except (HTTPError, HFValidationError, OSError) as error:
        fix = "Pass a folder as --tokenizer, or --tokenizer train for a BPE of your own text."
        raise UserError(f"The tokenizer {name} cannot be fetched from the Hub ({hub_reason(error)}). {fix}") from None


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
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
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
    name: str,
    destination: Path,
    documents: Callable[[], Iterable[str]],
    *,
    sequence_length: int,
    text_bytes: Callable[[], float],
) -> None:
    """Fetch, train or count the tokenizer `name` and save it, whole or not at all.

    Args:
        documents: training text, for a tokenizer that is made of it.
        text_bytes: size of that text, for the size of its vocabulary if the name has none.
    """
    if destination.is_dir():
        return
    partial = destination.with_name(f"{destination.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    kind, _, size = name.partition(":")
    if kind == "train":
        size = size or str(vocabulary_for(text_bytes()))
        if not size.isdecimal():
            raise UserError(f"the tokenizer {name} needs a number of ids, as in train:4096")
        logger.info("training a tokenizer of %s ids", size)
        train_tokenizer(_beginning(documents()), int(size), partial, sequence_length=sequence_length)
    elif name == "char":
        count_characters(documents(), partial, sequence_length=sequence_length)
    else:
        save_tokenizer(name, partial, sequence_length=sequence_length)
    partial.rename(destination)


def vocabulary_for(text_bytes: float) -> int:
    """Return the size of a vocabulary for a text: a power of two, an id for 400 bytes or more, 512 to 32,768."""
    return 1 << min(15, max(9, int(text_bytes / 400).bit_length() - 1))


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
