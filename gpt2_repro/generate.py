"""Generate text with a checkpoint.

python -m gpt2_repro.generate runs/demo "The meaning of"
python -m gpt2_repro.generate runs/demo FILE:prompt.txt
python -m gpt2_repro.generate openai-community/gpt2 "The meaning of" --num_samples 3 --temperature 0.8

Pass FILE:prompt.txt to read the prompt from the file prompt.txt, or - to read it from the standard input.
"""

import argparse
import logging
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from gpt2_repro import cli
from gpt2_repro.cli import CommandParser
from gpt2_repro.errors import UserError
from gpt2_repro.model.size import max_positions
from gpt2_repro.run_record.checkpoint import resolve_checkpoint


UTF16 = (b"\xff\xfe", b"\xfe\xff")  # the first bytes of a UTF-16 file
MOST_SAMPLES = 1000  # because all samples are generated in one batch

logger = logging.getLogger("gpt2_repro.generate")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = CommandParser(prog="python -m gpt2_repro.generate", description=__doc__)
    parser.add_argument("checkpoint", help="Run directory, final/, checkpoint-N/ or Hub id.")
    parser.add_argument("words", nargs="*", default=[], metavar="PROMPT", help="Text to continue.")
    parser.add_argument("--prompt", default="", help="Text to continue. (default: start a new document)")
    parser.add_argument("--max_new_tokens", type=int, default=100, help="Tokens to generate. (default: %(default)s)")
    parser.add_argument("--num_samples", type=int, default=1, help="Number of samples. (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: greedy decoding. (default: %(default)s)")
    parser.add_argument(
        "--top_k", type=int, default=50, help="Sample from the top k tokens. 0: all. (default: %(default)s)"
    )
    top_p = "Sample from the most likely tokens with this total probability. (default: %(default)s)"
    parser.add_argument("--top_p", type=float, default=1.0, help=top_p)
    parser.add_argument("--seed", type=int, default=42, help="Random seed. (default: %(default)s)")
    args = parser.parse(argv)
    for name, least in (("max_new_tokens", 1), ("num_samples", 1), ("top_k", 0)):
        if (value := getattr(args, name)) < least:
            raise UserError(f"--{name} {value} must be at least {least}, such as --{name} 10.")
    if args.temperature and not 0.001 <= args.temperature <= 1000:  # probabilities must not overflow
        raise UserError(f"--temperature {args.temperature:g} must be 0, or from 0.001 to 1000, such as 0.8.")
    if args.temperature == 0 and args.num_samples > 1:
        raise UserError("--temperature 0 makes all samples equal. Pass --num_samples 1, or a higher --temperature.")
    if not 0 < args.top_p <= 1:
        raise UserError(f"--top_p {args.top_p} must be above 0 and at most 1, such as 0.9.")
    if args.num_samples > MOST_SAMPLES:
        raise UserError(
            f"--num_samples {args.num_samples} is more than {MOST_SAMPLES}. For more, run again with another --seed."
        )
    if not 0 <= args.seed < 2**63:
        raise UserError(f"--seed {args.seed} is not in the range 0 to 2**63 - 1. For example, pass --seed 42.")
    if args.words and args.prompt:
        raise UserError("Two prompts given. Pass the text either after the checkpoint or with --prompt.")
    if args.words and not Path(args.checkpoint).exists() and Path(args.words[0]).is_dir():
        fix = f"Pass {args.words[0]} first: python -m gpt2_repro.generate {args.words[0]} '{args.checkpoint}'"
        raise UserError(f"{args.checkpoint!r} is not a checkpoint. {fix}")
    if args.words and re.fullmatch(r"checkpoint-\d+|final|runs/\S*", args.words[0]):
        fix = f"Pass a single one, such as {Path(args.checkpoint, Path(args.words[0]).name)}."
        raise UserError(f"Two checkpoints were passed: {args.checkpoint} and {args.words[0]}. {fix}")
    args.prompt = args.prompt or " ".join(args.words)
    if args.prompt == "-":
        args.prompt = sys.stdin.read().removesuffix("\n")
    if args.prompt.startswith("FILE:"):
        file = Path(args.prompt.removeprefix("FILE:"))
        if not file.is_file():
            found = f"{file} is a folder" if file.is_dir() else f"{file} does not exist"
            found = "FILE: needs a path" if args.prompt == "FILE:" else found
            raise UserError(f"{found}. After FILE:, pass the path of a text file, such as FILE:books/prompt.txt.")
        try:
            args.prompt = file.read_text("utf-8-sig")
        except UnicodeDecodeError:
            if b"\0" in file.read_bytes() and file.read_bytes()[:2] not in UTF16:
                raise UserError(f"{file} is not a text file. Pass a file with text in UTF-8.") from None
            encoding = "utf-16" if file.read_bytes()[:2] in UTF16 else "cp1252"
            fix = f"Convert it with `iconv -f {encoding} -t utf-8 {shlex.quote(str(file))} > utf8.txt` and pass FILE:utf8.txt."
            raise UserError(f"{file} is not valid UTF-8. {fix}") from None
    return args


def _load(name: str, source: str) -> tuple[Any, Any]:
    """Return the model and the tokenizer of the checkpoint `name`, found in `source`.

    Raises UserError if loading fails.
    """
    from gpt2_repro.model.export import load_pair

    while True:
        try:
            return load_pair(source)
        except UserError:
            # If the run is in progress, it may have deleted this checkpoint and saved a newer one.
            newest = resolve_checkpoint(name, unfinished=True).source
            if newest == source:
                raise
            source = newest


def main(argv: list[str]) -> None:
    """Load a checkpoint, generate text and print it."""
    args = _parse(argv)
    source = resolve_checkpoint(args.checkpoint, unfinished=True).source

    import torch

    from gpt2_repro.tokenization import start_ids

    model, tokenizer = _load(args.checkpoint, source)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    window = max_positions(model.config)
    start = start_ids(tokenizer, args.prompt)
    kept = window - min(args.max_new_tokens, window // 2)
    if len(start) > kept:
        logger.warning("The prompt has %d tokens. Only the last %d are used.", len(start), kept)
        start = start[-kept:]
    ids = torch.tensor([start] * args.num_samples, device=model.device)
    lengths = {"max_new_tokens": min(args.max_new_tokens, window - len(start)), "pad_token_id": tokenizer.eos_token_id}
    if lengths["max_new_tokens"] < args.max_new_tokens:
        logger.warning(
            "The model's window has %d tokens, including the prompt. At most %d tokens are generated.",
            window,
            lengths["max_new_tokens"],
        )
    sampling = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p")} | {"do_sample": True}
    torch.manual_seed(args.seed)
    written = model.generate(
        ids, attention_mask=torch.ones_like(ids), **lengths, **(sampling if args.temperature else {})
    )
    for number, sample in enumerate(written, 1):
        if args.num_samples > 1:
            print(f"--- {number}")
        print(tokenizer.decode(sample, skip_special_tokens=True))


if __name__ == "__main__":
    cli.run(main)
