"""Check a machine before a run, and estimate the hours and dollars of the run.

    python -m gpt2_repro.preflight                                           check this machine for the default recipe
    python -m gpt2_repro.preflight recipes/gpt2_124m.yaml --dist --memory    also test the GPU links and the memory
    python -m gpt2_repro.preflight --gpu "A100 SXM" --n 8 --usd_per_hour 14  plan for a machine you have not rented yet
    python -m gpt2_repro.preflight --gpu "H100 SXM" --n 16                   plan for two machines of 8 GPUs
    python -m gpt2_repro.preflight --gpu list                                print the price of the run on every card
    python -m gpt2_repro.preflight --gpu "RTX 4090" --budget 20              write a recipe for 20 dollars

Each check prints one line: ✓ good, ! a note, ✗ the run would fail. The exit code is 1 if any line has a ✗.
"""

import dataclasses
import logging
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpt2_repro import cli, hardware
from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.errors import UserError
from gpt2_repro.hardware import Accelerator
from gpt2_repro.launchers import RECOMMENDED, TRAINING, forget_variables
from gpt2_repro.manifest import MANIFEST
from gpt2_repro.planning import cost, memory
from gpt2_repro.planning.batch_plan import plan_run
from gpt2_repro.planning.plan import division, run_lines
from gpt2_repro.planning.sizing import follow_data, plans_of
from gpt2_repro.planning.workload import estimate_memory, workload_of
from gpt2_repro.preflight import environment
from gpt2_repro.preflight.budget import recipe_within
from gpt2_repro.preflight.commands import command_lines, is_launched, machines_of
from gpt2_repro.preflight.links import check_all_reduce
from gpt2_repro.recipe import TrainingRecipe, TrainingSection, load_recipe
from gpt2_repro.text import Finding


logger = logging.getLogger("gpt2_repro.preflight")

