"""Score text with lm-eval, with the ids that text has in rows, and without logits that no score needs."""

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from gpt2_repro.batch_plan import IGNORED
from gpt2_repro.cli import Progress
from gpt2_repro.evaluation.hellaswag import batches_by_length, cut, mean_losses
from gpt2_repro.tokenization import encode, start_id


NO_SEPARATOR = -1  # prefix of documents whose rows have no separator
# Architectures whose attention takes any mask, so that texts with a common beginning can share a row.
SHARING = ("gpt2", "llama", "mixtral", "starcoder2", "arcee", "qwen3", "exaone4")
Pair = tuple[Any, list[int], list[int]]  # a cache key of lm-eval, the ids of a context, and the ids to score


def added_start(tokenizer: Any) -> list[int]:
    """Return the start token that the tokenizer of another project adds to all text."""
    # The models of such tokenizers need it. Ours add none.
    first: list[int] = tokenizer("")["input_ids"][:1]
    return first if first == [tokenizer.bos_token_id] else []


class Rolling(float):
    """The log-probability of a document: the sum over its windows.

    Args:
        windows: for each window, its log-probability and its number of scored tokens.
    """

    windows: list[tuple[float, int]]

    def __new__(cls, windows: list[tuple[float, int]]) -> "Rolling":
        total = super().__new__(cls, sum(score for score, _ in windows))
        total.windows = windows
        return total

    # lm-eval pickles scores to bootstrap a metric in other processes.
    def __reduce__(self) -> tuple[Callable[..., "Rolling"], tuple[Any]]:
        return Rolling, (self.windows,)


