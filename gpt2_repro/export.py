"""Export a checkpoint to another format, and read the export back to verify it.

python -m gpt2_repro.export runs/gpt2_124m/checkpoint-18000 exports/step-18000       create a Hugging Face folder
python -m gpt2_repro.export runs/gpt2_124m --push_to_hub somebody/gpt2-fineweb       upload to the Hub (after hf auth login)
python -m gpt2_repro.export runs/gpt2_124m gpt2_124M.bin                             create a model file of llm.c
python -m gpt2_repro.export runs/gpt2_124m gpt2_124m.gguf                            for llama.cpp and ollama
python -m gpt2_repro.export ckpt.pt FOLDER --tokenizer openai-community/gpt2         from nanoGPT or llm.c (.bin)
"""

import argparse
import copy
import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import Any

from gpt2_repro import cli, tokenization
from gpt2_repro.errors import RunFailed, UserError
from gpt2_repro.evaluation.model_card import find_results, model_card
from gpt2_repro.evaluation.models import fingerprint
from gpt2_repro.model.checkpoint import Checkpoint, resolve_checkpoint
from gpt2_repro.model.size import max_positions


LLMC = ".bin"  # the extension of llm.c's files
GGUF = ".gguf"  # the extension of llama.cpp's files


def main(argv: list[str]) -> None:
    """Load a checkpoint, write the export and read the export back.

    With --push_to_hub, the export is also uploaded to the Hub.
    """
    args = _parse(argv)
    checkpoint = resolve_checkpoint(args.checkpoint)
    checkpoint.log_weights()

    from gpt2_repro.model.load import load_model, load_tokenizer

    model = load_model(checkpoint.source)
    tokenizer = None
    if args.has_tokenizer:
        tokenizer = load_tokenizer(args.tokenizer or checkpoint.source)
        if args.tokenizer:
            _join(model, tokenizer, args.tokenizer)
    written = model
    vocabulary = None
    if args.is_gguf:
        written, vocabulary = _prepare_gguf(model, tokenizer, args.dtype)
    elif args.dtype == "bfloat16":
        written = copy.deepcopy(model).bfloat16()
    parent = None
    if args.out:
        parent = args.out.parent
        parent.mkdir(parents=True, exist_ok=True)
    # On the same disk, so that the rename is atomic.
    with tempfile.TemporaryDirectory(prefix="export-", dir=parent) as scratch:
        if args.is_folder:
            staged = Path(scratch, "staged")
            _write_folder(written, tokenizer, staged)
            revision = fingerprint(model, tokenizer)
            _write_card(checkpoint, revision, args, staged / "README.md")
            again = load_model(str(staged))
        elif args.is_gguf:
            staged = Path(scratch, f"staged{GGUF}")
            again = _write_gguf(model, vocabulary, args.dtype, staged)
        else:
            staged = Path(scratch, f"staged{LLMC}")
            _write_llmc(model, args.dtype, staged)
            again = load_model(str(staged))
        require_same(written, again)
        if args.out:
            shutil.move(staged, args.out)
            print(f"Exported: {args.out} (verified by reading it back)")
        if args.push_to_hub:
            push(args.out or staged, args.push_to_hub, private=args.private)


def _join(model: Any, tokenizer: Any, name: str) -> None:
    """Record the special ids of a tokenizer in a model that came without it, or raise UserError."""
    if len(tokenizer) > model.config.vocab_size:
        problem = f"{name} has {len(tokenizer):,} ids, but the model has {model.config.vocab_size:,}."
        raise UserError(f"{problem} Pass the tokenizer that it was trained with.")
    for config in (model.config, model.generation_config):
        config.bos_token_id = tokenizer.eos_token_id
        config.eos_token_id = tokenizer.eos_token_id


def _write_llmc(model: Any, dtype: str, path: Path) -> None:
    from gpt2_repro.model.llmc import write_llmc

    write_llmc(model, path, dtype=dtype)
    _compare_gelu(model, "llm.c")


def _prepare_gguf(model: Any, tokenizer: Any, dtype: str) -> tuple[Any, Any]:
    """Return the model with the weights of a GGUF file and its vocabulary, or raise UserError."""
    from gpt2_repro.model.gguf_file import read_vocabulary, require_architecture, rounded

    require_architecture(model)
    return rounded(model, dtype), read_vocabulary(tokenizer, model.config.vocab_size)


def _write_gguf(model: Any, vocabulary: Any, dtype: str, path: Path) -> Any:
    """Write a GGUF file, and return its model."""
    from gpt2_repro.model.gguf_file import read_gguf, write_gguf

    write_gguf(model, vocabulary, path, dtype=dtype)
    _compare_gelu(model, "llama.cpp")
    return read_gguf(path, model.config)


def _compare_gelu(model: Any, reader: str) -> None:
    if getattr(model.config, "activation_function", "") == "gelu":
        print(f"The model has the exact GELU, but {reader} approximates it. Its outputs will differ slightly.")


