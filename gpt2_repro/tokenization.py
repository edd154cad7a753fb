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
from collections.abc import Sequence
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
    names = ("special_tokens_map.json", CONFIG)  # the later file has priority
    texts = [(folder / name).read_text(encoding="utf-8") for name in names if (folder / name).is_file()]
    config: dict[str, Any] = functools.reduce(lambda one, text: one | json.loads(text), texts, {})
    return json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")), config


def roles_of(config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens of a configuration, such as {"eos_token": "</s>"}."""
    named = {role: config.get(role) for role in ROLES}
    contents = {role: token.get("content") if isinstance(token, dict) else token for role, token in named.items()}
    return {role: content for role, content in contents.items() if isinstance(content, str)}


def separator_token(config: dict[str, Any]) -> str | None:
    """Return the token between documents: eos_token, by default <|endoftext|>."""
    return roles_of({"eos_token": END_OF_TEXT} | config).get("eos_token")


def without_special_tokens(description: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of tokenizer.json that encodes spelled special tokens as text.

    All other ids stay the same. Only unknown text has the id of the unknown token. A special token of one character,
    such as a line break, is text.
    """
    added = description.get("added_tokens", [])
    special = {token["content"] for token in added if token.get("special")}
    # The new names contain a code point that is not a character. If the tokens were removed, the following added
    # tokens would get other ids.
    names = {token: f"\ufdd0special {number}\ufdd0" for number, token in enumerate(sorted(special)) if len(token) > 1}
    model = dict(description["model"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(token, token): index for token, index in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    if "merges" in model:
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        model["merges"] = [pair for pair in pairs if not names.keys() & {*pair, "".join(pair)}]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    renamed = [token | {"content": names.get(token["content"], token["content"])} for token in added]
    # Saved truncation and padding would cut or pad documents. Dropout would give other ids on each call.
    settings = {"truncation": None, "padding": None, "post_processor": None}
    return description | settings | {"added_tokens": renamed, "model": model | {"dropout": None}}


def for_rows(folder: Path, *, separator: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return tokenizer.json and the configuration that fit the rows.

    The separator becomes bos_token and eos_token. With `separator` "none" there is neither of them. A post-processor
    that adds tokens is removed. Tokens that the configuration names are marked as special in tokenizer.json, because
    some vocabularies have them as ordinary entries.
    """
    from tokenizers import Tokenizer

    description, config = read_files(folder)
    backend = Tokenizer.from_str(json.dumps(description))
    description |= {"truncation": None, "padding": None}
    if backend.num_special_tokens_to_add(False):
        description["post_processor"] = None
    end = separator_token(config) if separator != "none" else None
    vocabulary = backend.get_vocab()
    added = {token["id"]: token for token in description.get("added_tokens", [])}
    for token in {*roles_of(config).values(), end or ""} & vocabulary.keys():
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        number = vocabulary[token]
        added[number] = {"id": number, "content": token} | plain | added.get(number, {}) | {"special": True}
    description["added_tokens"] = [added[number] for number in sorted(added)]
    roles = roles_of(config) | {"bos_token": end, "eos_token": end}
    kept = {key: config[key] for key in KEPT if config.get(key) is not None}
    # 4.57 does not have the class TokenizersBackend, which transformers 5 would write.
    kept |= {role: token for role, token in roles.items() if token in vocabulary}
    return description, {"tokenizer_class": "PreTrainedTokenizerFast", **kept}


def load_for_rows(folder: Path, *, separator: str) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a prepared folder (see `for_rows`)."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    description, config = for_rows(folder, separator=separator)
    del config["tokenizer_class"]
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(description)), **config)


def load(checkpoint: str) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a folder or Hub id.

    Without a tokenizer.json, the class of the tokenizer is used.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.utils import cached_file

    missing = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    cached = cached_file(checkpoint, "tokenizer.json", **missing)
    loader = AutoTokenizer if cached is None else PreTrainedTokenizerFast
    return loader.from_pretrained(checkpoint, trust_remote_code=False)


def save(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Write a tokenizer so that AutoTokenizer also loads its tokenizer.json as it is."""
    tokenizer.save_pretrained(folder)
    if tokenizer.is_fast:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        write_whole(folder / CONFIG, json.dumps(config, indent=2, ensure_ascii=False) + "\n")


@functools.lru_cache(maxsize=8)
def _encoder(tokenizer: "PreTrainedTokenizerBase") -> "Tokenizer":
    from tokenizers import Tokenizer

    # transformers has marked all tokens that the configuration names as special.
    return Tokenizer.from_str(json.dumps(without_special_tokens(json.loads(tokenizer.backend_tokenizer.to_str()))))


def encode(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of each text, with the ids that the text has in rows.

    Text that spells a special token is text. Raises UserError if a text cannot be encoded.
    """
    try:
        if not tokenizer.is_fast:
            encoded = tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True, verbose=False)
            return encoded["input_ids"]
        return [encoding.ids for encoding in _encoder(tokenizer).encode_batch_fast(texts, add_special_tokens=False)]
    except Exception as error:  # raised by `tokenizers` if a character tokenizer lacks a character
        shown = texts[0] if len(texts) == 1 else "a text"
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
    if all(one.lstrip(" ") == text.lstrip(" ") for one, text in zip(decoded, texts, strict=True)):
        return ""
    return hashlib.sha256("\0".join(decoded).encode(errors="replace")).hexdigest()


def start_id(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Return the id before a document, or None if there is no separator."""
    return tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id


def start_ids(tokenizer: "PreTrainedTokenizerBase", prompt: str, *, window: int | None = None) -> list[int]:
    """Return the ids of a prompt: the separator, if there is one, and the text.

    Without a separator, an empty prompt becomes a line break. If the vocabulary has no line break, an empty prompt
    becomes the first ordinary entry of the vocabulary.

    Raises UserError if the prompt fills the window or cannot be encoded.
    """
    start = start_id(tokenizer)
    ids = [*([] if start is None else [start]), *(encode(tokenizer, [prompt])[0] if prompt else [])]
    for text in () if ids else ("\n", *sorted(tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens))):
        with contextlib.suppress(UserError):
            if ids := encode(tokenizer, [text])[0]:
                break
    if window and len(ids) >= window:
        limit = f"must have fewer than {window:,}, the size of the window"
        raise UserError(f"The prompt has {len(ids):,} tokens, but {limit}. Pass a shorter --sample_prompt.")
    return ids


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

    vocabulary, special = tokenizer.get_vocab(), set(tokenizer.all_special_ids)
    added, sizes = tokenizer.added_tokens_decoder, np.zeros((2, max(vocabulary.values()) + 1), np.int64)
    # With this decoder, each character of a token is a byte.
    decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"] if tokenizer.is_fast else None
    is_byte_level = '"ByteLevel"' in json.dumps(decoder)

    def size(*ids: int) -> int:
        return len(tokenizer.decode(ids, clean_up_tokenization_spaces=False).encode())

    other = min(set(vocabulary.values()) - special - added.keys(), default=0)
    for token, number in vocabulary.items():
        if number in special:
            continue
        if number in added:
            sizes[:, number] = len(added[number].content.encode())
        elif is_byte_level or re.fullmatch("<0x[0-9A-F]{2}>", token):
            sizes[:, number] = len(token) if is_byte_level else 1
        else:
            sizes[:, number] = size(other, number) - size(other), size(number)
    return sizes