class Scorer(HFLM):
    """lm-eval's class for models of transformers, faster (docs/evaluation.md).

    HFLM (lm_eval 0.4.13) computes each context once per continuation, and logits for contexts and padding too.

    Args:
        positions: the largest number of tokens in a forward pass, with padding (0: `batch_size` full windows).
        per_token: whether the options of an item are ranked by their mean log-probability per token.
    """

    def __init__(self, positions: int = 0, per_token: bool = False, **options: Any):
        super().__init__(**options)
        self.positions, self.per_token = positions or self.max_length * self.batch_size, per_token
        self._start, self._shares = added_start(self.tokenizer), self.model.config.model_type in SHARING

    @property
    def prefix_token_id(self) -> int:
        start = start_id(self.tokenizer)
        return NO_SEPARATOR if start is None else start

    def tok_encode(self, string: str, *_: Any, left_truncate_len: int | None = None, **__: Any) -> list[int]:
        # HFLM would add the tokens of the post-processor, and score them in rolling windows
        # (lm-evaluation-harness#3333).
        return encode(self.tokenizer, [string])[0][-(left_truncate_len or 0) :]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        before, after = super()._encode_pair(context, continuation)
        return [*self._start, *before], after

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        if not self.per_token:
            return super().loglikelihood(requests, disable_tqdm=True)
        pairs = [self._encode_pair(*request.args) for request in requests]
        rows = [cut([*before, *after], len(after), self.max_length) for before, after in pairs]
        # The code of the score during training. The metric acc does not need to know if an ending is the greedy one.
        bar = functools.partial(Progress, desc="score", unit="pass", hidden=disable_tqdm)
        means = mean_losses(rows, self._losses, positions=self.positions, device=self.device, progress=bar)
        return [(-mean, False) for mean in means.tolist()]

    @torch.inference_mode()
    def _losses(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the losses of the labels that are not -100, of shape [targets]."""
        targets = labels != IGNORED
        return cross_entropy(self._logits(ids, targets.nonzero()), labels[targets], reduction="none")

    def _logits(self, ids: torch.Tensor, at: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return the logits after the ids with the row and column numbers `at` [n, 2], of shape [n, vocabulary]."""
        row, column = at.to(self.device).T
        head = self.model.get_output_embeddings()
        with head.register_forward_pre_hook(lambda _, hidden: hidden[0][row, column]):
            return self.model(input_ids=ids, use_cache=False, **options).logits.float()

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        texts, prefix = [self.tok_encode(request.args[0]) for request in requests], self.prefix_token_id
        rolling = [get_rolling_token_windows(ids, prefix, self.max_length, context_len=1) for ids in texts]
        windows = [list(map(make_disjoint_window, of_text)) for of_text in rolling]
        scored = iter(self._loglikelihood_tokens([(None, *window) for window in itertools.chain(*windows)]))
        return [Rolling([(next(scored)[0], len(after)) for _, after in document]) for document in windows]

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether greedy decoding gives it."""
        answers = [(0.0, True)] * len(requests)
        texts = []
        for number, (_, before, after) in enumerate(requests):
            assert after, "An ending without tokens would be the most likely one."
            if before == [NO_SEPARATOR]:
                # The first token of a document is only context, and a single token is not scored.
                before, after = after[:1], after[1:]
            if after:
                texts.append((*cut([*before, *after], len(after), self.max_length), number))
        rows: list[Row] = []
        for ids, scored, number in sorted(texts):  # texts with a common beginning are neighbours
            if not (self._shares and rows and rows[-1].add(ids, scored, number, most=self.max_length)):
                rows.append(Row(ids, scored, number))
        batches = batches_by_length([len(row.ids) for row in rows], self.positions)
        with Progress(total=len(texts), desc="score", unit="text", hidden=disable_tqdm) as bar:
            for batch in batches:
                for number, answer in self._score([rows[index] for index in batch]):
                    answers[number] = answer
                    bar.update()
        return answers

    @torch.inference_mode()
    def _score(self, rows: Sequence["Row"]) -> Iterator[tuple[int, tuple[float, bool]]]:
        # Padding is on the right, so no position of a row attends to it.
        ids, positions = (
            pad_sequence(list(map(torch.tensor, numbers)), batch_first=True).to(self.device)
            for numbers in ([row.ids for row in rows], [row.positions for row in rows])
        )
        options = {}
        if any(len(row.texts) > 1 for row in rows):
            mask = torch.stack([row.mask(len(rows[0].ids)) for row in rows])[:, None].to(self.device)
            options = {"position_ids": positions, "attention_mask": mask}
        at = [(line, place) for line, row in enumerate(rows) for _, places, _ in row.texts for place in places]
        texts = [(number, torch.tensor(after, device=self.device)) for row in rows for number, _, after in row.texts]
        parts = self._logits(ids, torch.tensor(at), **options).split([len(targets) for _, targets in texts])
        for (number, targets), logits in zip(texts, parts, strict=True):
            loss = cross_entropy(logits, targets, reduction="sum")
            yield number, (-float(loss), bool((logits.argmax(-1) == targets).all()))


class Row:
    """A text, and other texts that branch off from it. Common beginnings are computed once.

    Args:
        ids: the ids of the first text, of which the last `scored` ids are scored.
    """

    def __init__(self, ids: list[int], scored: int, number: int) -> None:
        self.ids, self.positions = ids[:-1], list(range(len(ids) - 1))
        self.branches: list[tuple[int, int, int]] = []  # of the row: where it leaves the first text, begins and ends
        self.trunk = len(self.ids)
        self.texts = [(number, list(range(self.trunk - scored, self.trunk)), ids[-scored:])]

    def add(self, ids: list[int], scored: int, number: int, *, most: int) -> bool:
        """Add a text if half of it is the beginning of the row and the row then has at most `most` ids."""
        shared = len(os.path.commonprefix([self.ids[: self.trunk], ids[:-1]]))
        start, end = len(self.ids), len(self.ids) + len(ids) - 1 - shared
        if 2 * shared < len(ids) - 1 or end > most:
            return False
        self.branches.append((shared, start, end))
        self.ids, self.positions = self.ids + ids[shared:-1], [*self.positions, *range(shared, len(ids) - 1)]
        places = [at if at < shared else start + at - shared for at in range(len(ids) - 1 - scored, len(ids) - 1)]
        self.texts.append((number, places, ids[-scored:]))
        return True

    def mask(self, length: int) -> torch.Tensor:
        """Return which id attends to which, of shape [length, length]."""
        seen = torch.tril(torch.ones(length, length, dtype=torch.bool))
        for shared, start, end in self.branches:
            seen[start:end, shared:start] = False
        return seen
