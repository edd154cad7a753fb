"""Before the meter runs: is this machine sound, what fits on it, how long does the run take and what does it cost?

    python -m gpt2_repro.preflight                                    this machine, and the default recipe on it
    python -m gpt2_repro.preflight recipes/gpt2_124m.yaml --dist --memory
    python -m gpt2_repro.preflight --gpu "A100 SXM" --n 8 --usd_per_hour 14       a machine that is not there yet

A line for each thing: ✓ as it should be, ! to be known, ✗ in the way of the run; exit code 1 where there is one of the last.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt2_repro.entry import run as run_story
from gpt2_repro.errors import UserError, did_you_mean
from gpt2_repro.preflight import disks, environment
from gpt2_repro.preflight.findings import Finding


if TYPE_CHECKING:
    from gpt2_repro.preflight.cost import Work
    from gpt2_repro.recipe import ParsedRecipe


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be more than 0")
    return number


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of cards")
    return int(text)


EXTRAS: dict[str, dict[str, Any]] = {
    "gpu": {"metavar": "CARD", "help": "Plan for this card, by words of its name, and look at no machine."},
    "n": {"type": _count, "metavar": "N", "help": "How many cards. (default: those that are here)"},
    "tokens_per_second": {
        "type": _positive,
        "help": "Of all cards, measured. (default: what others have measured a card)",
    },
    "dist": {
        "action": "store_true",
        "help": "Sum over all cards, timed and checked: finds links that hang, within 30 s of all processes being there.",
    },
    "memory": {
        "action": "store_true",
        "help": "Find the largest micro-batch that fits, with the real command: 2 to 3 minutes an attempt.",
    },
    "topology": {"metavar": "FILE", "help": "Read this output of `nvidia-smi topo -m` in place of the machine's."},
    "volume_gb": {
        "type": _positive,
        "help": "Size of the rented volume of the data: what a network volume says of itself is not true.",
    },
    "json": {"action": "store_true", "help": "Print everything as one JSON object."},
}


def main(argv: list[str]) -> None:
    """Look, plan, print."""
    packages = environment.check_python(Path(__file__).parents[2] / "requirements.txt")
    if any(finding.words.startswith("is not installed") for finding in packages):
        _print(packages)
        sys.exit(1)

    from gpt2_repro import hardware, machine
    from gpt2_repro.data.arguments import DataArguments
    from gpt2_repro.model.arguments import ModelArguments, check_documents, follow_checkpoint
    from gpt2_repro.preflight.cost import run_bytes
    from gpt2_repro.preflight.plan import plan_lines, plan_on
    from gpt2_repro.preflight.work import is_as_published
    from gpt2_repro.recipe import parse_recipe
    from gpt2_repro.training.arguments import PretrainingArguments

    sections = dict(data=DataArguments, model=ModelArguments, training=PretrainingArguments)
    recipe = parse_recipe(
        argv, sections=sections, description=__doc__, prog="python -m gpt2_repro.preflight", extras=EXTRAS
    )
    options, training = recipe.extras, recipe.values["training"]
    if not 0 <= training["usd_per_hour"] < math.inf:
        raise UserError(f"--usd_per_hour {training['usd_per_hour']} must be at least 0")
    of_a_machine = [word for word in ("dist", "memory", "topology", "volume_gb") if getattr(options, word)]
    if options.gpu is not None and of_a_machine:
        raise UserError(f"--{of_a_machine[0]} looks at this machine, and --gpu plans for another: leave out one")
    follow_checkpoint(recipe)
    data, model = recipe.values["data"], ModelArguments(**recipe.values["model"])
    check_documents(model, packing=data["packing"], separator=data["separator"])
    here = hardware.find_accelerator(use_cpu=training["use_cpu"])
    name = here.name if options.gpu is None else options.gpu
    cards = options.n or (here.count if here.kind == "cuda" and options.gpu is None else 1)
    work, data_bytes, to_come = _work(recipe)
    planned = plan_on(
        work,
        name,
        cards,
        usd_per_hour=training["usd_per_hour"],
        tokens_per_second=options.tokens_per_second,
        as_published=is_as_published(training, model_type=recipe.values["model"]["model_type"]),
    )
    planned |= {"data_bytes": data_bytes, "run_bytes": run_bytes(work)}
    findings = [machine.check_division(recipe, cards)]
    if options.gpu is not None:
        findings += _what_the_name_means(name, measured=bool(options.tokens_per_second))
    else:
        needs = [
            disks.Need("data", Path(recipe.values["data"]["dataset_dir"]), to_come),
            disks.Need("the run", Path(training["output_dir"] or "runs"), planned["run_bytes"]),
        ]
        volume = int(options.volume_gb * 1e9) if options.volume_gb else None
        findings = [
            *packages,
            *machine.check_devices(
                training,
                attention=recipe.values["model"]["attn_implementation"],
                document_mask=recipe.values["model"]["document_mask"],
            ),
            *findings,
            *environment.check_limits(),
            machine.check_data(recipe),
            *disks.check_room(needs, volume_bytes=volume),
            environment.check_secrets(os.environ),
            *machine.check_links(options.topology),
        ]
        if options.dist:
            findings.append(machine.check_sum(options.n))
        if options.memory:
            findings.append(machine.find_micro_batch(recipe, name, cards))
    if options.json:
        print(json.dumps({"findings": [finding._asdict() for finding in findings], **planned}, indent=2, default=str))
    else:
        _print(findings)
        print("\n".join(plan_lines(planned)))
    sys.exit(any(finding.mark == "✗" for finding in findings))


def _print(findings: Sequence[Finding]) -> None:
    for finding in findings:
        print(f"{finding.mark} {finding.about:<16} {finding.words}")


def _what_the_name_means(name: str, *, measured: bool) -> list[Finding]:
    """Nothing where it is one card. Raises UserError where it is none, and nothing is known of its speed."""
    from gpt2_repro.preflight.prices import card_table, cards_named

    meant = [card.card for card in cards_named(name)]
    if not meant and not measured:
        hint = did_you_mean(name, [card.card for card in card_table()])
        raise UserError(f"there is no card {name!r}: {hint}; of another one type its --tokens_per_second")
    if len(meant) < 2:
        return []
    return [Finding("!", "card", f"{name} may be {' or '.join(meant)}: planned for the first")]


def _work(recipe: "ParsedRecipe") -> tuple["Work", float, float]:
    """The work of a recipe, the bytes of its prepared data, and those that are still to come at most."""
    from gpt2_repro.data.manifest import read_manifest
    from gpt2_repro.data.sources.presets import PRESETS, peak_bytes
    from gpt2_repro.data.tokenizer import expected_vocab_size
    from gpt2_repro.dry_run import HELLASWAG_TOKENS
    from gpt2_repro.model.arguments import ModelArguments
    from gpt2_repro.model.scale import scale_of
    from gpt2_repro.preflight.work import work_of

    data, model, training = (recipe.values[section] for section in ("data", "model", "training"))
    preset = None if data["data_files"] else PRESETS.get(data["source"])
    manifest: dict[str, Any] = {}
    if Path(data["dataset_dir"], "manifest.json").is_file():
        manifest = read_manifest(data["dataset_dir"], prepare="python prepare_data.py")
    counts = manifest.get("counts", {})
    tokens = sum(split["tokens"] for split in counts.values())
    # Not prepared: what the source has, or as much as the run takes.
    tokens = tokens or min(data["max_tokens"] or math.inf, preset.tokens if preset else training["total_tokens"])
    share = data["validation_tokens"] if data["split"] == "head" else data["validation_fraction"] * tokens
    scale = scale_of(
        ModelArguments(**model),
        sequence_length=data["sequence_length"],
        vocab_size=manifest.get("vocab_size") or expected_vocab_size(data["tokenizer"]) or 50_257,
    )
    validation = counts.get("validation", {}).get("row_tokens") or int(share)
    work = work_of(training, scale, validation_tokens=validation, hellaswag_tokens=HELLASWAG_TOKENS)
    peak = peak_bytes(staged=2 * tokens, rows=2 * tokens, downloads=preset.downloads if preset else 0)
    return work, 2 * tokens, 0 if manifest else peak


if __name__ == "__main__":
    run_story(main)
