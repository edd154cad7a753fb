"""Score text with lm-eval, with the ids that text has in rows, and without logits that no score needs."""

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.models.huggingface import HFLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from gpt2_repro.cli import Progress
from gpt2_repro.evaluation.hellaswag import ScoredIds, batches_by_length, cut
from gpt2_repro.evaluation.passes import Answer, mean_losses_of, score_rows
from gpt2_repro.evaluation.shared_rows import Row, Text, rows_of
from gpt2_repro.evaluation.workers import Passes, passes_of
from gpt2_repro.tokenization import encode, start_id


NO_SEPARATOR = -1  # prefix of documents whose rows have no separator
# Architectures whose attention takes any mask, so that texts with a common beginning can share a row.
SHARING = ("gpt2", "llama", "mixtral", "starcoder2", "arcee", "qwen3", "exaone4")
Window = tuple[float, int]  # of a document: its log-probability, and its number of scored tokens
Pair = tuple[Any, list[int], list[int]]  # a cache key of lm-eval, the ids of a context, and the ids to score


def added_start(tokenizer: Any) -> list[int]:
    """Return the start token that the tokenizer of another project adds to all text."""
    # The models of such tokenizers need it. Ours add none.
    first: list[int] = tokenizer("")["input_ids"][:1]
    if first == [tokenizer.bos_token_id]:
        return first
    return []


class Rolling(float):
    """The log-probability of a document: the sum over its windows.

    Args:
        windows: for each window, its log-probability and its number of scored tokens.
    """

    windows: list[Window]

    def __new__(cls, windows: list[Window]) -> "Rolling":
        total = sum(score for score, _ in windows)
        document = super().__new__(cls, total)
        document.windows = windows
        return document

    # lm-eval pickles scores to bootstrap a metric in other processes.
    def __reduce__(self) -> tuple[Callable[..., "Rolling"], tuple[Any]]:
        return Rolling, (self.windows,)


