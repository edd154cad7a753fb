"""Compute the losses of unigram and bigram models.

A trained model should have lower losses.
"""

import numpy as np

from gpt2_repro.data.packing import Block


# Maximum number of training tokens. Beyond this, counting pairs takes longer than reading the text.
MAX_TOKENS = 5_000_000


def reference_losses(train: Block, validation: Block, vocab_size: int) -> dict[str, float]:
    """Return the validation losses of a unigram and a bigram model in nats per target.

    The keys are "unigram" and "bigram". The unigram model uses add-one smoothing. The bigram model uses Witten-Bell
    interpolation with the unigram model (Witten and Bell 1991). All ids of a row except the first are targets.

    Args:
        train, validation: the rows of each split.
    """
    from scipy import sparse

    ids, lengths = train
    context, target = _pairs(ids, lengths)
    counts = np.bincount(target, minlength=vocab_size)
    smoothed = counts + 1
    unigram = smoothed / (counts.sum() + vocab_size)
    ones = np.ones(len(target), np.int64)
    positions = (context, target)
    entries = sparse.coo_array((ones, positions), shape=(vocab_size, vocab_size))
    pairs = entries.tocsr()  # adds up equal pairs
    context_counts = pairs.sum(axis=1)
    followers = np.diff(pairs.indptr)

    ids, lengths = validation
    context, target = _pairs(ids, lengths)
    of_unigram = unigram[target]
    # Witten-Bell: p(w|v) = (c(v,w) + n(v) p(w)) / (c(v) + n(v)), where n(v) is the number of different ids after v.
    # A context without counts gets the probability of the unigram model.
    weight = np.maximum(followers[context], 1)
    numerator = pairs[context, target] + weight * of_unigram
    denominator = context_counts[context] + weight
    of_bigram = numerator / denominator
    return {
        "unigram": _mean_loss(of_unigram),
        "bigram": _mean_loss(of_bigram),
    }


def _mean_loss(probabilities: np.ndarray) -> float:
    """Return the mean loss in nats of targets with these probabilities."""
    losses = -np.log(probabilities)
    return float(losses.mean())


def _pairs(ids: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs of adjacent ids within rows as two arrays of shape [targets]."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    contexts = np.delete(ids, ends - 1)
    targets = np.delete(ids, starts)
    return contexts.astype(np.int64), targets.astype(np.int64)
