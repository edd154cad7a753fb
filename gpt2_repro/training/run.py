"""The story of a run until it trains: check, choose where to start, and build. `fit.py` has the rest."""

import logging
import os
from typing import Any

from gpt2_repro.config import values_of
from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.errors import UserError
from gpt2_repro.hardware import find_accelerator
from gpt2_repro.launchers import deepspeed_json
from gpt2_repro.run_record import RunRecord
from gpt2_repro.run_record.checkpoint import resolve_checkpoint
from gpt2_repro.run_record.supervision import RUN, note
from gpt2_repro.training.arguments import TrainingRecipe
from gpt2_repro.training.copying import RunCopier
from gpt2_repro.training.restoring import restore_before_start
from gpt2_repro.training.resuming import Start, choose_start, run_identity_of
from gpt2_repro.training.settings import resolve_settings, to_training_arguments


logger = logging.getLogger(__name__)


def train(recipe: TrainingRecipe, data: PreparedData, *, deviations: dict[str, Any]) -> None:
    """Start or resume the run of a recipe. A finished run is not changed.

    This is a collective: call it on all ranks.

    Args:
        recipe: a recipe whose model and batch sizes are set (not 0), see `sizing.follow_data`.
        deviations: the result of `deviations.compare_with_default`, to be written to environment.json.

    Raises UserError for wrong settings, before the model is built. Raises RunFailed if the run fails.
    """
    # --- Settings and checks, before torch is imported
    manifest, model_section = data.manifest, recipe.model
    settings, plan = resolve_settings(recipe)
    run = RunRecord(str(settings.output_dir))
    data.check_tokenizer()
    for split in manifest.shards:
        data.check_shards(split)
    identity = run_identity_of(settings, plan, data=manifest, model=values_of(model_section))
    restore_before_start(run, settings, identity)

    # --- Where to start: rank 0 decides, because other machines may see an older state of the file system
    start: Start | UserError | None = None
    if os.environ.get("RANK", "0") == "0":
        try:
            start = choose_start(run, settings, plan, identity)
            if model_section.init_from and not start.checkpoint and not start.is_finished:
                resolve_checkpoint(model_section.init_from)
        except UserError as error:
            # The launcher ends the processes of its own machine only. The others would wait for rank 0.
            if os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1"):
                raise
            start = error
    args = to_training_arguments(settings, plan)  # starts the process group

    from accelerate.utils import broadcast_object_list
    from transformers import set_seed

    from gpt2_repro.model.architecture import check_architecture
    from gpt2_repro.model.attention import Machine, choose_attention
    from gpt2_repro.model.build import build_model
    from gpt2_repro.model.configuration import build_config
    from gpt2_repro.model.document_mask import documents_of
    from gpt2_repro.training import ranks
    from gpt2_repro.training.announce import announce, describe_run
    from gpt2_repro.training.fit import add_callbacks, fit
    from gpt2_repro.training.inputs import open_inputs
    from gpt2_repro.training.tracking import prepare_tracking
    from gpt2_repro.training.trainer import PretrainingTrainer
    from gpt2_repro.training.when import validates_at_start

    zero_config = deepspeed_json()
    further = {"plan": plan, "eval_tokens": settings.eval_tokens, "data": manifest.sha256}
    further["DeepSpeed JSON"] = zero_config and zero_config.read_bytes()
    (start,) = broadcast_object_list([start])
    if isinstance(start, UserError):
        raise start
    ranks.check_equal(identity | further)
    if start.is_finished:
        note(RUN, str(run.path.resolve()))
        if args.process_index == 0:
            if run.status().state != "complete":
                run.write_status("complete", reason=None)
            if settings.sync_to:
                copier = RunCopier(run, settings, identity)
                for _ in copier.finish():
                    pass
                copier.require_copied()
        return logger.info("%s is already complete: %s. To train again, pass a new --output_dir.", run.path, run.final)
    plan, identity = start.plan, identity | {"extensions": start.extensions}
    args.max_steps = plan.max_steps
    args.eval_on_start = validates_at_start(args, start.step, is_validated=start.is_validated)

    # --- Data and model
    inputs = open_inputs(data, args)
    shape: Any = {"sequence_length": plan.sequence_length, "vocab_size": manifest.vocab_size}
    config = build_config(model_section, **shape, tokenizer=inputs.tokenizer)
    is_masked, is_cuda = model_section.document_mask, args.device.type == "cuda"
    check_architecture(config, document_mask=is_masked)
    one_row = args.compile_loss and 1 in (args.per_device_train_batch_size, args.per_device_eval_batch_size)
    machine = Machine(is_cuda, args.bf16, plan.sequence_length, one_row, is_masked, fp16=args.fp16)
    requested, attention = model_section.attn_implementation, None
    if requested != "auto" or args.process_index == 0:
        earlier = _attention_of(run, use_cpu=args.use_cpu)
        attention = choose_attention(requested, machine, config, rows=plan.micro_batch_size, earlier=earlier)
    attention = broadcast_object_list([attention])[0]  # timings differ between ranks, so rank 0 decides
    set_seed(args.seed)
    documents = documents_of(inputs.tokenizer, recipe.data.separator) if is_masked else None
    init_from = "" if start.checkpoint else model_section.init_from
    options: Any = {"attention": attention.name, "documents": documents, "compiled": args.compile_loss}
    model = build_model(config, inputs.tokenizer, init_from=init_from, **options)

    # --- Trainer
    if args.process_index == 0:
        elsewhere: Any = {"resume_from": "", "sync_to": "", "sync_from": ""}  # not for a run of the stored recipe
        run.claim(recipe.with_training(output_dir=args.output_dir, **elsewhere).to_yaml())
    chosen = {"attention": str(attention), "run_identity": identity}
    environment = announce(describe_run(args, plan, model, manifest, **chosen, **deviations))
    prepare_tracking(args.report_to, run.path)  # before the Trainer imports wandb
    trainer = PretrainingTrainer(model=model, args=args, inputs=inputs, run=run, environment=environment)
    trainer.when.signals.install()
    add_callbacks(trainer)
    return fit(trainer, start)


def _attention_of(run: RunRecord, *, use_cpu: bool) -> str:
    """Return the kernel of the run's previous attempt, or "" if unknown or on another type of GPU."""
    earlier = run.environment()
    if earlier.accelerator.name != find_accelerator(use_cpu=use_cpu).name:
        return ""
    return earlier.engine.get("attention") or (earlier.attention or "").partition(" ")[0]
