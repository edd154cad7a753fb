"""Describe a run: parameters, batches, length, FLOPs and sizes on disk."""

from pathlib import Path

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.data.tokenizer import expected_vocab_size
from gpt2_repro.errors import UserError
from gpt2_repro.manifest import MANIFEST, Manifest
from gpt2_repro.model.arguments import ModelArguments
from gpt2_repro.model.scale import scale_of
from gpt2_repro.model.size import gpt2_parameters
from gpt2_repro.planning.cost import Workload
from gpt2_repro.planning.sizing import Plans
from gpt2_repro.run_record.environment import BatchPlan
from gpt2_repro.text import Cell, Table, size


def run_lines(data: DataArguments, model: ModelArguments, work: Workload, plans: Plans) -> list[str]:
    """Return the numbers of a run as lines of text. Prepared data is not needed."""
    is_prepared = Path(data.dataset_dir, MANIFEST).is_file()
    manifest = PreparedData.read(data.dataset_dir).manifest if is_prepared else None
    rows = [
        *_size_rows(data, model, manifest),
        *_step_rows(data, work, plans),
    ]
    if manifest:
        epochs = work.tokens / max(1, manifest.counts["train"].row_tokens)
        rows.append(("epochs", f"{epochs:,.2f} of {data.dataset_dir}"))
    flops_per_token = work.flops / work.tokens
    rows += [
        ("FLOPs", f"{flops_per_token / 1e6:,.1f} M per token (6N + 12LCT), {work.flops:.3g} in total"),
        ("checkpoint", f"{work.checkpoint_bytes / 1e9:.2f} GB each, with DeepSpeed"),
        ("final model", f"{work.final_bytes / 1e9:.2f} GB in fp32"),
        ("disk", f"{size(work.data_bytes)} for the data, {size(work.run_bytes)} for the run"),
    ]
    return Table(["", ""], [[Cell(label), Cell(text)] for label, text in rows]).lines()[1:]


def _size_rows(data: DataArguments, model: ModelArguments, manifest: Manifest | None) -> list[tuple[str, str]]:
    """Return label and text of each row about the parameters."""
    length = data.sequence_length
    known = manifest.vocab_size if manifest else expected_vocab_size(data.tokenizer)
    vocabulary = known or 50_257
    scale = scale_of(model, sequence_length=length, vocab_size=vocabulary)
    parameters = f"{scale.parameters:,}"
    if scale.padded_vocab_size > vocabulary:
        parameters += f" ({scale.trained:,} while training, with the vocabulary of {vocabulary:,} ids padded)"
    rows = [("parameters", parameters)]
    if not known:
        rows.append(("  vocabulary", f"assumed to have {vocabulary:,} ids, because the data is not prepared"))
    if scale.active < scale.parameters:
        rows.append(("  active", f"{scale.active:,} parameters per token"))
    gpt2 = gpt2_parameters(n_layer=model.n_layer, n_embd=model.n_embd, n_positions=length, vocab_size=vocabulary)
    if gpt2 != scale.parameters:
        rows.append(("  GPT-2", f"{gpt2:,} parameters with these layers and this width"))
    return rows


def _step_rows(data: DataArguments, work: Workload, plans: Plans) -> list[tuple[str, str]]:
    """Return label and text of each row about the steps."""
    length = data.sequence_length
    tokens_per_step = work.tokens // work.steps
    step = f"{tokens_per_step:,}"
    if tokens_per_step % length == 0:
        step += f" = {tokens_per_step // length:,} rows x {length:,}"
    rows = [("tokens per step", step)]
    planned = work.steps
    for count, plan in plans.items():
        rows.append((f"  on {_gpus(count)}", division(plan)))
        if isinstance(plan, BatchPlan):
            planned = max(planned, plan.max_steps)
    bound = "at most " if data.packing == "wrap" else ""
    steps = f"{work.steps:,} = {bound}{work.tokens:,} tokens"
    if planned > work.steps:
        steps += f", of the {planned:,} steps of the schedule"
    rows.append(("steps", steps))
    return rows


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def division(plan: BatchPlan | UserError) -> str:
    """Return how a step is divided, such as `64 rows x 8 GPUs x 1 accumulation steps`."""
    if isinstance(plan, UserError):
        return str(plan)
    gpus = _gpus(plan.num_processes)
    return f"{plan.micro_batch_size} rows x {gpus} x {plan.gradient_accumulation_steps} accumulation steps"
