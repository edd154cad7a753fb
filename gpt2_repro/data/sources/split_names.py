"""Recognize the split that the name of a file or of its folder names, as the library `datasets` does."""

import re
from collections.abc import Sequence
from pathlib import Path


TRAIN = "train"
VALIDATION = "validation"
TEST = "test"
# datasets 5 (data_files.py, SPLIT_KEYWORDS and NON_WORDS_CHARS). A word stands between separators or digits.
WORDS = {
    TRAIN: ("train", "training"),
    VALIDATION: ("validation", "valid", "dev", "val"),
    TEST: ("test", "testing", "eval", "evaluation"),
}
SEPARATOR = "[-._ 0-9]"


def _pattern(words: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern that finds one of the words in a name."""
    return re.compile(rf"(?:^|{SEPARATOR})(?:{'|'.join(words)})(?:{SEPARATOR}|$)")


PATTERNS = {split: _pattern(words) for split, words in WORDS.items()}
# Also other splits, such as unsupervised-00000-of-00001.parquet.
SHARD = re.compile(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}")
# Files of a data set that describe it (datasets, FILES_TO_IGNORE).
DESCRIPTIONS = ("README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")


def split_of(path: Path) -> str | None:
    """Return the split of a file: train, validation, test, another one of its shards, or None if none is named.

    Args:
        path: the path below the folder that the user passed. The names of its folders come before the file's name.
    """
    for name in path.parts:
        for split, pattern in PATTERNS.items():
            if pattern.search(name):
                return split
    shard = SHARD.match(path.name)
    if shard is None:
        return None
    return shard[1]
