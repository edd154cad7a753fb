"""Whether white space divides a text into words, so that scores per word have a meaning."""

import re
from collections.abc import Sequence


# Scripts that are written without spaces between words: Thai, Lao, Tibetan, Burmese, Khmer, Chinese and Japanese.
UNSPACED = re.compile("[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
LONGEST = 20  # characters of a word on average. English has 6 with punctuation, Finnish 9, source code 10


def has_words(texts: Sequence[str]) -> bool:
    """Return whether white space divides texts into words.

    It does not if half of the characters belong to scripts without spaces between words, or if the words have more
    than LONGEST characters on average, as in DNA.
    """
    num_words = 0
    characters = 0
    unspaced = 0
    for text in texts:
        words = text.split()
        num_words += len(words)
        characters += len("".join(words))
        unspaced += len(UNSPACED.findall(text))
    return 2 * unspaced < characters and characters <= LONGEST * num_words
