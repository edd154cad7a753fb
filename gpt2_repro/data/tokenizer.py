"""Fetch, train and save tokenizers, and encode documents as token ids."""

import dataclasses
import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.errors import UserError, in_a_line
from gpt2_repro.files import write_whole
from gpt2_repro.hub import check_hub
from gpt2_repro.run_record.layout import FINAL
from gpt2_repro.tokenization import CONFIG, END_OF_TEXT, for_rows, read_files, separator_token, without_special_tokens


if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

# A tokenizer is trained on the beginning of the text: at most TRAINING_BYTES of UTF-8, with at most DISTINCT_BYTES of
# distinct words. The trainer needs about 110 bytes of memory for each byte of a distinct word. English prose of 38 MB
# has 0.6 MB of distinct words. In a language without spaces nearly every sentence is a distinct word.
TRAINING_BYTES = 500_000_000
DISTINCT_BYTES = 12_000_000
WORD = re.compile(r"\w+|[^\w\s]+")  # about as the trainer divides the text
PIECE = 2**20  # characters of a long document that the trainer reads at a time
# The trainer ends a word before such a character, so the words of two pieces are those of the whole text.
END_OF_WORD = re.compile(r"(?<=\S)[ \n]")
LONGEST_WORD = 1000  # characters; a word has either no white space or only white space
# Unlike Python, the trainer does not count \x1c to \x1f as white space.
LONG_WORD = re.compile(rf"[\S\x1c-\x1f]{{{LONGEST_WORD}}}|\s{{{LONGEST_WORD}}}")
TOKENIZER_FILES = ["tokenizer.json", CONFIG, "special_tokens_map.json"]


def copy_tokenizer(name: str, destination: Path) -> None:
    """Copy the files of a tokenizer from the Hub, its folder, a run or a prepared folder."""
    source = _local_folder(name) or _download(name)
    for file in TOKENIZER_FILES:
        if (source / file).is_file():
            shutil.copyfile(source / file, destination / file)
    if not (destination / "tokenizer.json").is_file():
        raise UserError(f"{name} has no tokenizer.json. Pass another --tokenizer, such as train or char.")


def _local_folder(name: str) -> Path | None:
    """Return the folder with the tokenizer of a run or a prepared folder, another folder, or None."""
    for folder in (Path(name, FINAL), Path(name, "tokenizer"), Path(name)):
        if folder.is_dir():
            return folder
    return None


