"""Check a machine before a run, and estimate the hours and dollars of the run.

    python -m gpt2_repro.preflight                                           check this machine for the default recipe
    python -m gpt2_repro.preflight recipes/gpt2_124m.yaml --dist --memory    also test the GPU links and the memory
    python -m gpt2_repro.preflight --gpu "A100 SXM" --n 8 --usd_per_hour 14  plan for a machine you have not rented yet
    python -m gpt2_repro.preflight --gpu "RTX 4090" --budget 20              write a recipe for 20 dollars

Each check prints one line: ✓ good, ! a note, ✗ the run would fail. The exit code is 1 if any line has a ✗.
"""

import dataclasses
import logging
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpt2_repro import cli, hardware
from gpt2_repro.batch_plan import TokenCount
from gpt2_repro.config import DEFAULT
from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.errors import UserError
from gpt2_repro.files import write_whole
from gpt2_repro.hardware import Accelerator
from gpt2_repro.launchers import EVALUATE, PREPARE, RECOMMENDED, ROOT, forget_variables, training_command
from gpt2_repro.manifest import MANIFEST
from gpt2_repro.planning import cost, memory
from gpt2_repro.planning.compute_optimal import choose
from gpt2_repro.planning.plan import division, run_lines
from gpt2_repro.planning.recipe import TrainingRecipe, TrainingSection, load_recipe, output_dir_of
from gpt2_repro.planning.sizing import follow_data, plans_of
from gpt2_repro.planning.workload import estimate_memory, plan_run, workload_of
from gpt2_repro.preflight import environment
from gpt2_repro.preflight.links import check_all_reduce
from gpt2_repro.text import Finding


logger = logging.getLogger("gpt2_repro.preflight")
OPTIONS: dict[str, dict[str, Any]] = {
    "gpu": {"metavar": "H100", "help": "GPU to plan for, by words of its name. (default: this machine's GPUs)"},
    "n": {"type": cli.positive_count, "metavar": "N", "help": "Number of GPUs. (default: all GPUs of this machine)"},
    "tokens_per_second": {"type": cli.positive_number, "help": "Speed of all GPUs, with --budget that of GPT-2 124M."},
    "budget": {"type": cli.positive_number, "metavar": "USD", "help": "Write a recipe for this number of dollars."},
    "hours": {"type": cli.positive_number, "help": "Write a recipe for this number of hours."},
    "dist": {"action": "store_true", "help": "Measure and check all-reduces over all GPUs, in at most 30 s."},
    "memory": {"action": "store_true", "help": "Find the largest micro-batch that fits. Each attempt takes minutes."},
}


def main(argv: list[str]) -> None:
    """Print the results of all checks, and the estimated time and cost of the run."""
    forget_variables()
    packages = environment.check_python()
    if any(finding.text.startswith("is not installed") for finding in packages):
        print("\n".join(map(str, packages)))
        sys.exit(1)
    requested = load_recipe(argv, description=__doc__, prog="python -m gpt2_repro.preflight", options=OPTIONS)
    options = requested.options
    device, notes = _device_of(requested)
    if options.budget or options.hours:
        requested = _recipe_within(requested, device)
    if any(note.about == "precision" for note in notes):
        requested = _with_options(requested, precision="fp16")
    recipe = follow_data(requested, device=device)
    if recipe.training.tokens_per_step % (recipe.data.sequence_length * device.count):
        # No micro-batch divides the step: UserError, before a smaller one is proposed.
        plan_run(recipe.training, recipe.data, num_processes=device.count)
    memory_findings, needed = _check_memory(recipe, device)
    requested, recipe = (_with_options(each, **needed or {}) for each in (requested, recipe))
    plan = plan_run(recipe.training, recipe.data, num_processes=device.count)
    work, plans = workload_of(recipe), plans_of(recipe, requested, device)
    findings = notes if options.gpu else [*packages, *_check_machine(recipe, work)]
    findings += [Finding("✓", "step", division(plan)), *memory_findings]
    speed, price = options.tokens_per_second or 0, recipe.training.usd_per_hour
    if speed and (options.budget or options.hours):
        speed *= cost.GPT2_FLOPS_PER_TOKEN * work.tokens / work.flops
    planned = cost.cost_of(work, device.name, device.count, usd_per_hour=price, speed=speed)
    lines = [*map(str, findings), "", *run_lines(recipe.data, recipe.model, work, plans), ""]
    lines += [*planned.lines(), "", *cost.offer_lines()]
    print("\n".join([*lines, *(_commands(requested, device) if needed is not None else [])]))
    sys.exit(any(finding.mark == "✗" for finding in findings))


