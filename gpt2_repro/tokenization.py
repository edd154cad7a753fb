"""Give text the same ids in rows, samples, evaluation and the final model.

All ids come from one tokenizer.json, which is loaded as it is. transformers 5 replaces parts of this file for classes
such as GPT2Tokenizer, so the class name of a tokenizer is ignored (allenai/open-instruct#1896). A document begins with
the separator of the rows, never with tokens that a post-processor adds.
"""

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2_repro.errors import UserError
from gpt2_repro.files import write_whole


if TYPE_CHECKING:  # slow to import
    import numpy as np
    from numpy.typing import NDArray
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

ENCODING = 2  # version of the ids of a text. Before it, some added tokens had wrong ids.
END_OF_TEXT = "<|endoftext|>"
ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "cls_token", "sep_token", "mask_token")
KEPT = ("model_max_length", "clean_up_tokenization_spaces", "chat_template")
CONFIG = "tokenizer_config.json"
# Two tokenizers with the same vocabulary are the same if they also divide this text in the same way.
PROBE = "It's 2024: 3.14159 naïve CAFÉs\r\n\n  def f(x):\treturn x_1 + 1000000  # 日本語 ½ ﬁ 🙂 … <s>[SEP]</s>"


def read_files(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return tokenizer.json and the configuration of a tokenizer folder."""
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", CONFIG):  # the later file has priority
        path = folder / name
        if path.is_file():
            config |= json.loads(path.read_text(encoding="utf-8"))
    description = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    return description, config


def roles_of(config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens of a configuration, such as {"eos_token": "</s>"}."""
    roles: dict[str, str] = {}
    for role in ROLES:
        token = config.get(role)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            roles[role] = token
    return roles


def separator_token(config: dict[str, Any]) -> str | None:
    """Return the token between documents: eos_token, by default <|endoftext|>."""
    return roles_of({"eos_token": END_OF_TEXT} | config).get("eos_token")


def without_special_tokens(description: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of tokenizer.json that encodes spelled special tokens as text.

    All other ids stay the same. Only unknown text has the id of the unknown token. A special token of one character,
    such as a line break, is text.
    """
    added = description.get("added_tokens", [])
    special: set[str] = set()
    for token in added:
        if token.get("special"):
            special.add(token["content"])
    # The new names contain a code point that is not a character. If the tokens were removed, the following added
    # tokens would get other ids.
    names: dict[str, str] = {}
    for number, content in enumerate(sorted(special)):
        if len(content) > 1:
            names[content] = f"\ufdd0special {number}\ufdd0"

    model = description["model"] | {"dropout": None}  # dropout would give other ids on each call
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): index for token, index in vocab.items()}
    else:  # a Unigram model, with the score of each token
        model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
    if "merges" in model:
        model["merges"] = _merges_without(names, model["merges"])
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]

    renamed = []
    for token in added:
        content = token["content"]
        renamed.append(token | {"content": names.get(content, content)})
    return {
        **description,
        "truncation": None,  # saved truncation and padding would cut or pad documents
        "padding": None,
        "post_processor": None,
        "added_tokens": renamed,
        "model": model,
    }


def _merges_without(tokens: Collection[str], merges: Sequence[Any]) -> list[list[str]]:
    """Return the merges of a BPE as pairs, without those that have or give one of `tokens`."""
    pairs: list[list[str]] = []
    for merge in merges:
        if isinstance(merge, str):
            merge = merge.split(" ")
        left, right = merge
        merged = left + right
        if left not in tokens and right not in tokens and merged not in tokens:
            pairs.append([left, right])
    return pairs


def for_rows(folder: Path, *, separator: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return tokenizer.json and the configuration that fit the rows.

    The separator becomes bos_token and eos_token. With `separator` "none" there is neither of them. A post-processor
    that adds tokens is removed. Tokens that the configuration names are marked as special in tokenizer.json, because
    some vocabularies have them as ordinary entries.
    """
    from tokenizers import Tokenizer

    description, config = read_files(folder)
    backend = Tokenizer.from_str(json.dumps(description))
    description["truncation"] = None
    description["padding"] = None
    if backend.num_special_tokens_to_add(False):
        description["post_processor"] = None
    vocabulary = backend.get_vocab()
    end = None
    if separator != "none":
        end = separator_token(config)
    special = {*roles_of(config).values(), end or ""} & vocabulary.keys()
    special_ids = {token: vocabulary[token] for token in special}
    description["added_tokens"] = _added_with(special_ids, description.get("added_tokens", []))

    # 4.57 does not have the class TokenizersBackend, which transformers 5 would write.
    rows_config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for key in KEPT:
        if config.get(key) is not None:
            rows_config[key] = config[key]
    roles: dict[str, str | None] = {**roles_of(config), "bos_token": end, "eos_token": end}
    for role, role_token in roles.items():
        if role_token in vocabulary:
            rows_config[role] = role_token
    return description, rows_config


def _added_with(special_ids: dict[str, int], added_tokens: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the added tokens of a tokenizer.json, with tokens that are marked as special or added, by id."""
    added = {token["id"]: token for token in added_tokens}
    for token, number in special_ids.items():
        entry = {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        entry.update(added.get(number, {}))
        entry["special"] = True
        added[number] = entry
    return [added[number] for number in sorted(added)]


def load_for_rows(folder: Path, *, separator: str) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a prepared folder (see `for_rows`)."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    description, config = for_rows(folder, separator=separator)
    del config["tokenizer_class"]
    backend = Tokenizer.from_str(json.dumps(description))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **config)


def load(checkpoint: str) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a folder or Hub id.

    Without a tokenizer.json, the class of the tokenizer is used.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.utils import cached_file

    cached = cached_file(
        checkpoint,
        "tokenizer.json",
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    loader: Any = PreTrainedTokenizerFast
    if cached is None:
        loader = AutoTokenizer
    return loader.from_pretrained(checkpoint, trust_remote_code=False)


def save(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Write a tokenizer so that AutoTokenizer also loads its tokenizer.json as it is."""
    tokenizer.save_pretrained(folder)
    if tokenizer.is_fast:
        path = folder / CONFIG
        config = json.loads(path.read_text(encoding="utf-8"))
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        text = json.dumps(config, indent=2, ensure_ascii=False)
        write_whole(path, text + "\n")


@functools.lru_cache(maxsize=8)
def _encoder(tokenizer: "PreTrainedTokenizerBase") -> "Tokenizer":
    from tokenizers import Tokenizer

    # transformers has marked all tokens that the configuration names as special.
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    own_description = without_special_tokens(description)
    return Tokenizer.from_str(json.dumps(own_description))


def encode(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of each text, with the ids that the text has in rows.

    Text that spells a special token is text. Raises UserError if a text cannot be encoded.
    """
    try:
        if not tokenizer.is_fast:
            encoded = tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True, verbose=False)
            return encoded["input_ids"]
        encodings = _encoder(tokenizer).encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]
    except Exception as error:  # raised by `tokenizers` if a character tokenizer lacks a character
        shown = "a text"
        if len(texts) == 1:
            shown = texts[0]
        fix = "Use only characters that occur in the training data."
        raise UserError(f"Cannot encode {shown[:80]!r} ({error}). {fix}") from None


def lost_text(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> str:
    """Return "" if decoding the ids of texts gives the texts, otherwise a hash of the decoded texts.

    Unknown tokens, lower-casing and normalization lose text. A space at the start, which many tokenizers add, does not
    count.
    """
    decoded = [
        tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        for ids in encode(tokenizer, texts)
    ]
    without_spaces = [text.lstrip(" ") for text in decoded]
    if without_spaces == [text.lstrip(" ") for text in texts]:
        return ""
    content = "\0".join(decoded).encode(errors="replace")
    return hashlib.sha256(content).hexdigest()


def start_id(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Return the id before a document, or None if there is no separator."""
    if tokenizer.bos_token_id is not None:
        return tokenizer.bos_token_id
    return tokenizer.eos_token_id


def start_ids(tokenizer: "PreTrainedTokenizerBase", prompt: str, *, window: int | None = None) -> list[int]:
    """Return the ids of a prompt: the separator, if there is one, and the text.

    Without a separator, an empty prompt becomes a line break. If the vocabulary has no line break, an empty prompt
    becomes the first ordinary entry of the vocabulary.

    Raises UserError if the prompt fills the window or cannot be encoded.
    """
    ids: list[int] = []
    start = start_id(tokenizer)
    if start is not None:
        ids.append(start)
    if prompt:
        ids += encode(tokenizer, [prompt])[0]
    if not ids:
        ids = _shortest_start(tokenizer)
    if window and len(ids) >= window:
        limit = f"must have fewer than {window:,}, the size of the window"
        raise UserError(f"The prompt has {len(ids):,} tokens, but {limit}. Pass a shorter --sample_prompt.")
    return ids


def _shortest_start(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return the ids of a line break, or of the first ordinary entry of the vocabulary that can be encoded."""
    ordinary = sorted(tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens))
    for text in ("\n", *ordinary):
        with contextlib.suppress(UserError):
            ids = encode(tokenizer, [text])[0]
            if ids:
                return ids
    return []


def is_same(one: "PreTrainedTokenizerBase", other: "PreTrainedTokenizerBase") -> bool:
    """Return whether two tokenizers give a text the same ids.

    `one` may have more ids than `other`, as padding has.
    """
    if not other.get_vocab().items() <= one.get_vocab().items():
        return False
    try:
        return encode(one, [PROBE]) == encode(other, [PROBE])
    except UserError:  # a character tokenizer, which has only its vocabulary
        return True


def bytes_of_ids(tokenizer: "PreTrainedTokenizerBase") -> "NDArray[np.int64]":
    """Return the number of UTF-8 bytes that each id stands for, of shape [2, ids].

    The second row is for an id at the start of a document, where many tokenizers add a space to the text. Special
    tokens stand for no bytes. Text that a normalizer changes counts as it is after the change.
    """
    import numpy as np

    vocabulary = tokenizer.get_vocab()
    special = set(tokenizer.all_special_ids)
    added = tokenizer.added_tokens_decoder
    largest_id = max(vocabulary.values())
    sizes = np.zeros((2, largest_id + 1), np.int64)
    # With this decoder, each character of a token is a byte.
    is_byte_level = False
    if tokenizer.is_fast:
        decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"]
        is_byte_level = '"ByteLevel"' in json.dumps(decoder)

    def size(*ids: int) -> int:
        text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return len(text.encode())

    ordinary = set(vocabulary.values()) - special - added.keys()
    other = min(ordinary, default=0)
    for token, number in vocabulary.items():
        if number in special:
            continue
        if number in added:
            sizes[:, number] = len(added[number].content.encode())
        elif is_byte_level:
            sizes[:, number] = len(token)
        elif re.fullmatch("<0x[0-9A-F]{2}>", token):
            sizes[:, number] = 1
        else:
            sizes[0, number] = size(other, number) - size(other)
            sizes[1, number] = size(number)
    return sizes