def _download(name: str) -> Path:
    """Download the files of a tokenizer from the Hub."""
    from huggingface_hub import snapshot_download

    from gpt2_repro.data.sources.hub import hub_errors

    check_hub()
    fix = "Pass a local folder as --tokenizer, train (train a BPE) or char (one id per character)."
    with hub_errors(f"fetch the tokenizer {name}, which is not a local folder,", fix):
        return Path(snapshot_download(name, allow_patterns=TOKENIZER_FILES))


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> "Tokenizer":
    """Train a byte-level BPE. The last of its ids is the end-of-text token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def count_characters(documents: Iterable[str]) -> "Tokenizer":
    """Return a tokenizer with one id per character of the documents, and no end-of-text id.

    The ids follow the sorted order of the characters, as in nanoGPT's shakespeare_char.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    found: set[str] = set()
    for document in documents:
        found.update(document)
    characters = sorted(found)
    if not characters:
        raise UserError("--tokenizer char found no text in the source.")
    vocabulary: dict[str, int] = {}
    for number, character in enumerate(characters):
        vocabulary[character] = number
    tokenizer = Tokenizer(models.WordLevel(vocabulary, ""))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def number_tokenizer(vocab_size: int) -> "Tokenizer":
    """Return a tokenizer for ids without text: the text of an id is its number, and a prompt is "17 4 4"."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {str(number): number for number in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, ""))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def obtain_tokenizer(args: DataArguments, folder: Path, texts: Callable[[], Iterable[str]], text_bytes: float) -> None:
    """Save the tokenizer of --tokenizer to `folder` as the rows need it (see `for_rows`), unless that folder exists.

    `texts` returns the training text of about `text_bytes` bytes, for `train`, `train:SIZE` and `char`.
    """
    if folder.is_dir():
        return
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    name = args.tokenizer
    file = partial / "tokenizer.json"
    tokenizer = _make_tokenizer(name, texts, text_bytes)
    if tokenizer is None:
        copy_tokenizer(name, partial)
    else:
        tokenizer.save(str(file))
    try:
        description, config = for_rows(partial, separator=args.separator)
    except Exception as error:  # `tokenizers` raises plain Exception
        raise UserError(f"The tokenizer {name} is invalid ({in_a_line(error)}). Pass another --tokenizer.") from None
    saved_description, _ = read_files(partial)
    if description != saved_description:
        write_whole(file, json.dumps(description, ensure_ascii=False))
    config = {"model_max_length": args.sequence_length} | config
    write_whole(partial / CONFIG, json.dumps(config, indent=2) + "\n")
    partial.rename(folder)


def _make_tokenizer(name: str, texts: Callable[[], Iterable[str]], text_bytes: float) -> "Tokenizer | None":
    """Return the tokenizer for `train`, `train:SIZE`, `none:SIZE` and `char`, or None for other names."""
    if name == "char":
        return count_characters(texts())
    kind, _, size = name.partition(":")
    if kind == "train":
        if not size:
            size = str(_suitable_vocab_size(text_bytes))
        if not size.isdecimal() or int(size) < 257:
            raise UserError(f"--tokenizer {name} must end with a number from 257 (256 bytes and end-of-text).")
        logger.info("training a BPE tokenizer with at most %s ids", size)
        pieces = training_text(texts())
        return train_tokenizer(pieces, int(size))
    if kind == "none":
        if not size.isdecimal() or int(size) < 2:
            raise UserError(f"--tokenizer {name} must end with the number of ids, such as none:512.")
        return number_tokenizer(int(size))
    return None


def _suitable_vocab_size(text_bytes: float) -> int:
    """Return the largest power of two from 512 to 32,768 with at least 400 bytes of text per id."""
    vocab_size = 32_768
    while vocab_size > 512 and text_bytes < 400 * vocab_size:
        vocab_size //= 2
    return vocab_size


def training_text(documents: Iterable[str]) -> Iterator[str]:
    """Yield the beginning of the text, in pieces whose words and number of bytes are bounded."""
    words: set[str] = set()
    text_bytes = 0
    distinct_bytes = 0
    pieces = map(_pieces, documents)
    for piece in itertools.chain.from_iterable(pieces):
        yield piece
        text_bytes += len(piece.encode())
        new = set(WORD.findall(piece)) - words
        words |= new
        distinct_bytes += len("".join(new).encode())
        if text_bytes >= TRAINING_BYTES or distinct_bytes >= DISTINCT_BYTES:
            logger.info("the tokenizer is trained on only the first %.0f MB of the text", text_bytes / 1e6)
            break
    logger.info("learning the tokens from %s distinct words", f"{len(words):,}")


def _pieces(document: str) -> Iterator[str]:
    """Divide a document into pieces of about PIECE characters, or of LONGEST_WORD if one of its words is longer."""
    start = 0
    while start < len(document):
        stop = len(document)
        end = END_OF_WORD.search(document, start + PIECE)
        if end:
            stop = end.start()
        piece = document[start:stop]
        # The training time grows with the square of the length of a word.
        if LONG_WORD.search(piece):
            for at in range(0, len(piece), LONGEST_WORD):
                yield piece[at : at + LONGEST_WORD]
        else:
            yield piece
        start = stop


def expected_vocab_size(name: str) -> int | None:
    """Return the vocabulary size, or None if the name does not determine it."""
    if name == "openai-community/gpt2":
        return 50_257
    kind, _, size = name.partition(":")
    if kind in ("train", "none") and size.isdecimal():
        return int(size)
    return None


@dataclasses.dataclass(frozen=True)
class RoundTrip:
    """A text after it was encoded and decoded."""

    text: str
    tokens: int
    unknown: int  # tokens for unknown text


class Encoder:
    """Encode documents as token ids, and add separators between documents.

    Special tokens in the text of a document, such as "<|endoftext|>", are encoded as ordinary text.

    Args:
        folder: tokenizer folder that obtain_tokenizer wrote.
        separator: position of the end-of-text id: `before` or `after` each document, or `none`.
        engine: library that encodes. `auto` uses fastokens for byte-level BPE, and `tokenizers` otherwise.
    """

    def __init__(self, folder: Path, *, separator: str, engine: str = "auto") -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from tokenizers import Tokenizer, pre_tokenizers

        description, config = read_files(folder)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        vocabulary = tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have gaps
        self.dtype: np.dtype[Any] = np.dtype(np.uint16)
        if self.vocab_size > 2**16:
            self.dtype = np.dtype(np.uint32)
        self.separator = separator
        self.end_of_text: int | None = None
        if separator != "none":
            token = separator_token(config)
            self.end_of_text = vocabulary.get(token or "")
            if self.end_of_text is None:
                raise UserError("The tokenizer has no end-of-text token to separate documents. Pass --separator none.")
        plain = without_special_tokens(description)
        # Special tokens of several characters do not occur in text, and no other id depends on them.
        occur_in_text = False
        for token in description.get("added_tokens", []):
            if not token.get("special") or len(token["content"]) <= 1:
                occur_in_text = True
        if not occur_in_text:
            plain["added_tokens"] = []
        unknown_token = plain["model"].get("unk_token")
        is_byte_level = '"ByteLevel"' in json.dumps(plain.get("pre_tokenizer"))
        missing = set(pre_tokenizers.ByteLevel.alphabet()) - vocabulary.keys()
        if is_byte_level and not unknown_token and missing:
            logger.warning("The tokenizer has no token for %d of 256 bytes, so characters are lost.", len(missing))
        self._reference = Tokenizer.from_str(json.dumps(plain))
        self._unknown = plain["model"].get("unk_id")  # of a Unigram model
        if unknown_token:
            self._unknown = self._reference.token_to_id(unknown_token)
        self.engine = "tokenizers"
        if engine == "auto" and _is_byte_level_bpe(plain, vocabulary):
            self._load_fastokens(plain)

    def _load_fastokens(self, plain: dict[str, Any]) -> None:
        """Use fastokens, which is 20 to 100 times as fast as `tokenizers`, if it can be used."""
        # Each worker is a process, so threads within a worker would only compete for cores.
        os.environ.setdefault("RAYON_NUM_THREADS", "1")
        try:
            import fastokens

            self._fast = fastokens.Tokenizer.from_json_str(json.dumps(plain))
            self.engine = "fastokens"
        except Exception as error:  # not installed, or cannot load this tokenizer
            logger.warning("fastokens cannot be used (%s), so encoding is much slower.", in_a_line(error))

    def encode(self, documents: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return two arrays: the concatenated ids, and the length of each document.

        Ids and lengths include the separators. An empty document has length 0 and no separator.
        """
        ids, lengths = self._plain(documents)
        if self.end_of_text is None:
            return ids, lengths
        places = np.cumsum(lengths)
        if self.separator == "before":
            places -= lengths
        has_text = lengths > 0
        with_separators = np.insert(ids, places[has_text], self.end_of_text)
        return with_separators, lengths + has_text

    def cut(self, text: str, length: int) -> str:
        """Return the beginning of a document that has `length` ids, including a separator before it."""
        encoding = self._reference.encode(text, add_special_tokens=False)
        offsets = encoding.offsets
        tokens = length
        if self.end_of_text is not None and self.separator == "before":
            tokens -= 1
        if tokens >= len(offsets):
            return text
        stop, _ = offsets[tokens]
        return text[:stop]

    def round_trip(self, text: str) -> RoundTrip:
        """Encode a text with `tokenizers`, and decode its ids."""
        encoding = self._reference.encode(text, add_special_tokens=False)
        ids = encoding.ids
        decoded = self._reference.decode(ids, skip_special_tokens=False)
        unknown = ids.count(self._unknown)  # 0 if there is no unknown token
        return RoundTrip(decoded, len(ids), unknown)

    def check(self, documents: list[str], source: str) -> None:
        """Raise UserError if fastokens encodes a document differently from `tokenizers`."""
        if self.engine == "tokenizers":
            return
        for document in documents:
            text = document[:50_000]
            ids, _ = self._plain([text])
            expected = self._reference.encode(text, add_special_tokens=False)
            if ids.tolist() != expected.ids:
                raise UserError(f"{self.engine} encodes {text[:40]!r} of {source} wrongly. Pass --encoder tokenizers.")

    def _plain(self, documents: list[str]) -> tuple[np.ndarray, np.ndarray]:
        try:
            if self.engine == "fastokens":
                ids_buffer, edges_buffer = self._fast.encode_batch_flat(documents)
                ids = np.frombuffer(ids_buffer, np.uint32)
                edges = np.frombuffer(edges_buffer, np.uint64)
                lengths = np.diff(edges.astype(np.int64))
                return ids.astype(self.dtype), lengths
            encoded = self._reference.encode_batch_fast(documents, add_special_tokens=False)
        except Exception as error:  # `tokenizers` raises plain Exception
            raise UserError(f"The --tokenizer cannot encode a text ({in_a_line(error)}). Pass another.") from None
        arrays = [np.array(document.ids, dtype=self.dtype) for document in encoded]
        ids = np.concatenate([np.empty(0, self.dtype), *arrays])
        lengths = np.array([len(array) for array in arrays], int)
        return ids, lengths


def _is_byte_level_bpe(description: dict[str, Any], vocabulary: dict[str, int]) -> bool:
    """Return whether a tokenizer is a byte-level BPE for which fastokens was tested."""
    # In the tests, fastokens gave the same ids as `tokenizers` for tokenizers of this form.
    step = description.get("pre_tokenizer") or {}
    if step.get("type") != "ByteLevel" or step.get("add_prefix_space"):
        return False
    if description.get("normalizer") is not None or description["added_tokens"]:
        return False
    has_gaps = len(vocabulary) != max(vocabulary.values()) + 1  # fastokens cannot load them
    return description["model"].get("type") == "BPE" and not has_gaps
