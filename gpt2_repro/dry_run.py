"""Print the plan of a training run without training: `train.py --dry_run`."""

import dataclasses
from pathlib import Path

from gpt2_repro.batch_plan import BY_LENGTH
from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.data.tokenizer import expected_vocab_size
from gpt2_repro.errors import UserError
from gpt2_repro.manifest import MANIFEST
from gpt2_repro.model.scale import scale_of
from gpt2_repro.model.size import gpt2_parameters
from gpt2_repro.training.arguments import TrainingRecipe, count_steps
from gpt2_repro.training.sizing import check_strategy, epochs_of, fitting_rows, follow_data, plan_run, workload_of


def dry_run(requested: TrainingRecipe) -> None:
    """Print the resolved recipe and the numbers that are computed from it.

    These numbers include the parameters, the optimizer steps and the size of a checkpoint. Prepared data is needed
    only if the tokenizer's name does not determine the vocabulary size.

    Raises UserError if the sampling strategy group_by_length does not work with the recipe's other settings.
    """
    recipe = follow_data(requested)
    data, training = recipe.data, recipe.training
    check_strategy(training, data)
    vocabulary = expected_vocab_size(data.tokenizer)
    if vocabulary is None:
        prepared = PreparedData.read(data.dataset_dir, command=f"python prepare_data.py {recipe.path}")
        vocabulary = prepared.manifest.vocab_size
    length, work = data.sequence_length, workload_of(recipe)
    scale = scale_of(recipe.model, sequence_length=length, vocab_size=vocabulary)

    print(recipe.to_yaml())
    padded = f"because the vocabulary of {vocabulary:,} ids is padded to {scale.padded_vocab_size:,}"
    padded = f" ({scale.trained:,} while training, {padded})" if scale.padded_vocab_size > vocabulary else ""
    print(f"parameters        {scale.parameters:,}{padded}")
    if scale.active < scale.parameters:
        print(f"  active          {scale.active:,} parameters per token")
    shape = {"n_layer": recipe.model.n_layer, "n_embd": recipe.model.n_embd}
    if (gpt2 := gpt2_parameters(**shape, n_positions=length, vocab_size=vocabulary)) != scale.parameters:
        print(f"  GPT-2           {gpt2:,} parameters with these layers and this width")
    by_length = training.train_sampling_strategy == BY_LENGTH
    rows = "targets, without padding" if by_length else f"{training.tokens_per_step // length:,} rows x {length:,}"
    divides = by_length or training.tokens_per_step % length == 0
    print(
        f"tokens per step   {training.tokens_per_step:,} {'' if by_length else '= '}{rows if divides else ''}".rstrip(
            " ="
        )
    )
    for processes in (1, 2, 4, 8):
        if not requested.training.per_device_train_batch_size:
            micro_batch = fitting_rows(recipe, processes)
            training = dataclasses.replace(training, per_device_train_batch_size=micro_batch)
        gpus = "1 GPU" if processes == 1 else f"{processes} GPUs"
        try:
            plan = plan_run(training, data, num_processes=processes)
        except UserError as error:
            print(f"  on {gpus:<12} {error}")
            continue
        a_pass = f"at most {plan.positions_per_pass:,} positions" if by_length else f"{plan.micro_batch_size} rows"
        steps = f"{plan.gradient_accumulation_steps} accumulation steps"
        print(f"  on {gpus:<12} {a_pass} x {gpus} x {steps}")
    max_steps = count_steps(training)
    tokens = max_steps * training.tokens_per_step
    bound = "at most " if data.packing == "wrap" and not by_length else ""
    print(f"steps             {max_steps:,} = {bound}{tokens:,} tokens")
    if Path(data.dataset_dir, MANIFEST).is_file():
        opened = PreparedData.open(data, typed=recipe.typed, recipe=recipe.path)
        epochs = epochs_of(recipe, opened.manifest.counts["train"])
        print(f"epochs            {epochs:,.2f} of {data.dataset_dir}")
    flops = scale.flops_per_token * tokens
    print(f"FLOPs             {scale.flops_per_token / 1e6:,.1f} M per token (6N + 12LCT), {flops:.3g} in total")
    print(f"checkpoint        {work.checkpoint_bytes / 1e9:.2f} GB each")
    print(f"final model       {work.final_bytes / 1e9:.2f} GB in fp32")
