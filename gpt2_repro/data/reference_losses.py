"""Reference losses that a language model has to beat: unigram and interpolated bigram of the same tokens."""

import numpy as np


# Counting pairs sorts them: beyond this that takes longer than reading the text did.
MAX_TOKENS = 5_000_000


def reference_losses(
    train: tuple[np.ndarray, np.ndarray], validation: tuple[np.ndarray, np.ndarray], vocab_size: int
) -> dict[str, float]:
    """Mean negative log-likelihood per target of `validation` under models counted on `train`, in nats.

    Unigram: add-one smoothed. Bigram: Witten-Bell interpolation with that unigram, so
    p(w|v) = (c(v,w) + n(v) p(w)) / (c(v) + n(v)), n(v) the number of different ids seen after v (Witten and Bell
    1991). Both are asked for the targets of the rows, so the figures compare with a validation loss as they are.

    Args:
        train, validation: ids of rows one after another [ids], and the length of each row [rows].
        vocab_size: number of ids.
    """
    context, target = _pairs(*train)
    counts = np.bincount(target, minlength=vocab_size)
    unigram = (counts + 1) / (counts.sum() + vocab_size)
    # Narrow keys, where they hold a pair, sort in half the time.
    key = np.uint32 if vocab_size**2 <= 2**32 else np.int64
    pairs, pair_counts = np.unique((context * vocab_size + target).astype(key), return_counts=True)
    pairs = pairs.astype(np.int64)
    context_counts = np.bincount(context, minlength=vocab_size)
    followers = np.bincount(pairs // vocab_size, minlength=vocab_size)

    context, target = _pairs(*validation)
    asked = context * vocab_size + target
    place = np.minimum(np.searchsorted(pairs, asked), len(pairs) - 1)
    seen = np.where(pairs[place] == asked, pair_counts[place], 0)
    # A context never seen has no counts at all: its weight falls to the unigram.
    weight = np.maximum(followers[context], 1)
    bigram = (seen + weight * unigram[target]) / (context_counts[context] + weight)
    return {"unigram": float(-np.log(unigram[target]).mean()), "bigram": float(-np.log(bigram).mean())}


def _pairs(ids: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every target and the id before it, never across two rows: [targets] each."""
    ends = np.cumsum(lengths)
    return np.delete(ids, ends - 1).astype(np.int64), np.delete(ids, ends - lengths).astype(np.int64)