class Scorer(HFLM):
    """lm-eval's class for models of transformers, faster (docs/evaluation.md).

    HFLM (lm_eval 0.4.13) computes each context once per continuation, and logits for contexts and padding too.

    Args:
        positions: the largest number of tokens in a forward pass, with padding (0: `batch_size` full windows).
        per_token: whether the options of an item are ranked by their mean log-probability per token.
        compares_options: whether the options of an item are ranked by their mean log-probability per token, over the
            tokens in which they differ, as in nanochat/core_eval.py. The separator begins all texts.
        passes: scores batches of texts in other processes. By default, this process scores them.
        generation_device: the device that generates text. By default, that of the model.
    """

    def __init__(
        self,
        positions: int = 0,
        per_token: bool = False,
        compares_options: bool = False,
        passes: Passes | None = None,
        generation_device: str | None = None,
        **options: Any,
    ):
        super().__init__(**options)
        self._passes = passes or passes_of(self.model)
        self._generation_device = generation_device
        self.positions = positions or self.max_length * self.batch_size
        self.per_token = per_token
        self.compares_options = compares_options
        self._start = added_start(self.tokenizer)
        separator = start_id(self.tokenizer)
        if compares_options and separator is not None:
            self._start = [separator]
        self._shares_rows = self.model.config.model_type in SHARING

    @property
    def prefix_token_id(self) -> int:
        start = start_id(self.tokenizer)
        if start is None:
            return NO_SEPARATOR
        return start

    def tok_encode(self, string: str, *_: Any, left_truncate_len: int | None = None, **__: Any) -> list[int]:
        # HFLM would add the tokens of the post-processor, and score them in rolling windows
        # (lm-evaluation-harness#3333).
        (ids,) = encode(self.tokenizer, [string])
        if left_truncate_len is None:
            return ids
        return ids[-left_truncate_len:]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        before, after = super()._encode_pair(context, continuation)
        return [*self._start, *before], after

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> list[Answer]:
        if self.compares_options:
            return self._compare_options(requests)
        if self.per_token:
            return self._mean_per_token(requests, disable_tqdm)
        return super().loglikelihood(requests, disable_tqdm=True)

    def _mean_per_token(self, requests: Any, disable_tqdm: bool) -> list[Answer]:
        """Return the mean log-probability of the tokens of each continuation."""
        rows: list[ScoredIds] = []
        lengths: list[int] = []
        for request in requests:
            context, continuation = request.args
            before, after = self._encode_pair(context, continuation)
            row = cut(before + after, len(after), self.max_length)
            ids, _ = row
            rows.append(row)
            lengths.append(len(ids) - 1)
        numbers_of = batches_by_length(lengths, self.positions)
        batches: list[list[ScoredIds]] = []
        for numbers in numbers_of:
            batches.append([rows[number] for number in numbers])
        answers: list[Answer] = [(0.0, False)] * len(rows)
        with Progress(total=len(rows), desc="score", unit="text", hidden=disable_tqdm) as bar:
            means_of = self._passes(mean_losses_of, batches)
            for numbers, means in zip(numbers_of, means_of, strict=True):
                for number, mean in zip(numbers, means, strict=True):
                    # The metric acc does not need to know if an ending is the greedy one.
                    answers[number] = (-mean, False)
                    bar.update()
        return answers

    def _compare_options(self, requests: Any) -> list[Answer]:
        """Return the mean log-probabilities of the tokens in which the options of an item differ."""
        pairs: list[Pair] = []
        for _, items in itertools.groupby(requests, key=lambda request: request.doc_id):
            texts = [request.args for request in items]
            if len(set(texts)) > 1:
                pairs += self._split_options(texts)
                continue
            # A single continuation, which greedy decoding must give.
            for context, continuation in texts:
                before, after = self._encode_pair(context, continuation)
                pairs.append((None, before, after))
        means: list[Answer] = []
        answers = self._loglikelihood_tokens(pairs)
        for (_, _, after), (total, is_greedy) in zip(pairs, answers, strict=True):
            scored = min(len(after), self.max_length)
            means.append((total / scored, is_greedy))
        return means

    def _split_options(self, texts: Sequence[tuple[str, str]]) -> list[Pair]:
        """Divide the ids of options with one context where they begin to differ.

        Options with different contexts have the same continuation. Their ids are divided where they cease to differ.
        """
        joined = [context + continuation for context, continuation in texts]
        options = [self._start + ids for ids in encode(self.tokenizer, joined)]
        shortest = min(len(ids) for ids in options)
        most = shortest - 1  # an option has at least one token to score
        contexts = {context for context, _ in texts}
        pairs: list[Pair] = []
        if len(contexts) == 1:
            prefix = os.path.commonprefix(options)
            shared = min(most, len(prefix))
            for ids in options:
                pairs.append((None, ids[:shared], ids[shared:]))
            return pairs
        reversed_options = [ids[::-1] for ids in options]
        suffix = os.path.commonprefix(reversed_options)
        shared = min(most, len(suffix))
        shared = max(1, shared)
        for ids in options:
            pairs.append((None, ids[:-shared], ids[-shared:]))
        return pairs

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        pairs: list[Pair] = []
        num_windows: list[int] = []  # of each document
        for request in requests:
            ids = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            before_windows = len(pairs)
            for window in windows:
                before, after = make_disjoint_window(window)
                pairs.append((None, before, after))
            num_windows.append(len(pairs) - before_windows)
        scored: list[Window] = []  # for each window, its log-probability and its number of scored tokens
        answers = self._loglikelihood_tokens(pairs)
        for (_, _, after), (score, _) in zip(pairs, answers, strict=True):
            scored.append((score, len(after)))
        documents: list[float] = []
        start = 0
        for count in num_windows:
            documents.append(Rolling(scored[start : start + count]))
            start += count
        return documents

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Answer]:
        """Return the log-probability of each continuation, and whether greedy decoding gives it."""
        texts = self._texts(requests)
        rows = rows_of(texts, most=self.max_length, shared=self._shares_rows)
        lengths = [len(row.ids) for row in rows]
        batches: list[list[Row]] = []
        for numbers in batches_by_length(lengths, self.positions):
            batches.append([rows[number] for number in numbers])
        answers: list[Answer] = [(0.0, True)] * len(requests)
        with Progress(total=len(texts), desc="score", unit="text", hidden=disable_tqdm) as bar:
            for answers_of_batch in self._passes(score_rows, batches):
                for request, answer in answers_of_batch.items():
                    answers[request] = answer
                    bar.update()
        return answers

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        # Generated texts come from one device. No task of this project needs them.
        if self._generation_device is not None:
            self.model.to(self._generation_device)
            self._device = self.model.device
        texts: list[str] = super().generate_until(requests, disable_tqdm)
        return texts

    def _texts(self, requests: Sequence[Pair]) -> list[Text]:
        """Return the texts of the requests that have something to score."""
        texts: list[Text] = []
        for number, (_, before, after) in enumerate(requests):
            assert after, "An ending without tokens would be the most likely one."
            if before == [NO_SEPARATOR]:
                # The first token of a document is only context, and a single token is not scored.
                before = after[:1]
                after = after[1:]
            if after:
                ids, scored = cut(before + after, len(after), self.max_length)
                texts.append(Text(ids, scored, number))
        return texts