LIST = "list"  # the value of --gpu that prints all cards
OPTIONS: dict[str, dict[str, Any]] = {
    "gpu": {
        "metavar": "H100",
        "help": "GPU to plan for, by words of its name, or list: the price on every GPU. (default: this machine's GPUs)",
    },
    "n": {
        "type": cli.positive_count,
        "metavar": "N",
        "help": "Number of GPUs. More than 8 are several machines of 8. (default: all GPUs of this machine)",
    },
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
        print(_text(packages))
        sys.exit(1)
    requested = load_recipe(argv, description=__doc__, prog="python -m gpt2_repro.preflight", options=OPTIONS)
    options = requested.options
    has_limit = options.budget is not None or options.hours is not None
    if options.gpu == LIST:
        print(_text(_offers(requested)))
        return
    device = _device_of(requested)
    notes = _notes_on_card(requested) if options.gpu else []
    if has_limit:
        requested = _write_recipe(requested, device)
    if any(note.about == "precision" for note in notes):
        requested = _with_options(requested, precision="fp16")
    recipe = follow_data(requested, device=device)
    _check_division(recipe, device.count)  # before a smaller micro-batch is proposed
    memory_check = _check_memory(recipe, device)
    requested = _with_options(requested, **memory_check.changes)
    recipe = _with_options(recipe, **memory_check.changes)

    work = workload_of(recipe)
    if options.gpu:
        findings = notes
    else:
        findings = packages + _check_machine(recipe, work)
    findings.append(_check_step(recipe, device, memory_check))
    findings += memory_check.findings
    if machines_of(device) > 1:
        text = f"{machines_of(device)} machines need a shared folder for the run (docs/machines.md)"
        findings.append(Finding("!", "machines", text))
    speed = options.tokens_per_second or 0
    if has_limit:
        speed *= cost.GPT2_FLOPS_PER_TOKEN * work.tokens / work.flops
    price = recipe.training.usd_per_hour
    planned = cost.cost_of(work, device.name, device.count, usd_per_hour=price, speed=speed)
    plans = plans_of(recipe, requested, device)

    parts: list[Sequence[object]] = [
        findings,
        run_lines(recipe.data, recipe.model, work, plans),
        planned.lines(),
    ]
    if memory_check.fits:
        parts.append(command_lines(requested, device))
    print("\n\n".join(_text(part) for part in parts))
    sys.exit(any(finding.mark == "✗" for finding in findings))


def _text(lines: Sequence[object]) -> str:
    return "\n".join(str(line) for line in lines)


def _offers(requested: TrainingRecipe) -> list[str]:
    """Return the price of a run on every card as lines of text."""
    options = requested.options
    for name in ("budget", "hours", "dist", "memory", "tokens_per_second"):
        if getattr(options, name):
            raise UserError(f"--gpu list prints the price of a recipe on every card. Leave out --{name}.")
    cards = options.n or 1
    _check_machines(cards)
    recipe = follow_data(requested, device=Accelerator("cuda", LIST, cards, None, None))
    _check_division(recipe, cards)
    return cost.offer_lines(workload_of(recipe), cards)


def _check_division(recipe: TrainingRecipe, cards: int) -> None:
    """Raise UserError if no micro-batch divides a step on a number of GPUs."""
    tokens_of_a_row = recipe.data.sequence_length * cards
    if recipe.training.tokens_per_step % tokens_of_a_row:
        plan_run(recipe.training, recipe.data, num_processes=cards)


def _check_machines(cards: int) -> None:
    """Raise UserError if a number of GPUs is more than one machine has, and not that of several machines."""
    if cards > cost.CARDS_OF_A_MACHINE and cards % cost.CARDS_OF_A_MACHINE:
        fix = f"Pass a multiple of {cost.CARDS_OF_A_MACHINE}"
        raise UserError(f"--n {cards}: several machines have {cost.CARDS_OF_A_MACHINE} GPUs each. {fix}.")


def _write_recipe(requested: TrainingRecipe, device: Accelerator) -> TrainingRecipe:
    """Write a recipe for --budget or --hours, print the comments at its top, and return it."""
    recipe = recipe_within(requested, device, OPTIONS)
    print(f"wrote {recipe.path}")
    text = recipe.path.read_text(encoding="utf-8")
    for line in text.splitlines():
        if line.startswith("#"):
            print(line)
    print()
    return recipe


def _device_of(requested: TrainingRecipe) -> Accelerator:
    """Return the devices to plan for: those of this machine, or those of --gpu.

    Raises UserError if the speed of --gpu is not known.
    """
    options = requested.options
    if options.n is not None and not requested.training.use_cpu:
        _check_machines(options.n)
    if options.gpu is None:
        device = hardware.find_accelerator(use_cpu=requested.training.use_cpu)
        if options.n is not None:
            return dataclasses.replace(device, count=options.n)
        if device.kind != "cuda":
            return dataclasses.replace(device, count=1)
        return device
    if options.dist or options.memory:
        raise UserError("--dist and --memory check this machine, but --gpu plans for another machine.")
    card = cost.card_named(options.gpu)
    if card is None and not options.tokens_per_second:
        known = ", ".join(cost.CARDS)
        raise UserError(f"The speed of {options.gpu!r} is not known. Pass --tokens_per_second, or --gpu: {known}.")
    memory_bytes = None
    if card is not None and card.memory_gb is not None:
        memory_bytes = card.memory_gb * 10**9
    return Accelerator("cuda", options.gpu, options.n or 1, None, memory_bytes)


def _notes_on_card(requested: TrainingRecipe) -> list[Finding]:
    """Return what is special about the card that --gpu names."""
    name = requested.options.gpu
    cards = cost.cards_named(name)
    notes: list[Finding] = []
    if len(cards) > 1:
        names = " and ".join(card.card for card in cards)
        notes.append(Finding("!", "card", f"{name} matches {names}. The estimate is for the first"))
    needs_bf16 = requested.training.asked_precision in ("bf16", "auto")
    if cards and needs_bf16 and not cards[0].bf16:
        text = f"{cards[0].card} has no bf16, so the run is planned in fp16. Pass --precision fp16 to train.py"
        notes.append(Finding("!", "precision", text))
    if not cards or cards[0].memory_gb is None:
        notes.append(Finding("!", "memory", f"not checked, because the memory of {name} is not known"))
    return notes


def _with_options(recipe: TrainingRecipe, **values: Any) -> TrainingRecipe:
    """Return a recipe as if these fields of the section training were passed as options."""
    typed = recipe.typed | values.keys()
    return dataclasses.replace(recipe.with_training(**values), typed=typed)


class MemoryCheck(NamedTuple):
    """Whether a micro-batch fits on a GPU.

    Attributes:
        fits: whether any micro-batch fits, or the memory is not known.
        changes: the fields of the section training that must change so that it fits.
    """

    findings: list[Finding]
    fits: bool
    changes: dict[str, Any]


def _check_memory(recipe: TrainingRecipe, device: Accelerator) -> MemoryCheck:
    """Check that the micro-batch of a recipe fits on a GPU."""
    training = recipe.training
    checkpointing = bool(training.activation_checkpointing)
    asked = memory.MemoryTrial(training.per_device_train_batch_size, checkpointing)
    rows_per_step = training.tokens_per_step // recipe.data.sequence_length
    rows = max(1, rows_per_step // device.count)
    setting = asked
    if "per_device_train_batch_size" not in recipe.typed and asked.micro_batch > rows:
        setting = asked._replace(micro_batch=rows)
    if recipe.options.memory:
        finding, fitting = _find_micro_batch(recipe, setting, rows, device)
    elif device.memory_bytes:
        estimate = estimate_memory(recipe, workload_of(recipe), device.memory_bytes, device.count)
        estimate = estimate._replace(sharded=is_launched(recipe, device))
        finding, fitting = memory.check_memory(estimate, setting, rows, device.memory_bytes)
    else:
        return MemoryCheck([], True, _changes(asked, setting))
    changes = _changes(asked, fitting or setting)
    fits = finding.mark != "✗" or fitting is not None
    return MemoryCheck([finding], fits, changes)


def _changes(asked: memory.MemoryTrial, chosen: memory.MemoryTrial) -> dict[str, Any]:
    """Return the fields of the section training that differ between two memory settings."""
    changes: dict[str, Any] = {}
    if chosen != asked:
        changes["per_device_train_batch_size"] = chosen.micro_batch
        if chosen.checkpointing:
            changes["activation_checkpointing"] = True
    return changes


def _check_step(recipe: TrainingRecipe, device: Accelerator, memory_check: MemoryCheck) -> Finding:
    """Return how a step is divided, and the micro-batch if that of the recipe has too many rows for these GPUs."""
    plan = plan_run(recipe.training, recipe.data, num_processes=device.count)
    changed = "per_device_train_batch_size" in memory_check.changes
    if not changed or any(finding.mark == "✗" for finding in memory_check.findings):
        return Finding("✓", "step", division(plan))
    return Finding("!", "step", f"{division(plan)}. Pass --per_device_train_batch_size {plan.micro_batch_size}")


def _check_machine(recipe: TrainingRecipe, work: cost.Workload) -> list[Finding]:
    """Check the devices, limits, data, disks and (with --dist) links of this machine."""
    import torch

    folder = Path(recipe.data.dataset_dir)
    if (folder / MANIFEST).is_file():
        data = _judge("data", lambda: f"{PreparedData.open(recipe).path} has the settings of the recipe")
    else:
        data = Finding("!", "data", f"{folder} is not prepared yet")
    run_folder = Path(recipe.training.output_dir or "runs")
    needs = [
        environment.Need("data", folder, work.missing_bytes),
        environment.Need("the run", run_folder, work.run_bytes),
    ]
    findings = _check_devices(recipe)
    findings += environment.check_limits()
    findings.append(data)
    findings += environment.check_room(needs)
    if recipe.options.dist:
        processes = recipe.options.n or torch.cuda.device_count() or 2
        findings.append(check_all_reduce(processes))
    return findings


def _check_devices(recipe: TrainingRecipe) -> list[Finding]:
    """Check the driver, the devices, and whether they support precision, torch.compile and attention of a recipe."""
    import torch

    from gpt2_repro.model.attention import Machine, choose_attention
    from gpt2_repro.model.configuration import build_config
    from gpt2_repro.model.mlp import require_mlp

    training = recipe.training
    accept = training.accept_any_hardware
    version = hardware.nvidia_driver() if torch.version.hip is None else f"ROCm {torch.version.hip}"
    driver = Finding("!", "driver", "no NVIDIA device")
    if version is not None:
        driver = Finding("✓", "driver", version)
    try:
        on_cpu = hardware.uses_cpu(use_cpu=training.use_cpu, accept_any_hardware=accept)
    except UserError as error:
        return [driver, Finding("✗", "device", str(error))]
    device = hardware.find_accelerator(use_cpu=on_cpu)
    if on_cpu:
        devices = f"the CPU, {hardware.cpu_cores()} cores"
    else:
        gigabytes = (device.memory_bytes or 0) / 1e9
        devices = f"{device.count} x {device.name}, {gigabytes:.0f} GB each"
    machine = Machine(
        cuda=device.kind == "cuda",
        bf16=training.asked_precision in ("auto", "bf16"),
        length=recipe.data.sequence_length,
        document_mask=recipe.model.document_mask,
        fp16=training.asked_precision == "fp16",
    )

    def precision() -> str:
        asked = training.asked_precision
        _, reason = hardware.choose_precision(asked, use_cpu=on_cpu, accept_any_hardware=accept)
        return reason

    def attention() -> object:
        config = build_config(recipe.model, sequence_length=recipe.data.sequence_length, vocab_size=128)
        asked = recipe.model.attn_implementation
        require_mlp(recipe.model.mlp_implementation, machine, config)
        return choose_attention(asked, machine, config, rows=training.per_device_train_batch_size)

    return [
        driver,
        Finding("✓", "device", devices),
        _judge("precision", precision),
        _check_compile(training, on_cpu=on_cpu),
        _judge("attention", attention),
    ]


def _check_compile(training: TrainingSection, *, on_cpu: bool) -> Finding:
    """Check whether torch.compile can be used, and warn if a GPU trains without it because something is missing."""
    accept = training.accept_any_hardware
    try:
        compiles = hardware.choose_compile(training.torch_compile, use_cpu=on_cpu, accept_any_hardware=accept)
    except UserError as error:
        return Finding("✗", "torch.compile", str(error))
    missing = hardware.compiler_obstacle(use_cpu=on_cpu)
    on_cuda = hardware.gpu_kind() == "cuda" and not on_cpu
    if on_cuda and missing is not None:
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
    folder = recipe.data.dataset_dir
    if not Path(folder, MANIFEST).is_file():
        return Finding("!", "memory", f"not tested, because the data in {folder} is not prepared yet"), None
    logger.info("Searching for the largest micro-batch. Each attempt takes 2 to 3 minutes (assumed).")
    start = [sys.executable]
    if is_launched(recipe, device):
        start = RECOMMENDED.command("--num_processes", str(device.count))
    with tempfile.TemporaryDirectory(prefix="preflight-") as scratch:
        path = Path(scratch, "probe.yaml")
        path.write_text(_probe_of(recipe).to_yaml(), encoding="utf-8")
        for trial in memory.trials_of(largest, rows):
            rows_per_pass = trial.micro_batch * device.count
            varied = {
                # Pass the data as an option, because then only the form of its rows must match the recipe.
                "dataset_dir": folder,
                "output_dir": Path(scratch, trial.options),
                "tokens_per_step": 2 * rows_per_pass * recipe.data.sequence_length,  # two forward passes
            }
            command = [*start, *TRAINING, str(path), *cli.words_of(varied)]
            finding = environment.try_training(command, trial)
            if finding is None:
                continue
            if finding.mark == "✓":
                return finding, trial
            return finding, None
    return Finding("✗", "memory", "Not even one row fits. Pass a smaller --sequence_length, or use a larger GPU"), None


def _probe_of(recipe: TrainingRecipe) -> TrainingRecipe:
    """Return a recipe that trains two steps and writes no checkpoint."""
    return recipe.with_training(
        # Two steps: the optimizer state is allocated before the second one.
        max_steps=2,
        warmup_steps=1,
        epochs=0.0,
        stop_at_step=0,
        eval_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        sync_to="",
        sync_from="",
        resume_from="",
    )


if __name__ == "__main__":
    cli.run(main)
