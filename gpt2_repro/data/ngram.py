"""Reference losses that a language model has to beat: unigram and interpolated bigram of the same tokens."""

import numpy as np


# Counting pairs sorts them in memory, 8 bytes each: beyond this the figures cost more than they say.
MAX_TOKENS = 50_000_000


def reference_losses(train: np.ndarray, validation: np.ndarray, vocab_size: int) -> dict[str, float]:
    """Mean negative log-likelihood per target of `validation` under models counted on `train`, in nats.

    Unigram: add-one smoothed. Bigram: Witten-Bell interpolation with that unigram, so
    p(w|v) = (c(v,w) + n(v) p(w)) / (c(v) + n(v)), n(v) the number of different ids seen after v (Witten and Bell
    1991). Both are asked for the targets of the rows, so the figures compare with a validation loss as they are.

    Args:
        train, validation: rows [rows, sequence_length + 1] of ids.
        vocab_size: number of ids.
    """
    context, target = train[:, :-1].ravel().astype(np.int64), train[:, 1:].ravel().astype(np.int64)
    counts = np.bincount(target, minlength=vocab_size)
    unigram = (counts + 1) / (counts.sum() + vocab_size)
    pairs, pair_counts = np.unique(context * vocab_size + target, return_counts=True)
    context_counts = np.bincount(context, minlength=vocab_size)
    followers = np.bincount(pairs // vocab_size, minlength=vocab_size)

    context, target = validation[:, :-1].ravel().astype(np.int64), validation[:, 1:].ravel().astype(np.int64)
    asked = context * vocab_size + target
    place = np.minimum(np.searchsorted(pairs, asked), len(pairs) - 1)
    seen = np.where(pairs[place] == asked, pair_counts[place], 0)
    # A context never seen has no counts at all: its weight falls to the unigram.
    weight = np.maximum(followers[context], 1)
    bigram = (seen + weight * unigram[target]) / (context_counts[context] + weight)
    return {"unigram": float(-np.log(unigram[target]).mean()), "bigram": float(-np.log(bigram).mean())}
