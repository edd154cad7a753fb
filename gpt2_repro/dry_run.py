"""What a run would be, without running it: `train.py --dry_run`."""

import functools
from collections.abc import Mapping
from typing import Any

from gpt2_repro.batch_plan import BY_LENGTH, check_strategy, checkpoint_bytes, forward_share, plan_run
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.data.tokenizer import expected_vocab_size
from gpt2_repro.errors import UserError
from gpt2_repro.hardware import PEAK_FLOPS
from gpt2_repro.model.arguments import ModelArguments
from gpt2_repro.model.scale import scale_of
from gpt2_repro.recipe import ParsedRecipe


# GPT-2's tokens of HellaSwag's 40,168 rows, with the padding of passes of 65,536 positions (tests/evaluation/test_hellaswag.py).
HELLASWAG_TOKENS = 3_034_080


def dry_run(recipe: ParsedRecipe, data_args: DataArguments, model_args: ModelArguments) -> None:
    """Print the resolved recipe and everything derived from it. Needs no data, no GPU, no launcher.

    Raises UserError where the sampling strategy does not fit.
    """
    training = recipe.values["training"]
    check_strategy(training, packing=data_args.packing)
    vocabulary = expected_vocab_size(data_args.tokenizer)
    if vocabulary is None:
        data = PreparedData.read(data_args.dataset_dir, command=f"python prepare_data.py {recipe.path}")
        vocabulary = data.manifest.vocab_size
    length = data_args.sequence_length
    scale = scale_of(model_args, sequence_length=length, vocab_size=vocabulary)

    print(recipe.to_yaml())
    padded = f"vocabulary {vocabulary:,} padded to {scale.padded_vocab_size:,}"
    print(f"parameters        {scale.parameters:,} ({scale.trained:,} while training, {padded})")
    if scale.active < scale.parameters:
        print(f"  active          {scale.active:,} for a token")
    by_length = training["train_sampling_strategy"] == BY_LENGTH
    tokens_per_step = training["tokens_per_step"]
    rows = "targets, without padding" if by_length else f"{tokens_per_step // length:,} rows x {length:,}"
    print(f"tokens per step   {tokens_per_step:,} {'' if by_length else '= '}{rows}")
    form = {key: recipe.values["data"][key] for key in ("sequence_length", "packing", "min_length")}
    for processes in (1, 2, 4, 8):
        try:
            plan = plan_run(training, **form, num_processes=processes)
        except UserError as error:
            print(f"  on {processes} GPUs       {error}")
            continue
        a_pass = f"at most {plan.positions_per_pass:,} positions" if by_length else f"{plan.micro_batch_size} rows"
        steps = f"{plan.gradient_accumulation_steps} accumulation steps"
        print(f"  on {processes} GPUs       {a_pass} x {processes} x {steps}")
    max_steps = training["max_steps"] or training["total_tokens"] // tokens_per_step
    tokens = max_steps * tokens_per_step
    bound = "at most " if data_args.packing == "wrap" and not by_length else ""
    print(f"steps             {max_steps:,} = {bound}{tokens:,} tokens")
    if training["eval_strategy"] != "no" and (between := _between(training)):
        print(f"between steps     {', '.join(between)} of their time: a third of their FLOPs a token")
    flops = scale.flops_per_token * tokens
    print(f"FLOPs             {scale.flops_per_token / 1e6:,.1f} M a token (6N + 12LCT), {flops:.3g} in all")
    hours = flops / (0.5 * PEAK_FLOPS["H100"]) / 3600
    print(f"                  {hours:.1f} hours on one H100 at 50 % of its peak: arithmetic, not a measurement")
    print(f"checkpoint        {checkpoint_bytes(scale.trained, bf16=training['bf16']) / 1e9:.2f} GB each")
    print(f"final             {scale.parameters * 4 / 1e9:.2f} GB in fp32")


def _between(training: Mapping[str, Any]) -> list[str]:
    """What is measured between steps, with its share in their time."""
    often, scored = training["eval_steps"], training["hellaswag_steps"]
    # HellaSwag is scored with a validation, so never more often than one.
    work = (
        ("validation", training["eval_tokens"], often),
        ("HellaSwag", HELLASWAG_TOKENS, scored and max(scored, often)),
    )
    forward = functools.partial(forward_share, tokens_per_step=training["tokens_per_step"])
    return [f"{name} {forward(tokens, every_steps=steps):.2%}" for name, tokens, steps in work if tokens and steps]