def _write_folder(model: Any, tokenizer: Any, folder: Path) -> None:
    from gpt2_repro.model.pretraining import save_plain

    save_plain(model, folder)
    for path in folder.glob("*.safetensors"):  # the library makes them private
        shutil.copymode(folder / "config.json", path)
    tokenization.save(tokenizer, folder)


def _write_card(checkpoint: Checkpoint, revision: str, args: argparse.Namespace, path: Path) -> None:
    """Write the model card of a model that this project trained, with its scores."""
    if checkpoint.record is None:
        return
    card = model_card(
        args.push_to_hub or args.out.name,
        checkpoint.record,
        find_results(Path(checkpoint.source), revision),
        license_id=args.license,
        repository=args.push_to_hub,
    )
    path.write_text(card, encoding="utf-8")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = cli.CommandParser(prog="python -m gpt2_repro.export", description=__doc__)
    parser.add_argument("checkpoint", help="Run directory, final/, checkpoint-N/ or Hub id.")
    parser.add_argument("out", nargs="?", type=Path, metavar="OUT", help="Folder, .bin or .gguf to create.")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="Type of the weights. (default: float32, and float16 for .gguf; float16 is only for .gguf)",
    )
    parser.add_argument("--tokenizer", metavar="NAME", help="Tokenizer of a model file of nanoGPT or llm.c.")
    parser.add_argument("--push_to_hub", metavar="ORG/NAME", help="Upload the export to this Hub repository.")
    parser.add_argument("--private", action="store_true", help="Make a newly created repository private.")
    parser.add_argument("--license", metavar="ID", help="License of the weights for the model card, such as mit.")
    args = parser.parse(argv)
    suffix = args.out.suffix if args.out else ""
    args.is_gguf = suffix == GGUF
    args.is_folder = suffix not in (LLMC, GGUF)
    args.has_tokenizer = args.is_folder or args.is_gguf
    if args.dtype is None:
        args.dtype = "float16" if args.is_gguf else "float32"
    if args.dtype == "float16" and not args.is_gguf:
        raise UserError("--dtype float16 is only for .gguf files. Pass float32 or bfloat16.")
    needs_tokenizer = Path(args.checkpoint).is_file() and args.has_tokenizer
    if needs_tokenizer and not args.tokenizer:
        raise UserError("A model file has no tokenizer. Pass --tokenizer, for example openai-community/gpt2.")
    if args.tokenizer and not needs_tokenizer:
        raise UserError("--tokenizer is only for model files (.pt, .bin), which have none.")
    if args.tokenizer:
        of_prepared_folder = Path(args.tokenizer, "tokenizer")
        if of_prepared_folder.is_dir():
            args.tokenizer = str(of_prepared_folder)
    if args.out is None and args.push_to_hub is None:
        raise UserError("No target for the export. Pass a folder after the checkpoint, or --push_to_hub ORG/NAME.")
    if args.push_to_hub is not None and not args.is_folder:
        raise UserError("--push_to_hub uploads a folder. Pass another name than a .bin or .gguf file.")
    if args.push_to_hub is not None and not _hub_token():
        raise UserError("To upload to the Hub, run hf auth login, or set HF_TOKEN to a token with write access.")
    if args.out is not None and args.out.exists():
        raise UserError(f"{args.out} already exists.")
    if args.is_gguf and importlib.util.find_spec("gguf") is None:
        raise UserError("A .gguf file needs the package gguf. Run: pip install gguf")
    return args


def require_same(written: Any, again: Any) -> None:
    """Raise RunFailed if two models do not compute exactly the same logits in fp32."""
    import torch

    config = written.config
    if config.model_type == "gpt2":  # a file of another program has the weights, but not the GELU
        for block, read in zip(written.transformer.h, again.transformer.h, strict=True):
            read.mlp.act = block.mlp.act
    ids = torch.arange(min(64, max_positions(config)))[None] % config.vocab_size
    with torch.inference_mode():
        expected = written.float()(input_ids=ids).logits
        logits = again(input_ids=ids).logits
    if not torch.equal(expected, logits):
        raise RunFailed("The export was not saved: its logits differ from the checkpoint's. Please report this error.")


def _hub_token() -> str:
    """Return the token of the variable HF_TOKEN or of `hf auth login`, or "" without a login."""
    from huggingface_hub import get_token

    return get_token() or ""


def push(folder: Path, repository: str, *, private: bool) -> None:
    """Upload a folder to the Hub. Raises UserError if the upload fails."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, HTTPError

    token = _hub_token()
    api = HfApi(token=token)
    try:
        api.create_repo(repository, private=private or None, exist_ok=True)
        done = api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Export of gpt2-repro")
    except (HTTPError, HFValidationError, OSError) as error:
        # A server may echo the header with the token.
        reason = " ".join(str(error).split()).replace(token, "HF_TOKEN")[:300]
        fix = "Check the name, the network, and that the token has write access."
        raise UserError(f"Cannot upload to {repository}: {reason.rstrip('.')}. {fix}") from None
    print(f"Pushed: {getattr(done, 'commit_url', repository)}")


if __name__ == "__main__":
    cli.run(main)