def _device_of(requested: TrainingRecipe) -> tuple[Accelerator, list[Finding]]:
    """Return the devices to plan for: those of this machine, or those of --gpu.

    Raises UserError if the speed of --gpu is not known.
    """
    options = requested.options
    if options.gpu is None:
        device = hardware.find_accelerator(use_cpu=requested.training.use_cpu)
        return dataclasses.replace(device, count=options.n or (device.count if device.kind == "cuda" else 1)), []
    if options.dist or options.memory:
        raise UserError("--dist and --memory check this machine, but --gpu plans for another machine.")
    cards = cost.cards_named(options.gpu)
    if not cards and not options.tokens_per_second:
        known = ", ".join(cost.CARDS)
        raise UserError(f"The speed of {options.gpu!r} is not known. Pass --tokens_per_second, or --gpu: {known}.")
    text = f"{options.gpu} matches {' and '.join(card.card for card in cards)}. The estimate is for the first"
    notes = [Finding("!", "card", text)] if cards[1:] else []
    if cards and not cards[0].bf16 and requested.training.asked_precision in ("bf16", "auto"):
        text = f"{cards[0].card} has no bf16, so the run is planned in fp16. Pass --precision fp16 to train.py"
        notes.append(Finding("!", "precision", text))
    memory_bytes = cards[0].memory_gb * 10**9 if cards and cards[0].memory_gb else None
    if memory_bytes is None:
        notes.append(Finding("!", "memory", f"not checked, because the memory of {options.gpu} is not known"))
    return Accelerator("cuda", options.gpu, options.n or 1, None, memory_bytes), notes


def _recipe_within(requested: TrainingRecipe, device: Accelerator) -> TrainingRecipe:
    """Write the recipe for --budget or --hours on a machine, and return it.

    Raises UserError if more than half of the time would be spent on other things than training steps.
    """
    options = requested.options
    minutes, speed = _limits(requested, device)
    limit = min(minutes, key=lambda option: minutes[option])
    limit_minutes, flops = minutes[limit], 60 * speed * cost.GPT2_FLOPS_PER_TOKEN  # of a minute

    def others(training: float) -> float:
        """Return the minutes that a run needs besides so many minutes of training steps."""
        choice = choose(flops * training, device.count)
        depth = choice.depth
        model = dataclasses.replace(requested.model, n_layer=depth, n_head=depth, n_embd=64 * depth)
        sizes = {"tokens_per_step": TokenCount(choice.tokens_per_step), "total_tokens": TokenCount(choice.tokens)}
        work = workload_of(dataclasses.replace(requested.with_training(**sizes, warmup_steps=0), model=model))
        entries = cost.budget(work, speed * cost.GPT2_FLOPS_PER_TOKEN * work.tokens / work.flops, basis="estimated")
        return sum(entry.minutes for entry in entries if entry.name != "training steps")

    if 2 * others(limit_minutes / 2) > limit_minutes:
        problem = "More than half of the time would be spent around the training"
        raise UserError(f"{problem}. Pass a larger --{limit}, such as {2 * getattr(options, limit):g}.")
    training = limit_minutes / 2
    for _ in range(5):  # the time of validations and checkpoints depends on the run
        training = limit_minutes - others(training)
    name = f"budget_{getattr(options, limit):g}{'usd' if limit == 'budget' else 'h'}"
    path, card = Path(f"{name}.yaml"), next(iter(cost.cards_named(device.name)), None)
    hours = limit_minutes / 60
    heading = f"A GPT-2 for {hours:.1f} hours on {device.count} x {card.card if card else device.name}."
    text = choose(flops * training, device.count).recipe(name, heading, hours=hours)
    if path.exists() and not (path.is_file() and path.read_bytes() == text.encode()):
        raise UserError(f"{path} exists with other values. Delete or rename it.")
    write_whole(path, text)
    header = [line for line in text.splitlines() if line.startswith("#")]
    print("\n".join([f"wrote {path}", *header, ""]))
    return dataclasses.replace(load_recipe([str(path), *cli.words_of(requested.overrides)]), options=options)


