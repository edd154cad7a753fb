"""Pre-train a GPT-2 from a prepared folder. A run is a sentence: launcher, story, recipe, overrides.

    accelerate launch --config_file accelerate_configs/zero1.yaml train.py
    accelerate launch --config_file accelerate_configs/zero1.yaml --num_processes 1 train.py recipes/gpt2_124m.yaml
    python train.py recipes/gpt2_124m.yaml --dry_run

Start the same command again to resume; a finished run is left as it is.
"""

from typing import Any

from gpt2_repro import cli, diff_recipe, dry_run
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.manifest import open_manifest, require_prepared
from gpt2_repro.evaluation.arguments import EvaluationArguments
from gpt2_repro.model.arguments import ModelArguments, check_documents, follow_checkpoint
from gpt2_repro.recipe import parse_recipe
from gpt2_repro.supervision import RUN, note
from gpt2_repro.training.launcher import end_with_launcher


OPTIONS = ("data", "model", "training")
EXTRAS: dict[str, dict[str, Any]] = {
    "dry_run": {"action": "store_true", "help": "Print the resolved recipe and what it derives, and stop."},
    "diff_recipe": {"metavar": "RECIPE", "help": "Print how the run deviates from this recipe, and stop."},
}


def main(argv: list[str]) -> None:
    """Parse, check, build, train, save."""
    end_with_launcher()
    require_prepared(argv)

    from gpt2_repro.training.arguments import PretrainingArguments

    sections = dict(
        data=DataArguments, model=ModelArguments, training=PretrainingArguments, evaluation=EvaluationArguments
    )
    recipe = parse_recipe(argv, sections=sections, options=OPTIONS, description=__doc__, extras=EXTRAS)
    follow_checkpoint(recipe)
    data_args, model_args = DataArguments(**recipe.values["data"]), ModelArguments(**recipe.values["model"])
    check_documents(model_args, packing=data_args.packing, separator=data_args.separator)
    if recipe.extras.dry_run:
        return dry_run.dry_run(recipe, data_args, model_args)
    if recipe.extras.diff_recipe is not None:
        return diff_recipe.diff_recipe(recipe, recipe.extras.diff_recipe)

    manifest = open_manifest(recipe)

    # Mistakes are answered here, before the rest of the stack is imported and anything is built.
    from gpt2_repro.run_record import RunDirectory
    from gpt2_repro.training.resolve import resolve_arguments, run_identity_of
    from gpt2_repro.training.resuming import choose_start

    length, names = data_args.sequence_length, {"stem": recipe.path.stem, "title": recipe.title}
    args, plan = resolve_arguments(recipe.values["training"], sequence_length=length, manifest=manifest, **names)
    main_process = args.process_index == 0
    run = RunDirectory(str(args.output_dir))
    run_identity = run_identity_of(args, plan, data=manifest, model=recipe.values["model"])
    run.check_owner()
    run.check_identity(run_identity, allow_change=args.allow_resume_change)
    if not args.resume_from and run.is_finished(args.extend_to // plan.tokens_per_step or plan.max_steps):
        note(RUN, str(run.path.resolve()))
        return print(f"{run.path} is already complete: {run.path}/final") if main_process else None
    start, plan = choose_start(run, args, plan, run_identity)

    from transformers import set_seed

    from gpt2_repro.model.build import build_model, choose_attention
    from gpt2_repro.model.configuration import build_config
    from gpt2_repro.model.document_mask import documents_of
    from gpt2_repro.training.announce import announce, describe_run
    from gpt2_repro.training.fit import fit
    from gpt2_repro.training.inputs import open_inputs
    from gpt2_repro.training.trainer import PretrainingTrainer

    inputs = open_inputs(data_args, manifest, args)
    tokenizer = inputs.tokenizer
    config = build_config(model_args, sequence_length=length, vocab_size=manifest["vocab_size"], tokenizer=tokenizer)
    documents = documents_of(tokenizer, data_args.separator) if model_args.document_mask else None
    device = {"cuda": not args.use_cpu, "bf16": args.bf16, "one_row_compiled": args.compiles_one_row}
    attention = choose_attention(model_args.attn_implementation, document_mask=model_args.document_mask, **device)
    set_seed(args.seed)
    init_from = "" if start.checkpoint else model_args.init_from
    model = build_model(
        config, tokenizer, attention=attention[0], init_from=init_from, documents=documents, compiled=args.compile_loss
    )

    if main_process:
        run.claim(recipe.to_yaml(output_dir=args.output_dir, resume_from=""))
    environment = announce(describe_run(args, plan, model, manifest, attention, diff_recipe.beside_default(recipe)))
    trainer = PretrainingTrainer(
        model=model, args=args, inputs=inputs, plan=plan, run=run, environment=environment, run_identity=run_identity
    )
    fit(trainer, start)


if __name__ == "__main__":
    cli.run(main)
