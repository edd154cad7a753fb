"""Measure the bytes per token that GPT-2 124M saves for the backward pass.

    python benchmarks/saved_bytes.py

The script compares the model of this project with the stock model of transformers. The models run on the CPU under
bf16 autocast, without torch.compile.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel


sys.path.insert(0, str(Path(__file__).parents[1]))


def saved_bytes_per_token(
    model: PreTrainedModel, call: Callable[..., torch.Tensor], *, length: int, counts: tuple[int, int] = (1, 9)
) -> float:
    """Return the bytes that are saved for the backward pass, per additional token.

    Args:
        call: a function that returns the loss of the model for token ids of shape [count, length].
        counts: numbers of rows of the two batches that are compared.
    """

    def saved(count: int) -> int:
        storages: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        rows = torch.randint(0, 500, (count, length))
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):  # noqa: SIM117
            with torch.autocast("cpu", torch.bfloat16):
                loss = call(model, rows)
        loss.backward()  # keeps all saved tensors alive until here, so that no address is reused
        model.zero_grad()
        return sum(storages.values())

    # The difference excludes memory that does not grow with the batch, such as weights cast to bf16.
    return (saved(counts[1]) - saved(counts[0])) / ((counts[1] - counts[0]) * length)


def main() -> None:
    from benchmarks.machine import print_columns, print_header, print_row
    from gpt2_repro.model.arguments import ModelArguments
    from gpt2_repro.model.build import build_model
    from gpt2_repro.model.configuration import build_config

    config = build_config(ModelArguments(), sequence_length=1024, vocab_size=50_257)
    contenders = {
        "stock GPT2Config()": (
            GPT2LMHeadModel(GPT2Config(use_cache=False)).train(),
            lambda model, rows: model(input_ids=rows, labels=rows).loss,
        ),
        "this project": (
            build_model(config, attention="causal_sdpa").train(),
            lambda model, rows: model(input_ids=rows, shift_labels=rows.roll(-1, 1)).loss,
        ),
    }
    print_header("torch", "transformers")
    print_columns("model", "KiB per token", "with activation checkpointing")
    for name, (model, call) in contenders.items():
        figures = []
        for checkpointing in (False, True):
            if checkpointing:
                model.activation_checkpointing_enable()
            figures.append(saved_bytes_per_token(model, call, length=256, counts=(1, 3)) / 1024)
        print_row(name, *(f"{figure:,.0f}" for figure in figures))


if __name__ == "__main__":
    main()