def _limits(requested: TrainingRecipe, device: Accelerator) -> tuple[dict[str, float], float]:
    """Return the minutes that --budget and --hours allow, and the speed of GPT-2 124M. Raises UserError."""
    options = requested.options
    card, known = next(iter(cost.cards_named(device.name)), None), cost.price_of(device.name)
    paid = requested.training.usd_per_hour or (known.usd_per_hour * device.count if known else 0)
    speed = options.tokens_per_second or (card.tokens_per_second * device.count if card else 0)
    if requested.path != DEFAULT:
        raise UserError(f"--budget and --hours write their own recipe. Leave out {requested.path}.")
    if unused := sorted(requested.typed - {*OPTIONS, "usd_per_hour", "accept_any_hardware", "use_cpu"}):
        raise UserError(f"--budget and --hours write their own recipe. Pass --{unused[0]} to train.py afterwards.")
    if options.budget and not paid:
        raise UserError("--budget needs the price of the machine. Pass --usd_per_hour, or --hours instead.")
    if not speed:
        raise UserError("The speed of this machine is not known. Pass --gpu, or --tokens_per_second for GPT-2 124M.")
    hours = {"hours": options.hours, "budget": options.budget and options.budget / paid}
    return {option: 60 * time for option, time in hours.items() if time}, speed


def _with_options(recipe: TrainingRecipe, **values: Any) -> TrainingRecipe:
    """Return a recipe as if these fields of the section training were passed as options."""
    return dataclasses.replace(recipe.with_training(**values), typed=recipe.typed | values.keys())


def _is_launched(recipe: TrainingRecipe, device: Accelerator) -> bool:
    """Return whether accelerate starts the run. On one GPU without bf16, `python train.py` does (docs/machines.md)."""
    return device.count > 1 or (device.kind == "cuda" and recipe.training.precision != "fp16")


def _commands(recipe: TrainingRecipe, device: Accelerator) -> list[str]:
    """Return the commands that prepare, train and evaluate, with the options that were passed."""
    count, options = str(device.count), recipe.overrides
    train = training_command("--num_processes", count, on_gpu=_is_launched(recipe, device))
    of_data = cli.words_of({name: value for name, value in options.items() if hasattr(recipe.data, name)})
    if recipe.data.source == "files" and not recipe.data.data_files:
        of_data += ["--data_files", "FILE"]
    is_prepared = Path(recipe.data.dataset_dir, MANIFEST).is_file()
    lines = [
        *([] if is_prepared else [f"{PREPARE} {shlex.join([str(recipe.path), *of_data])}"]),
        shlex.join([*train, str(recipe.path), *cli.words_of(options)]),
        f"{EVALUATE} {shlex.quote(output_dir_of(recipe))}",
    ]
    return ["", "Commands:", *(f"  {line}" for line in lines)]


