"""Export a checkpoint to another format, and read the export back to verify it.

python -m gpt2_repro.export runs/gpt2_124m/checkpoint-18000 exports/step-18000       create a Hugging Face folder
python -m gpt2_repro.export runs/gpt2_124m --push_to_hub somebody/gpt2-fineweb       upload to the Hub (set HF_TOKEN)
python -m gpt2_repro.export runs/gpt2_124m gpt2_124M.bin --format llmc               create a model file for llm.c
"""

import argparse
import copy
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from gpt2_repro import cli, tokenization
from gpt2_repro.errors import RunFailed, UserError
from gpt2_repro.evaluation.comparison import Comparison
from gpt2_repro.evaluation.model_card import model_card
from gpt2_repro.evaluation.models import fingerprint
from gpt2_repro.files import from_json, read_object, readable
from gpt2_repro.model.size import max_positions
from gpt2_repro.run_record.checkpoint import Checkpoint, resolve_checkpoint
from gpt2_repro.run_record.layout import COMPARISON


def main(argv: list[str]) -> None:
    """Load a checkpoint, write the export and read the export back.

    With --push_to_hub, the export is also uploaded to the Hub.
    """
    args = _parse(argv)
    checkpoint = resolve_checkpoint(args.checkpoint)

    from gpt2_repro.model.export import load_model, load_tokenizer

    model = load_model(checkpoint.source)
    written = model if args.dtype == "float32" else copy.deepcopy(model).bfloat16()
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    # On the same disk, so that the rename is atomic.
    with tempfile.TemporaryDirectory(prefix="export-", dir=args.out and args.out.parent) as scratch:
        staged = Path(scratch) / "staged"
        if args.format == "llmc":
            from gpt2_repro.model.llmc import read_llmc, write_llmc

            write_llmc(model, staged, dtype=args.dtype)
            require_same(written, read_llmc(staged))
        else:
            tokenizer = load_tokenizer(checkpoint.source)
            written.save_pretrained(staged)
            readable(staged)
            tokenization.save(tokenizer, staged)
            if checkpoint.record:
                results = _results(checkpoint, fingerprint(model, tokenizer))
                name = args.push_to_hub or args.out.name
                card = model_card(name, checkpoint.record, *results, license_id=args.license)
                (staged / "README.md").write_text(card, encoding="utf-8")
            require_same(written, load_model(str(staged)))
        if args.out:
            shutil.move(staged, args.out)
            print(f"Exported: {args.out} (verified by reading it back)")
        if args.push_to_hub:
            push(args.out or staged, args.push_to_hub, private=args.private)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = cli.CommandParser(prog="python -m gpt2_repro.export", description=__doc__)
    parser.add_argument("checkpoint", help="Run directory, final/, checkpoint-N/ or Hub id.")
    parser.add_argument("out", nargs="?", type=Path, metavar="OUT", help="Folder (or llm.c file) to create.")
    formats = "Format of the export. (default: llmc if OUT ends in .bin, otherwise hf)"
    parser.add_argument("--format", choices=("hf", "llmc"), help=formats)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="Data type of weights.")
    parser.add_argument("--push_to_hub", metavar="ORG/NAME", help="Upload the export to this Hub repository.")
    parser.add_argument("--private", action="store_true", help="Make a newly created repository private.")
    parser.add_argument("--license", metavar="ID", help="License of the weights for the model card, such as mit.")
    args = parser.parse(argv)
    args.format = args.format or ("llmc" if args.out and args.out.suffix == ".bin" else "hf")
    if args.private and args.push_to_hub is None:
        raise UserError("--private needs --push_to_hub.")
    if args.license and args.format != "hf":
        raise UserError("--license is written to the model card, which needs --format hf.")
    if args.out is None and args.push_to_hub is None:
        raise UserError("No target for the export. Pass a folder after the checkpoint, or --push_to_hub ORG/NAME.")
    if args.push_to_hub is not None and (args.format != "hf" or args.push_to_hub.count("/") != 1):
        raise UserError("--push_to_hub needs a repository, such as --push_to_hub ORG/NAME, and --format hf.")
    if args.push_to_hub is not None and not os.environ.get("HF_TOKEN"):
        raise UserError("To upload to the Hub, set HF_TOKEN to a token with write access.")
    if args.out is not None and args.out.exists():
        raise UserError(f"{args.out} already exists.")
    return args


def _results(checkpoint: Checkpoint, revision: str) -> tuple[Comparison | None, str | None]:
    """Return the comparison of a run and the name of the model with this fingerprint."""
    path = Path(checkpoint.source).parent / COMPARISON
    comparison = from_json(Comparison, read_object(path), default=Comparison(rows=[]))
    return next(((comparison, model.name) for model in comparison.models if model.revision == revision), (None, None))


def require_same(written: Any, again: Any) -> None:
    """Raise RunFailed if two models do not compute exactly the same logits in fp32."""
    import torch

    config = written.config
    ids = torch.arange(min(64, max_positions(config)))[None] % config.vocab_size
    with torch.inference_mode():
        expected, logits = (model.float()(input_ids=ids).logits for model in (written, again))
    if not torch.equal(expected, logits):
        raise RunFailed("The export was not saved: its logits differ from the checkpoint's. Please report this error.")


def push(folder: Path, repository: str, *, private: bool) -> None:
    """Upload a folder to the Hub. Raises UserError if the upload fails."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, HTTPError

    api = HfApi()
    try:
        api.create_repo(repository, private=private or None, exist_ok=True)
        done = api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Export of gpt2-repro")
    except (HTTPError, HFValidationError, OSError) as error:
        # A server may echo the header with the token.
        reason = " ".join(str(error).split()).replace(os.environ["HF_TOKEN"], "HF_TOKEN")[:300]
        fix = "Check the name, the network, and that HF_TOKEN has write access."
        raise UserError(f"Cannot upload to {repository}: {reason.rstrip('.')}. {fix}") from None
    print(f"Pushed: {getattr(done, 'commit_url', repository)}")


if __name__ == "__main__":
    cli.run(main)
