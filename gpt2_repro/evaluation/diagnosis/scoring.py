"""Score rows: a model's loss on each token."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from gpt2_repro.evaluation.diagnosis.texts import Losses, Row
from gpt2_repro.evaluation.hellaswag import batches_by_length


POSITIONS = 4096  # of one forward pass, padding included; logits of GPT-2's vocabulary and their softmax take 1.6 GB


@torch.inference_mode()
def score_rows(model: Any, parts: Mapping[str, Sequence[Row]], *, device: str, name: str) -> dict[str, Losses]:
    """Return the losses of each part's rows. The model is moved to `device`, and then to the CPU."""
    model = model.float().to(device).eval()
    rows = [row.ids for part in parts.values() for row in part]
    scored: dict[int, NDArray[np.float32]] = {}
    for numbers in tqdm(batches_by_length([len(row) for row in rows], POSITIONS), desc=name):
        # Padding is on the right, so that no position of a row sees it.
        ids = [torch.from_numpy(rows[number].astype(np.int64)) for number in numbers]
        batch = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True).to(device)
        wanted = batch[:, 1:]
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits.float()
        flat = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
        losses = flat.view(wanted.shape).cpu().numpy()
        scored |= {number: losses[line, : len(rows[number]) - 1] for line, number in enumerate(numbers)}
    model.to("cpu")
    in_order = iter([scored[number] for number in range(len(rows))])
    return {part: list(itertools.islice(in_order, len(its))) for part, its in parts.items()}
