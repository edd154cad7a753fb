"""Pre-train or fine-tune with a recipe, from step 0 or from a checkpoint."""

import dataclasses
import functools
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from accelerate.utils import broadcast_object_list

from gpt2_repro.batch_plan import BatchPlan
from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.errors import UserError
from gpt2_repro.hardware import find_accelerator
from gpt2_repro.recipe import values_of
from gpt2_repro.run_record import RunRecord, checkpoints
from gpt2_repro.run_record.checkpoint import resolve_checkpoint
from gpt2_repro.run_record.supervision import RUN, note
from gpt2_repro.training.arguments import TrainingRecipe, output_dir_of
from gpt2_repro.training.resolve import resolve_arguments
from gpt2_repro.training.resuming import choose_start, require_same_form, require_same_run, run_identity_of


logger = logging.getLogger(__name__)


def pretrain(recipe: TrainingRecipe, data: PreparedData, *, deviations: dict[str, Any]) -> None:
    """Start or resume the run of a recipe. A finished run is not changed.

    This is a collective: call it on all ranks.

    Args:
        recipe: a recipe whose model and batch sizes are set (not 0), see `sizing.follow_data`.
        deviations: the result of `diff_recipe.compare_with_default`, to be written to environment.json.

    Raises UserError for wrong settings, before the model is built. Raises RunFailed if the run fails.
    """
    manifest = data.manifest
    identity_of = functools.partial(run_identity_of, data=manifest, model=values_of(recipe.model))

    run = RunRecord(output_dir_of(recipe))

    def check(settings: SimpleNamespace, plan: BatchPlan) -> None:
        run.check_owner()
        found = checkpoints.complete_checkpoints(run.path) if run.path.is_dir() else []
        if recipe.model.init_from and not found:
            resolve_checkpoint(recipe.model.init_from)
        if run.path.is_dir() and run.status().state != "complete":
            if os.environ.get("RANK", "0") == "0":
                run.lock()
            # choose_start repeats this check for the checkpoint that it chooses.
            if settings.resume_from and not (run.path / Path(settings.resume_from).name).is_dir():
                checkpoints.named(run.path, settings.resume_from)
            if found and not settings.resume_from:
                require_same_form(found[0], checkpoints.read_manifest(found[0])["files"])
        data.check_tokenizer()
        for split in manifest.shards:
            data.check_shards(split)
        if saved := run.environment().run_identity:
            require_same_run(
                saved, identity_of(settings, plan), where=run.path, allow_change=settings.allow_resume_change
            )

    args, plan = resolve_arguments(recipe, check=check)
    run_identity = identity_of(args, plan)
    if 0 < args.extend_to < plan.total_tokens:
        raise UserError(
            f"--extend_to {args.extend_to} is less than the {plan.total_tokens} tokens of the run. Pass a larger "
            "--extend_to."
        )
    is_finished = run.is_finished(args.extend_to // plan.tokens_per_step or plan.max_steps) and not args.resume_from
    # Rank 0 decides for all ranks. Other machines may see an older state of the file system and would wait forever.
    if broadcast_object_list([is_finished])[0]:
        note(RUN, str(run.path.resolve()))
        if args.process_index == 0 and run.status().state != "complete":
            run.write_status("complete", reason=None)
        return logger.info("%s is already complete: %s. To train again, pass a new --output_dir.", run.path, run.final)
    start, args, plan, extensions = choose_start(run, args, plan, run_identity)
    run_identity = run_identity | {"extensions": extensions}

    # Imported after the checks, so that mistakes are reported before the slow imports.
    from transformers import set_seed

    from gpt2_repro.model.attention import Machine, choose_attention
    from gpt2_repro.model.build import build_model
    from gpt2_repro.model.configuration import build_config
    from gpt2_repro.model.document_mask import documents_of
    from gpt2_repro.training.announce import announce, describe_run
    from gpt2_repro.training.fit import fit
    from gpt2_repro.training.inputs import open_inputs
    from gpt2_repro.training.tracking import prepare_wandb
    from gpt2_repro.training.trainer import PretrainingTrainer

    inputs = open_inputs(data, args)
    tokenizer = inputs.tokenizer
    shape = {"sequence_length": plan.sequence_length, "vocab_size": manifest.vocab_size}
    config = build_config(recipe.model, **shape, tokenizer=tokenizer)
    documents = documents_of(tokenizer, recipe.data.separator) if recipe.model.document_mask else None
    machine = Machine(
        cuda=not args.use_cpu,
        bf16=args.bf16,
        length=plan.sequence_length,
        one_row_compiled=args.compiles_one_row,
        document_mask=recipe.model.document_mask,
    )
    requested, attention = recipe.model.attn_implementation, None
    if requested != "auto" or args.process_index == 0:
        attention = choose_attention(
            requested, machine, config, rows=plan.micro_batch_size, earlier=_attention_of(run, use_cpu=args.use_cpu)
        )
    attention = broadcast_object_list([attention])[0]  # timings differ between ranks, so rank 0 decides
    set_seed(args.seed)
    init_from = "" if start.checkpoint else recipe.model.init_from
    model = build_model(
        config,
        tokenizer,
        attention=attention.name,
        init_from=init_from,
        documents=documents,
        compiled=args.compile_loss,
    )
    if args.process_index == 0:
        training = dataclasses.replace(recipe.training, output_dir=args.output_dir, resume_from="")
        run.claim(dataclasses.replace(recipe, training=training).to_yaml())
    chosen = {"attention": str(attention), "run_identity": run_identity}
    environment = announce(describe_run(args, plan, model, manifest, **chosen, **deviations))
    prepare_wandb(args.report_to, run.path)  # before the Trainer imports wandb
    trainer = PretrainingTrainer(model=model, args=args, inputs=inputs, run=run, environment=environment)
    fit(trainer, start)


def _attention_of(run: RunRecord, *, use_cpu: bool) -> str:
    """Return the attention kernel of the run's previous attempt, or "" if unknown.

    The result is also "" if that attempt used another type of GPU.
    """
    earlier = run.environment()
    if earlier.accelerator.name != find_accelerator(use_cpu=use_cpu).name:
        return ""
    return earlier.engine.get("attention") or (earlier.attention or "").partition(" ")[0]
