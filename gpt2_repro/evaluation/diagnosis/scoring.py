"""What a model loses on each token of rows."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from gpt2_repro.evaluation.diagnosis.texts import Ids


POSITIONS = 4096  # of one forward pass, padding included; logits of GPT-2's vocabulary and their softmax take 1.6 GB


class RowScore(NamedTuple):
    """Of a row's ids behind the first."""

    losses: NDArray[np.float32]  # [targets], nats
    hits: NDArray[np.bool_]  # [targets], whether the target was the likeliest


@torch.inference_mode()
def score_rows(model: Any, rows: Sequence[Ids], *, device: str, name: str) -> list[RowScore]:
    """The scores of each row, in the order of the rows. The model is on `device` meanwhile, and then on the CPU."""
    model = model.float().to(device).eval()
    scores: dict[int, RowScore] = {}
    with tqdm(desc=name, total=sum(len(row) - 1 for row in rows), unit="tok", unit_scale=True) as bar:
        for numbers in _batches([len(row) for row in rows]):
            batch = torch.zeros(len(numbers), len(rows[numbers[0]]), dtype=torch.int64)
            for line, number in enumerate(numbers):
                batch[line, : len(rows[number])] = torch.from_numpy(rows[number].astype(np.int64))
            batch = batch.to(device)
            # Padded on the right, behind all that a row's own positions see.
            wanted = batch[:, 1:]
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits.float()
            flat = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
            losses = flat.view(wanted.shape).cpu().numpy()
            hits = (logits.argmax(-1) == wanted).cpu().numpy()
            for line, number in enumerate(numbers):
                targets = len(rows[number]) - 1
                scores[number] = RowScore(losses[line, :targets], hits[line, :targets])
                bar.update(targets)
    model.to("cpu")
    return [scores[number] for number in range(len(rows))]


def _batches(lengths: Sequence[int]) -> list[list[int]]:
    """Row numbers, longest first, in batches of at most POSITIONS, or of one row."""
    batches: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= POSITIONS:
            batches[-1].append(number)
        else:
            batches.append([number])
    return batches
