"""Score text with lm-eval, with the ids that text has in rows, and without logits that no score needs."""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from gpt2_repro.batch_plan import IGNORED
from gpt2_repro.cli import Progress
from gpt2_repro.evaluation.hellaswag import ScoredIds, batches_by_length, cut, mean_losses
from gpt2_repro.tokenization import encode, start_id


NO_SEPARATOR = -1  # prefix of documents whose rows have no separator
# Architectures whose attention takes any mask, so that texts with a common beginning can share a row.
SHARING = ("gpt2", "llama", "mixtral", "starcoder2", "arcee", "qwen3", "exaone4")
Pair = tuple[Any, list[int], list[int]]  # a cache key of lm-eval, the ids of a context, and the ids to score
Answer = tuple[float, bool]  # a log-probability, and whether greedy decoding gives the scored ids


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
        self.positions = positions or self.max_length * self.batch_size
        self.per_token = per_token
        self._start = added_start(self.tokenizer)
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
        if not self.per_token:
            return super().loglikelihood(requests, disable_tqdm=True)
        rows: list[ScoredIds] = []
        for request in requests:
            context, continuation = request.args
            before, after = self._encode_pair(context, continuation)
            rows.append(cut(before + after, len(after), self.max_length))
        # The code of the score during training. The metric acc does not need to know if an ending is the greedy one.
        bar = functools.partial(Progress, desc="score", unit="pass", hidden=disable_tqdm)
        means = mean_losses(rows, self._losses, positions=self.positions, device=self.device, progress=bar)
        return [(-mean, False) for mean in means.tolist()]

    @torch.inference_mode()
    def _losses(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the losses of the labels that are not -100, of shape [targets]."""
        targets = labels != IGNORED
        logits = self._logits(ids, targets.nonzero())
        return cross_entropy(logits, labels[targets], reduction="none")

    def _logits(self, ids: torch.Tensor, places: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return the logits after the ids with the row and column numbers `places` [n, 2], of shape [n, vocabulary]."""
        row, column = places.to(self.device).T

        def select(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
            return inputs[0][row, column]

        with self.model.get_output_embeddings().register_forward_pre_hook(select):
            return self.model(input_ids=ids, use_cache=False, **options).logits.float()

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
        scored: list[tuple[float, int]] = []  # for each window, its log-probability and its number of scored tokens
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
        rows = self._rows(texts)
        lengths = [len(row.ids) for row in rows]
        answers: list[Answer] = [(0.0, True)] * len(requests)
        with Progress(total=len(texts), desc="score", unit="text", hidden=disable_tqdm) as bar:
            for numbers in batches_by_length(lengths, self.positions):
                batch = [rows[number] for number in numbers]
                for request, answer in self._score(batch).items():
                    answers[request] = answer
                    bar.update()
        return answers

    def _texts(self, requests: Sequence[Pair]) -> list["Text"]:
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

    def _rows(self, texts: Sequence["Text"]) -> list["Row"]:
        """Return rows of texts. Texts with a common beginning share a row if the architecture allows it."""
        rows: list[Row] = []
        for text in sorted(texts):  # texts with a common beginning are neighbours
            if self._shares_rows and rows and rows[-1].add(text, most=self.max_length):
                continue
            rows.append(Row(text))
        return rows

    @torch.inference_mode()
    def _score(self, rows: Sequence["Row"]) -> dict[int, Answer]:
        """Return the answers of a batch, by the number of the request."""
        ids = self._padded([row.ids for row in rows])
        options: dict[str, torch.Tensor] = {}
        num_branches = sum(len(row.branches) for row in rows)
        if num_branches > len(rows):
            length = ids.shape[1]
            mask = torch.stack([row.mask(length) for row in rows])
            options["position_ids"] = self._padded([row.positions for row in rows])
            options["attention_mask"] = mask[:, None].to(self.device)
        branches: list[Branch] = []
        places: list[tuple[int, int]] = []
        for number, row in enumerate(rows):
            branches += row.branches
            for branch in row.branches:
                for column in branch.columns:
                    places.append((number, column))
        all_logits = self._logits(ids, torch.tensor(places), **options)
        logits_of = all_logits.split([len(branch.targets) for branch in branches])
        answers: dict[int, Answer] = {}
        for branch, logits in zip(branches, logits_of, strict=True):
            targets = torch.tensor(branch.targets, device=self.device)
            loss = cross_entropy(logits, targets, reduction="sum")
            is_greedy = (logits.argmax(-1) == targets).all()
            answers[branch.request] = (-float(loss), bool(is_greedy))
        return answers

    def _padded(self, rows: Sequence[list[int]]) -> torch.Tensor:
        """Return rows of numbers as a tensor. Padding is on the right, so no position of a row attends to it."""
        tensors = [torch.tensor(row) for row in rows]
        return pad_sequence(tensors, batch_first=True).to(self.device)


class Text(NamedTuple):
    """The ids of a text, of which the last `scored` ids are scored."""

    ids: list[int]
    scored: int
    request: int  # its number


class Branch(NamedTuple):
    """A text in a row. Its beginning is that of the row, and the rest are the ids from `start` to `end`."""

    request: int  # its number
    shared: int  # ids of the beginning of the row
    start: int
    end: int
    columns: list[int]  # of the row; the logits after these ids are for the targets
    targets: list[int]


class Row:
    """A text, and other texts that branch off from it. Common beginnings are computed once."""

    def __init__(self, text: Text) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.branches: list[Branch] = []
        self._append(text, 0)
        self.trunk = len(self.ids)

    def add(self, text: Text, *, most: int) -> bool:
        """Add a text if half of it is the beginning of the row and the row then has at most `most` ids."""
        inputs = text.ids[:-1]  # the last id has no target
        shared = len(os.path.commonprefix([self.ids[: self.trunk], inputs]))
        added = len(inputs) - shared
        if shared < added or len(self.ids) + added > most:
            return False
        self._append(text, shared)
        return True

    def _append(self, text: Text, shared: int) -> None:
        start = len(self.ids)
        inputs = text.ids[:-1]  # the last id has no target
        self.ids += inputs[shared:]
        self.positions += range(shared, len(inputs))
        end = len(self.ids)
        columns = [*range(shared), *range(start, end)]
        branch = Branch(
            request=text.request,
            shared=shared,
            start=start,
            end=end,
            columns=columns[-text.scored :],
            targets=text.ids[-text.scored :],
        )
        self.branches.append(branch)

    def mask(self, length: int) -> torch.Tensor:
        """Return which id attends to which, of shape [length, length]."""
        seen = torch.tril(torch.ones(length, length, dtype=torch.bool))
        for branch in self.branches:
            seen[branch.start : branch.end, branch.shared : branch.start] = False
        return seen
