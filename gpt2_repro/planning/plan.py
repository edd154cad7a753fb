"""Describe a run: parameters, batches, length, FLOPs and sizes on disk."""

from pathlib import Path

from gpt2_repro.batch_plan import BatchPlan
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.data.tokenizer import expected_vocab_size
from gpt2_repro.errors import UserError
from gpt2_repro.manifest import MANIFEST
from gpt2_repro.model.arguments import ModelArguments
from gpt2_repro.model.scale import scale_of
from gpt2_repro.model.size import gpt2_parameters
from gpt2_repro.planning.cost import Workload
from gpt2_repro.planning.sizing import Plans
from gpt2_repro.text import Cell, Table, size


def run_lines(data: DataArguments, model: ModelArguments, work: Workload, plans: Plans) -> list[str]:
    """Return the numbers of a run as lines of text. Prepared data is not needed."""
    manifest = PreparedData.read(data.dataset_dir).manifest if Path(data.dataset_dir, MANIFEST).is_file() else None
    known = manifest.vocab_size if manifest else expected_vocab_size(data.tokenizer)
    vocabulary, length, tokens_per_step = known or 50_257, data.sequence_length, work.tokens // work.steps
    scale = scale_of(model, sequence_length=length, vocab_size=vocabulary)
    divided = [plan for plan in plans.values() if isinstance(plan, BatchPlan)]
    padded = f" ({scale.trained:,} while training, with the vocabulary of {vocabulary:,} ids padded)"
    lines = [("parameters", f"{scale.parameters:,}{padded * (scale.padded_vocab_size > vocabulary)}")]
    if not known:
        lines.append(("  vocabulary", f"assumed to have {vocabulary:,} ids, because the data is not prepared"))
    if scale.active < scale.parameters:
        lines.append(("  active", f"{scale.active:,} parameters per token"))
    gpt2 = gpt2_parameters(n_layer=model.n_layer, n_embd=model.n_embd, n_positions=length, vocab_size=vocabulary)
    if gpt2 != scale.parameters:
        lines.append(("  GPT-2", f"{gpt2:,} parameters with these layers and this width"))
    rows = "" if tokens_per_step % length else f" = {tokens_per_step // length:,} rows x {length:,}"
    lines.append(("tokens per step", f"{tokens_per_step:,}{rows}"))
    lines += [(f"  on {count} GPU{'s' * (count > 1)}", division(plan)) for count, plan in plans.items()]
    bound = "at most " if data.packing == "wrap" else ""
    planned = max((plan.max_steps for plan in divided), default=work.steps)
    stop = f", of the {planned:,} steps of the schedule" if planned > work.steps else ""
    lines.append(("steps", f"{work.steps:,} = {bound}{work.tokens:,} tokens{stop}"))
    if manifest:
        epochs = work.tokens / max(1, manifest.counts["train"].row_tokens)
        lines.append(("epochs", f"{epochs:,.2f} of {data.dataset_dir}"))
    lines += [
        ("FLOPs", f"{scale.flops_per_token / 1e6:,.1f} M per token (6N + 12LCT), {work.flops:.3g} in total"),
        ("checkpoint", f"{work.checkpoint_bytes / 1e9:.2f} GB each, with DeepSpeed"),
        ("final model", f"{work.final_bytes / 1e9:.2f} GB in fp32"),
        ("disk", f"{size(work.data_bytes)} for the data, {size(work.run_bytes)} for the run"),
    ]
    return Table(["", ""], [[Cell(label), Cell(text)] for label, text in lines]).lines()[1:]


def division(plan: BatchPlan | UserError) -> str:
    """Return how a step is divided, such as `64 rows x 8 GPUs x 1 accumulation steps`."""
    if isinstance(plan, UserError):
        return str(plan)
    gpus = f"{plan.num_processes} GPU{'s' * (plan.num_processes > 1)}"
    return f"{plan.micro_batch_size} rows x {gpus} x {plan.gradient_accumulation_steps} accumulation steps"
