"""Where the loss difference of a run to a baseline sits, and what it is likely to come from.

python -m gpt2_repro.diagnose runs/gpt2_124m                                    beside openai-community/gpt2
python -m gpt2_repro.diagnose runs/a --baseline runs/b --local_data tasks/      beside another run, without a network
python -m gpt2_repro.diagnose somebody/gpt2-small --dataset_dir data/fineweb-10bt
"""

import functools
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpt2_repro import entry
from gpt2_repro.commandline import CommandParser
from gpt2_repro.compute import TokenCount
from gpt2_repro.errors import UserError
from gpt2_repro.evaluation.arguments import EvaluationArguments
from gpt2_repro.evaluation.candidates import Candidate, open_candidate
from gpt2_repro.evaluation.documents import evenly
from gpt2_repro.evaluation.harness import choose_device
from gpt2_repro.evaluation.provenance import Provenance, default_output_dir, trace
from gpt2_repro.evaluation.stamp import stamp
from gpt2_repro.evaluation.tasks import find_local_files
from gpt2_repro.files import write_whole
from gpt2_repro.recipe import load_sections, read_section


if TYPE_CHECKING:
    from gpt2_repro.data.rows import Rows
    from gpt2_repro.evaluation.diagnosis.texts import Domain, Ids

HOME = "validation text"
TASKS = {"lambada_openai": "LAMBADA passages", "wikitext": "wikitext"}
SHORTEST_WINDOW = 16
COUNTED_TOKENS = 10_000_000  # of the training rows, for how often a token stands there

logger = logging.getLogger("gpt2_repro.diagnose")


def main(argv: list[str]) -> None:
    """Load two models, score both on the same tokens, write tables, figures and a conclusion."""
    parser = CommandParser(prog="python -m gpt2_repro.diagnose", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="A run (its final/), a checkpoint-N/ or final/, or a Hub id.")
    parser.add_argument(
        "--baseline", help="A model of the same tokenizer. (default: the recipe's, openai-community/gpt2)"
    )
    parser.add_argument(
        "--dataset_dir",
        type=Path,
        metavar="DIR",
        help="Prepared folder with its validation sets. (default: the run's)",
    )
    parser.add_argument(
        "--local_data", type=Path, metavar="DIR", help="wikitext and LAMBADA as jsonl files. (default: from the Hub)"
    )
    parser.add_argument(
        "--tokens", type=TokenCount, default=262_144, help="Targets of each domain. (default: %(default)s)"
    )
    parser.add_argument("--max_length", type=int, default=1024, help="Window in tokens. (default: %(default)s)")
    parser.add_argument("--output_dir", type=Path, metavar="DIR", help="(default: RUN/evaluation/diagnosis)")
    parser.add_argument("--device", metavar="D", help="cpu, cuda, cuda:N. (default: the first GPU if there is one)")
    options = parser.parse(argv)
    if options.tokens < 1 or options.max_length < SHORTEST_WINDOW:
        raise UserError(f"--tokens must be at least 1 and --max_length at least {SHORTEST_WINDOW}")

    from gpt2_repro.evaluation.diagnosis.material import Material, measure
    from gpt2_repro.evaluation.diagnosis.scoring import score_rows
    from gpt2_repro.evaluation.diagnosis.table import to_markdown
    from gpt2_repro.model.export import resolve_checkpoint
    from gpt2_repro.report.diagnosis import diagnosis_figures

    known = trace(resolve_checkpoint(options.run))
    output = options.output_dir or default_output_dir(known) / "diagnosis"
    if output.exists() and not output.is_dir():
        raise UserError(f"--output_dir {output} is a file: name a folder")
    recipe = known.run / "recipe.yaml" if known.run else None
    against = trace(resolve_checkpoint(options.baseline or _baseline_of(recipe)))
    own_data = _dataset_of(recipe)
    dataset_dir = options.dataset_dir or own_data
    if dataset_dir is None or not (options.dataset_dir or dataset_dir.is_dir()):
        lost = f"the run's data {dataset_dir} is not here" if dataset_dir else "no prepared folder is known"
        logger.warning("%s: nothing is measured on its own text (--dataset_dir DIR names a folder)", lost)
        dataset_dir = None
    local = find_local_files(options.local_data, TASKS) if options.local_data else {}
    texts = _task_texts(local)
    if dataset_dir is None and not texts:
        raise UserError("there is no text to diagnose on: type --dataset_dir with a prepared folder, or --local_data")

    device = choose_device(options.device)
    ours, theirs = _open(known), _open(against)
    (our_model, tokenizer), (their_model, other) = ours.load(), theirs.load()
    if tokenizer.get_vocab() != other.get_vocab():
        raise UserError(
            f"{ours.name} and {theirs.name} have different tokenizers, so no token of one is a token of the other: type "
            "--baseline with a model of the same tokenizer; bash evaluate.sh compares these two by bits per byte"
        )
    window = min(options.max_length, ours.positions, theirs.positions)
    domains, counts = _prepared_domains(dataset_dir, tokenizer, options.tokens) if dataset_dir else ([], None)
    domains += _task_domains(texts, tokenizer)
    material = Material.gather(domains, tokenizer, window=window, tokens=options.tokens)
    if not material.sample.rows:
        raise UserError("the texts have no token behind their first one: name others")
    rows = material.rows()
    scores = [
        score_rows(model, rows, device=device, name=one.name)
        for model, one in ((our_model, ours), (their_model, theirs))
    ]
    diagnosis = {
        "models": [{"name": one.name, "source": one.known.source, "revision": one.revision} for one in (ours, theirs)],
        "window": window,
        "tokens_per_domain": options.tokens,
        "dtype": "float32",
        "device": device,
        "frequencies_of": "these texts" if counts is None else "the training text",
        **measure(material, *scores, window=window, home=HOME if dataset_dir == own_data else None, counts=counts),
        **stamp("python -m gpt2_repro.diagnose", argv),
    }

    write_whole(output / "diagnosis.json", json.dumps(diagnosis, indent=2) + "\n")
    write_whole(output / "diagnosis.md", table := to_markdown(diagnosis))
    for name, figure in diagnosis_figures(diagnosis).items():
        write_whole(output / f"{name}.png", figure)
    print(f"\n{table}\nWritten: {output}/ (diagnosis.md, diagnosis.json, figures)")


