"""Generate text with a checkpoint.

python -m gpt2_repro.generate runs/demo "The meaning of"
python -m gpt2_repro.generate runs/demo "$(cat prompt.txt)"
python -m gpt2_repro.generate openai-community/gpt2 "The meaning of" --num_samples 3 --temperature 0.8
"""

import argparse
import logging

from gpt2_repro import cli
from gpt2_repro.hardware import gpu_kind
from gpt2_repro.model.checkpoint import resolve_checkpoint
from gpt2_repro.model.size import max_positions


logger = logging.getLogger("gpt2_repro.generate")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = cli.CommandParser(prog="python -m gpt2_repro.generate", description=__doc__)
    parser.add_argument("checkpoint", help="Run directory, final/, checkpoint-N/ or Hub id.")
    parser.add_argument("text", nargs="*", metavar="PROMPT", help="Text to continue. (default: a new document)")
    parser.add_argument("--prompt", default="", help="The same, as an option.")
    parser.add_argument("--max_new_tokens", type=cli.positive_count, default=100, help="Tokens to generate.")
    parser.add_argument("--num_samples", type=cli.between(1, 1000), default=1, help="Number of samples, in one batch.")
    parser.add_argument("--temperature", type=cli.between(0.0, 1000.0), default=1.0, help="0: greedy decoding.")
    parser.add_argument("--top_k", type=cli.between(0, 10**9), default=50, help="Draw from the top k tokens. 0: all.")
    parser.add_argument("--top_p", type=cli.between(1e-9, 1.0), default=1.0, help="Draw from this total probability.")
    parser.add_argument("--seed", type=cli.between(0, 2**63 - 1), default=42, help="Random seed.")
    args = parser.parse(argv)
    if not args.prompt:
        args.prompt = " ".join(args.text)
    return args


def main(argv: list[str]) -> None:
    """Load a checkpoint, generate text and print it."""
    args = _parse(argv)
    checkpoint = resolve_checkpoint(args.checkpoint, unfinished=True)
    checkpoint.log_weights()

    import torch
    from transformers import GenerationConfig

    from gpt2_repro.model.load import load_pair
    from gpt2_repro.tokenization import start_ids

    model, tokenizer = load_pair(checkpoint.source)
    device = gpu_kind() or "cpu"
    model = model.to(device)
    window = max_positions(model.config)
    start = start_ids(tokenizer, args.prompt)
    reserved = min(args.max_new_tokens, window // 2)  # tokens for new text
    longest_prompt = window - reserved
    if len(start) > longest_prompt:
        logger.warning("The prompt has %d tokens. Only the last %d are used.", len(start), longest_prompt)
        start = start[-longest_prompt:]
    room = window - len(start)
    if room < args.max_new_tokens:
        text = "The model's window has %d tokens, including the prompt. At most %d tokens are generated."
        logger.warning(text, window, room)
    # generate() adds the settings of the model's generation_config.json, such as a penalty for repetitions, to those
    # that it gets.
    model.generation_config = GenerationConfig(
        max_new_tokens=min(args.max_new_tokens, room),
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    if args.temperature >= 0.001:  # for lower values, probabilities would overflow
        model.generation_config.update(
            do_sample=True, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p
        )
    torch.manual_seed(args.seed)
    rows = [start] * args.num_samples
    ids = torch.tensor(rows, device=model.device)
    mask = torch.ones_like(ids)
    samples = model.generate(ids, attention_mask=mask)
    for number, sample in enumerate(samples, 1):
        if len(samples) > 1:
            print(f"--- {number}")
        text = tokenizer.decode(sample, skip_special_tokens=True)
        print(text)


if __name__ == "__main__":
    cli.run(main)