def _check_memory(recipe: TrainingRecipe, device: Accelerator) -> tuple[list[Finding], dict[str, Any] | None]:
    """Check that a micro-batch fits on a GPU. Return the finding, if any, and the fields that must change.

    The fields are None if no micro-batch fits.
    """
    training, memory_bytes = recipe.training, device.memory_bytes
    setting = memory.MemoryTrial(training.per_device_train_batch_size, bool(training.activation_checkpointing))
    rows = max(1, training.tokens_per_step // recipe.data.sequence_length // device.count)
    if recipe.options.memory:
        finding, fitting = _find_micro_batch(recipe, setting, rows, device)
    elif memory_bytes:
        estimate = estimate_memory(recipe, workload_of(recipe), memory_bytes, device.count)
        estimate = estimate._replace(sharded=_is_launched(recipe, device))
        finding, fitting = memory.check_memory(estimate, setting, rows, memory_bytes)
    else:
        return [], {}
    if fitting in (None, setting):
        return [finding], None if finding.mark == "✗" else {}
    checkpointing = {"activation_checkpointing": True} if fitting.checkpointing else {}
    return [finding], {"per_device_train_batch_size": fitting.micro_batch} | checkpointing


def _check_machine(recipe: TrainingRecipe, work: cost.Workload) -> list[Finding]:
    """Check the devices, limits, data, disks and (with --dist) links of this machine."""
    import torch

    options, folder = recipe.options, Path(recipe.data.dataset_dir)
    needs = [environment.Need("data", folder, work.missing_bytes)]
    needs.append(environment.Need("the run", Path(recipe.training.output_dir or "runs"), work.run_bytes))
    data = Finding("!", "data", f"{folder} is not prepared yet")
    if (folder / MANIFEST).is_file():
        data = _judge("data", lambda: f"{PreparedData.open(recipe).path} has the settings of the recipe")
    findings = [*_check_devices(recipe), *environment.check_limits(), data, *environment.check_room(needs)]
    if options.dist:
        findings.append(check_all_reduce(options.n or torch.cuda.device_count() or 2))
    return findings


def _check_devices(recipe: TrainingRecipe) -> list[Finding]:
    """Check the driver, the devices, and whether they support precision, torch.compile and attention of a recipe."""
    import torch

    from gpt2_repro.model.attention import Machine, choose_attention
    from gpt2_repro.model.configuration import build_config

    training, model, length = recipe.training, recipe.model, recipe.data.sequence_length
    asked, accept = training.asked_precision, training.accept_any_hardware
    version = f"ROCm {torch.version.hip}" if torch.version.hip else hardware.nvidia_driver()
    driver = Finding("✓" if version else "!", "driver", version or "no NVIDIA device")
    try:
        on_cpu = hardware.choose_device(use_cpu=training.use_cpu, accept_any_hardware=accept)
    except UserError as error:
        return [driver, Finding("✗", "device", str(error))]
    is_bf16, is_fp16 = asked in ("auto", "bf16"), asked == "fp16"
    config = build_config(model, sequence_length=length, vocab_size=128)
    rows, attention = training.per_device_train_batch_size, model.attn_implementation
    device = hardware.find_accelerator(use_cpu=on_cpu)
    machine = Machine(device.kind == "cuda", is_bf16, length, document_mask=model.document_mask, fp16=is_fp16)

    gpus = f"{device.count} x {device.name}, {(device.memory_bytes or 0) / 1e9:.0f} GB each"
    return [
        driver,
        Finding("✓", "device", f"the CPU, {hardware.cpu_cores()} cores" if on_cpu else gpus),
        _judge("precision", lambda: hardware.choose_precision(asked, use_cpu=on_cpu, accept_any_hardware=accept)[1]),
        _check_compile(training, on_cpu=on_cpu),
        _judge("attention", lambda: choose_attention(attention, machine, config, rows=rows)),
    ]


def _check_compile(training: TrainingSection, *, on_cpu: bool) -> Finding:
    """Check whether torch.compile can be used, and warn if a GPU trains without it because something is missing."""
    requested, accept = training.torch_compile, training.accept_any_hardware
    try:
        compiles = hardware.choose_compile(requested, use_cpu=on_cpu, accept_any_hardware=accept)
    except UserError as error:
        return Finding("✗", "torch.compile", str(error))
    missing = hardware.compiler_obstacle(use_cpu=on_cpu)
    if hardware.gpu_kind() == "cuda" and not on_cpu and missing is not None:
        return Finding("!", "torch.compile", f"off: Triton needs {missing}. A GPU trains about half as fast without")
    return Finding("✓", "torch.compile", "on" if compiles else "off")


def _judge(about: str, rule: Callable[[], object]) -> Finding:
    """Return a finding with what `rule` returns, or with its UserError."""
    try:
        return Finding("✓", about, str(rule()))
    except UserError as error:
        return Finding("✗", about, str(error))


def _find_micro_batch(
    recipe: TrainingRecipe, largest: memory.MemoryTrial, rows: int, device: Accelerator
) -> tuple[Finding, memory.MemoryTrial | None]:
    """Train two steps with smaller and smaller micro-batches until one fits. Return the finding, and what fits.

    Args:
        largest: the largest micro-batch to try.
        rows: number of rows per GPU and optimizer step.
    """
    folder, length = recipe.data.dataset_dir, recipe.data.sequence_length
    if not Path(folder, MANIFEST).is_file():
        return Finding("!", "memory", f"not tested, because the data in {folder} is not prepared yet"), None
    logger.info("Searching for the largest micro-batch. Each attempt takes 2 to 3 minutes (assumed).")
    with tempfile.TemporaryDirectory(prefix="preflight-") as scratch:
        path = Path(scratch, "probe.yaml")
        probe = recipe.with_training(eval_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True)
        # Two steps: the optimizer state is allocated before the second one.
        probe = probe.with_training(max_steps=2, warmup_steps=1, epochs=0.0, stop_at_step=0)
        probe = probe.with_training(sync_to="", sync_from="", resume_from="")
        path.write_text(probe.to_yaml(), encoding="utf-8")
        launch = RECOMMENDED.command("--num_processes", str(device.count))
        start = launch if _is_launched(recipe, device) else [sys.executable]
        for trial in memory.trials_of(largest, rows):
            tokens = 2 * trial.micro_batch * length * device.count  # two forward passes per step
            # Pass the data as an option, because then only the form of its rows must match the recipe.
            varied = {"dataset_dir": folder, "output_dir": Path(scratch, trial.options), "tokens_per_step": tokens}
            command = [*start, str(ROOT / "train.py"), str(path), *cli.words_of(varied)]
            if finding := environment.try_training(command, trial):
                return finding, trial if finding.mark == "✓" else None
    return Finding("✗", "memory", "Not even one row fits. Pass a smaller --sequence_length, or use a larger GPU"), None


if __name__ == "__main__":
    cli.run(main)
