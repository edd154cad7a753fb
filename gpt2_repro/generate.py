"""Generate text with a checkpoint.

python -m gpt2_repro.generate runs/demo "The meaning of"
python -m gpt2_repro.generate runs/demo FILE:prompt.txt
python -m gpt2_repro.generate openai-community/gpt2 "The meaning of" --num_samples 3 --temperature 0.8

FILE:prompt.txt reads the prompt from the file prompt.txt.
"""

import argparse
import logging
import math
from pathlib import Path
from typing import Any

from gpt2_repro import cli
from gpt2_repro.cli import CommandParser
from gpt2_repro.errors import UserError, in_a_line
from gpt2_repro.model.size import max_positions
from gpt2_repro.run_record.checkpoint import resolve_checkpoint


# Default, smallest and largest value, and help of each option.
OPTIONS: dict[str, tuple[Any, float, float, str]] = {
    "max_new_tokens": (100, 1, math.inf, "Tokens to generate."),
    "num_samples": (1, 1, 1000, "Number of samples, which are generated in one batch."),
    "temperature": (1.0, 0, 1000, "Below 0.001: greedy decoding."),
    "top_k": (50, 0, math.inf, "Sample from the top k tokens. 0: all."),
    "top_p": (1.0, 1e-9, 1, "Sample from the most likely tokens with this total probability."),
    "seed": (42, 0, 2**63 - 1, "Random seed."),
}

logger = logging.getLogger("gpt2_repro.generate")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = CommandParser(prog="python -m gpt2_repro.generate", description=__doc__)
    parser.add_argument("checkpoint", help="Run directory, final/, checkpoint-N/ or Hub id.")
    parser.add_argument("words", nargs="*", default=[], metavar="PROMPT", help="Text to continue.")
    parser.add_argument("--prompt", default="", help="Text to continue. (default: start a new document)")
    for name, (default, _, _, text) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{text} (default: %(default)s)")
    args = parser.parse(argv)
    for name, (_, least, most, _) in OPTIONS.items():
        if not least <= getattr(args, name) <= most:
            raise UserError(f"--{name} {getattr(args, name)} must be at least {least} and at most {most}.")
    if args.words and args.prompt:
        raise UserError("Two prompts given. Pass the text either after the checkpoint or with --prompt.")
    args.prompt = args.prompt or " ".join(args.words)
    if args.prompt.startswith("FILE:"):
        file = Path(args.prompt.removeprefix("FILE:"))
        try:
            args.prompt = file.read_text("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file} cannot be read as a text file in UTF-8: {in_a_line(error)}") from None
    return args


def main(argv: list[str]) -> None:
    """Load a checkpoint, generate text and print it."""
    args = _parse(argv)
    source = resolve_checkpoint(args.checkpoint, unfinished=True).source

    import torch

    from gpt2_repro.model.export import load_pair
    from gpt2_repro.tokenization import start_ids

    model, tokenizer = load_pair(source)
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
        text = "The model's window has %d tokens, including the prompt. At most %d tokens are generated."
        logger.warning(text, window, lengths["max_new_tokens"])
    sampling = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p")} | {"do_sample": True}
    torch.manual_seed(args.seed)
    sampling = sampling if args.temperature >= 0.001 else {}  # probabilities would overflow
    written = model.generate(ids, attention_mask=torch.ones_like(ids), **lengths, **sampling)
    for number, sample in enumerate(written, 1):
        if args.num_samples > 1:
            print(f"--- {number}")
        print(tokenizer.decode(sample, skip_special_tokens=True))


if __name__ == "__main__":
    cli.run(main)
