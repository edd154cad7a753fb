"""Generate text with a checkpoint.

python -m gpt2_repro.generate runs/demo "The meaning of"
python -m gpt2_repro.generate runs/demo FILE:prompt.txt
python -m gpt2_repro.generate openai-community/gpt2 "The meaning of" --num_samples 3 --temperature 0.8

FILE:prompt.txt reads the prompt from the file prompt.txt.
"""

import argparse
import logging
from pathlib import Path
from typing import Any

from gpt2_repro import cli
from gpt2_repro.cli import CommandParser
from gpt2_repro.errors import UserError, in_a_line
from gpt2_repro.model.size import max_positions
from gpt2_repro.run_record.checkpoint import resolve_checkpoint


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
    ranges: dict[str, tuple[float, float | None]] = {
        "max_new_tokens": (1, None),
        "num_samples": (1, MOST_SAMPLES),
        "top_k": (0, None),
    }
    ranges |= {"temperature": (0, 1000), "top_p": (1e-9, 1), "seed": (0, 2**63 - 1)}
    for name, (least, most) in ranges.items():
        value = getattr(args, name)
        if not (least <= value and (most is None or value <= most)):
            raise UserError(f"--{name} {value} must be at least {least}{f' and at most {most}' if most else ''}.")
    if 0 < args.temperature < 0.001:  # probabilities would overflow
        raise UserError(f"--temperature {args.temperature} must be 0 or at least 0.001.")
    if args.temperature == 0 and args.num_samples > 1:
        raise UserError("--temperature 0 makes all samples equal. Pass --num_samples 1, or a higher --temperature.")
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


def _load(name: str, source: str) -> tuple[Any, Any]:
    """Return the model and the tokenizer of the checkpoint `name` in `source`."""
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
        text = "The model's window has %d tokens, including the prompt. At most %d tokens are generated."
        logger.warning(text, window, lengths["max_new_tokens"])
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
