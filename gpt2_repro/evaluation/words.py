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
    words = sum(len(text.split()) for text in texts)
    characters = sum(len("".join(text.split())) for text in texts)
    unspaced = sum(len(UNSPACED.findall(text)) for text in texts)
    return 2 * unspaced < characters and characters <= LONGEST * words
