"""Before the meter runs: is this machine sound, what fits on it, how long does the run take and what does it cost?

    python -m gpt2_repro.preflight                                    this machine, and the default recipe on it
    python -m gpt2_repro.preflight recipes/gpt2_124m.yaml --dist --memory
    python -m gpt2_repro.preflight --gpu "A100 SXM" --n 8 --usd_per_hour 14       a machine that is not there yet

A line for each thing: ✓ as it should be, ! to be known, ✗ in the way of the run; exit code 1 where there is one of the last.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpt2_repro import hardware
from gpt2_repro.compute import checkpoint_bytes, flops_per_token, gpt2_parameters
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.sources.presets import PRESETS, TEXT_RATE
from gpt2_repro.data.tokenizer import expected_vocab_size
from gpt2_repro.dry_run import HELLASWAG_TOKENS
from gpt2_repro.entry import run as run_story
from gpt2_repro.errors import UserError, did_you_mean
from gpt2_repro.model.arguments import ModelArguments
from gpt2_repro.preflight import cost, environment, memory, topology
from gpt2_repro.preflight.all_reduce import check_all_reduce
from gpt2_repro.preflight.findings import Finding
from gpt2_repro.preflight.plan import plan_lines, plan_on
from gpt2_repro.preflight.prices import card_of, card_table
from gpt2_repro.recipe import ParsedRecipe, parse_recipe


EXTRAS: dict[str, dict[str, Any]] = {
    "gpu": {"metavar": "CARD", "help": "Plan for this card, as the price table names it, and look at no machine."},
    "n": {"type": int, "metavar": "N", "help": "How many cards. (default: those that are here)"},
    "tokens_per_second": {
        "type": float,
        "help": "Of all cards, measured. (default: what others have measured a card)",
    },
    "dist": {
        "action": "store_true",
        "help": "Sum over all cards, timed and checked: finds links that hang, in half a minute.",
    },
    "memory": {
        "action": "store_true",
        "help": "Find the largest micro-batch that fits, with the real command: minutes.",
    },
    "topology": {"metavar": "FILE", "help": "Read this output of `nvidia-smi topo -m` in place of the machine's."},
    "volume_gb": {
        "type": float,
        "help": "Size of the rented volume: what a network volume says of itself is not true.",
    },
    "json": {"action": "store_true", "help": "Print everything as one JSON object."},
}
REPOSITORY = Path(__file__).parents[2]
DIST_SECONDS = 30.0
PROBE_SECONDS = 600.0
CORES_A_CARD = 16  # of a rented machine, assumed


def main(argv: list[str]) -> None:
    """Look, plan, print."""
    from gpt2_repro.training.arguments import PretrainingArguments

    sections = dict(data=DataArguments, model=ModelArguments, training=PretrainingArguments)
    command = "python -m gpt2_repro.preflight"
    recipe = parse_recipe(argv, sections=sections, description=__doc__, prog=command, extras=EXTRAS)
    options, training = recipe.extras, recipe.values["training"]
    if options.gpu and card_of(options.gpu) is None:
        raise UserError(
            f"there is no card {options.gpu!r}: {did_you_mean(options.gpu, [row.card for row in card_table()])}"
        )
    here = hardware.find_accelerator()
    name = options.gpu or here.name
    cards = options.n or (here.count if here.kind == "cuda" and not options.gpu else 1)
    work = _work(recipe)
    findings = [] if options.gpu else _look(recipe, work, cards if here.kind == "cuda" else 2)
    planned = plan_on(
        work, name, cards, usd_per_hour=training["usd_per_hour"], tokens_per_second=options.tokens_per_second
    )
    data_bytes = 2 * (
        PRESETS[source].tokens if (source := recipe.values["data"]["source"]) in PRESETS else work.tokens
    )
    planned["disk_bytes"] = cost.disk_bytes(
        work, data_bytes=int(data_bytes), keep_checkpoints=training["keep_checkpoints"]
    )
    planned["preparing"] = _preparing(recipe, planned["machine"], here_cores=None if options.gpu else os.cpu_count())
    if options.memory and not options.gpu:
        findings += _probe(recipe, name, cards)
    if options.json:
        document = {"findings": [finding._asdict() for finding in findings], **planned}
        print(json.dumps(document, indent=2, ensure_ascii=False, default=str))
    else:
        for finding in findings:
            print(f"{finding.mark} {finding.about:<16} {finding.words}")
        print("\n".join(plan_lines(planned)))
    sys.exit(any(finding.mark == "✗" for finding in findings))


def _look(recipe: ParsedRecipe, work: cost.Work, processes: int) -> list[Finding]:
    """This machine: environment, links, disks."""
    import torch

    from gpt2_repro.model.build import choose_attention

    options, training = recipe.extras, recipe.values["training"]
    driver = hardware.nvidia_driver()
    findings = [
        *environment.check_python(REPOSITORY / "requirements.txt"),
        environment.check_driver(driver, torch.version.cuda),
    ]
    usable = torch.cuda.is_available()
    if driver is not None and not usable:
        findings.append(Finding("✗", "GPU", "an NVIDIA device is here and torch cannot use it"))
    if usable:
        here = hardware.find_accelerator()
        findings.append(
            Finding("✓", "GPU", f"{here.count} x {here.name}, {(here.memory_bytes or 0) / 1e9:.0f} GB each")
        )
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        findings.append(Finding("✓" if bf16 else "✗", "bf16", "yes" if bf16 else "this GPU cannot: type --bf16 false"))
    attention, reason = choose_attention(
        recipe.values["model"]["attn_implementation"], cuda=usable, bf16=training["bf16"] and usable
    )
    findings.append(
        Finding("✓" if attention == "flash_attention_2" or not usable else "!", "attention", f"{attention}: {reason}")
    )
    findings += environment.check_limits()
    data, output = Path(recipe.values["data"]["dataset_dir"]), Path(training["output_dir"] or "runs")
    volume = int(options.volume_gb * 1e9) if options.volume_gb else None
    to_come = cost.disk_bytes(work, data_bytes=0, keep_checkpoints=training["keep_checkpoints"])
    findings += [
        environment.check_room("disk, data", data, 0 if data.is_dir() else 2 * work.tokens, volume_bytes=volume),
        environment.check_room("disk, run", output, to_come, volume_bytes=volume),
        environment.check_speed("speed, data", data),
        environment.check_speed("speed, run", output),
        environment.check_secrets(os.environ),
        *_links(options.topology),
    ]
    return [*findings, check_all_reduce(processes, seconds=DIST_SECONDS)] if options.dist else findings


def _links(file: str | None) -> list[Finding]:
    if file:
        try:
            text = Path(file).read_text()
        except OSError as error:
            raise UserError(f"--topology {file} cannot be read ({error.strerror})") from None
    elif command := shutil.which("nvidia-smi"):
        text = subprocess.run([command, "topo", "-m"], capture_output=True, text=True, timeout=20, check=False).stdout
    else:
        return []
    try:
        sound, sentence = topology.advice(topology.parse_topology(text))
    except UserError as error:
        if file:
            raise
        sound, sentence = False, f"nvidia-smi does not say how the cards hang together ({error})"
    return [Finding("✓" if sound else "!", "links", sentence)]


def _work(recipe: ParsedRecipe) -> cost.Work:
    """What the recipe asks for, in tokens, steps and bytes."""
    training, model = recipe.values["training"], recipe.values["model"]
    steps = training["max_steps"] or training["total_tokens"] // training["tokens_per_step"]
    shape = {
        "n_layer": model["n_layer"],
        "n_embd": model["n_embd"],
        "n_positions": recipe.values["data"]["sequence_length"],
    }
    parameters = gpt2_parameters(**shape, vocab_size=expected_vocab_size(recipe.values["data"]["tokenizer"]) or 50_257)
    a_token = flops_per_token(
        parameters=parameters - shape["n_positions"] * shape["n_embd"],
        n_layer=shape["n_layer"],
        n_embd=shape["n_embd"],
        sequence_length=shape["n_positions"],
    )
    validates = training["eval_strategy"] != "no"
    scored = validates and training["hellaswag_steps"]
    return cost.Work(
        tokens=steps * training["tokens_per_step"],
        steps=steps,
        flops=float(steps * training["tokens_per_step"] * a_token),
        eval_tokens=training["eval_tokens"],
        eval_steps=training["eval_steps"] if validates else 0,
        hellaswag_tokens=HELLASWAG_TOKENS,
        hellaswag_steps=max(training["hellaswag_steps"], training["eval_steps"]) if scored else 0,
        save_steps=training["save_steps"],
        sample_steps=training["sample_steps"],
        checkpoint_bytes=checkpoint_bytes(parameters, bf16=training["bf16"]),
        final_bytes=4 * parameters,
    )


def _preparing(recipe: ParsedRecipe, machine: dict[str, Any], *, here_cores: int | None) -> dict[str, Any] | None:
    """Preparing the data on this machine or on a cheap one; None without a price, or for a source of unknown size."""
    preset = PRESETS.get(recipe.values["data"]["source"])
    if preset is None or not preset.text or not machine["usd_per_hour"]:
        return None
    cores = here_cores or CORES_A_CARD * machine["cards"]
    found = cost.preparing(
        text_bytes=preset.text,
        download_bytes=preset.download,
        data_bytes=2 * preset.tokens,
        text_rate=TEXT_RATE,
        cores=cores,
        usd_per_hour=machine["usd_per_hour"],
    )
    return {"cores": cores, **found._asdict()}


def _probe(recipe: ParsedRecipe, name: str, cards: int) -> list[Finding]:
    """The largest micro-batch that fits, with the recipe's own command on the prepared data."""
    data, training = recipe.values["data"], recipe.values["training"]
    if not Path(data["dataset_dir"], "manifest.json").is_file():
        return [Finding("!", "memory", f"it is probed with the data, and {data['dataset_dir']} is not prepared yet")]
    card, length = card_of(name), data["sequence_length"]
    most = training["per_device_train_batch_size"]
    rows = training["tokens_per_step"] // length // cards
    say = functools.partial(print, file=sys.stderr, flush=True)
    say(
        "looking for the largest micro-batch that fits, a fresh process an attempt; 2 to 3 minutes with compiling, assumed"
    )
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", str(cards)]
    launcher += ["--config_file", str(REPOSITORY / "accelerate_configs" / "zero1.yaml")]
    with tempfile.TemporaryDirectory(prefix="preflight-") as scratch:
        run, path = Path(scratch, "run"), Path(scratch, "probe.yaml")
        path.write_text(recipe.to_yaml(output_dir=str(run), eval_strategy="no", save_strategy="no", report_to="none"))

        def attempt(rung: memory.Rung) -> memory.Outcome:
            # Two steps, the second with the optimizer's states there, of two passes each.
            step = str(2 * rung.micro_batch * length * cards)
            steps = ["--tokens_per_step", step, "--max_steps", "2", "--warmup_steps", "1", "--disable_tqdm", "true"]
            command = [*launcher, str(REPOSITORY / "train.py"), str(path), *steps]
            shutil.rmtree(run, ignore_errors=True)
            outcome = memory.attempt_command(command, rung, seconds=PROBE_SECONDS)
            say(f"  {' '.join(rung.options)}: {outcome.result}")
            return outcome

        outcomes = memory.find_largest(
            min(most, card.micro_batch if card else most), most, lambda rows_of_pass: rows % rows_of_pass == 0, attempt
        )
    if outcomes[-1].result == "failed":
        return [
            Finding("✗", "memory", f"the probe of {' '.join(outcomes[-1].rung.options)} failed: {outcomes[-1].said}")
        ]
    found = memory.best(outcomes)
    if found is None:
        return [Finding("✗", "memory", "not even one row a pass fits: a smaller --sequence_length, or a larger card")]
    return [Finding("✓", "memory", f"fits: {' '.join(found.options)}")]


if __name__ == "__main__":
    run_story(main)