def _baseline_of(recipe: Path | None) -> str:
    """The recipe's, if it is a model."""
    section = read_section(recipe, "evaluation", EvaluationArguments) if recipe else EvaluationArguments()
    if section.baseline in ("none", "untrained"):
        raise UserError(f"the baseline of {recipe} is {section.baseline}: type --baseline with a folder or a Hub id")
    return section.baseline


def _dataset_of(recipe: Path | None) -> Path | None:
    """The prepared folder that the run was trained on."""
    named = load_sections(recipe).get("data", {}).get("dataset_dir") if recipe else None
    return Path(named) if named else None


def _open(known: Provenance) -> Candidate:
    from gpt2_repro.model.export import load_pair

    return open_candidate(known, functools.partial(load_pair, known.source))


def _prepared_domains(folder: Path, tokenizer: Any, tokens: int) -> "tuple[list[Domain], NDArray[np.int64]]":
    """The validation sets of a prepared folder, and how often each id stands in its training rows [vocabulary]."""
    from gpt2_repro.data.manifest import read_manifest
    from gpt2_repro.data.prepared import open_split, open_validation
    from gpt2_repro.evaluation.diagnosis.texts import of_rows
    from gpt2_repro.model.export import load_tokenizer

    manifest = read_manifest(str(folder), prepare="python prepare_data.py")
    if load_tokenizer(str(folder / "tokenizer")).get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"{folder} was prepared with another tokenizer than the model's: name its own with --dataset_dir"
        )
    separator = None if manifest["request"]["separator"] == "none" else tokenizer.eos_token_id
    domains = [
        of_rows(f"validation {name}" if name else HOME, _spread(rows, tokens), tokenizer, separator=separator)
        for name, rows in open_validation(str(folder), manifest).items()
    ]
    ids = np.concatenate(_spread(open_split(str(folder), "train", manifest), COUNTED_TOKENS))
    return domains, np.bincount(ids, minlength=len(tokenizer))


def _spread(rows: "Rows", tokens: int) -> "list[Ids]":
    """Rows of about so many targets, spread evenly."""
    count = -(-len(rows) * tokens // max(1, int((rows.lengths() - 1).sum())))
    return [row["input_ids"] for row in rows.__getitems__(evenly(range(len(rows)), count))]


def _task_texts(local: Mapping[str, Path]) -> dict[str, list[str]]:
    """LAMBADA's passages and wikitext's pages. What only the Hub has and cannot be had is left out, with a line."""
    from gpt2_repro.evaluation.diagnosis.sources import read_texts

    texts = {}
    for task in TASKS:
        try:
            texts[task] = read_texts(task, local.get(task))
        except UserError as error:
            if task in local:
                raise
            logger.warning("%s: left out (--local_data DIR reads it from a file)", error)
    return texts


def _task_domains(texts: Mapping[str, list[str]], tokenizer: Any) -> "list[Domain]":
    from gpt2_repro.evaluation.diagnosis.texts import of_documents, of_passages

    return [
        of_passages(TASKS[task], of_task, tokenizer)
        if task == "lambada_openai"
        else of_documents(TASKS[task], of_task, tokenizer, separator=tokenizer.eos_token_id)
        for task, of_task in texts.items()
    ]


if __name__ == "__main__":
    entry.run(main)
