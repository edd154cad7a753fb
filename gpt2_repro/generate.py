"""Sample text from a checkpoint.

python -m gpt2_repro.generate runs/demo/final --prompt "The meaning of"
python -m gpt2_repro.generate openai-community/gpt2 --prompt "The meaning of" --num_samples 3 --temperature 0.8
"""

from gpt2_repro import cli
from gpt2_repro.checkpoint import resolve_checkpoint
from gpt2_repro.cli import CommandParser
from gpt2_repro.errors import UserError


def main(argv: list[str]) -> None:
    """Load, sample, print."""
    parser = CommandParser(prog="python -m gpt2_repro.generate", description=__doc__)
    parser.add_argument("checkpoint", help="A final/, a checkpoint-N/, a run directory or a Hub id.")
    parser.add_argument("--prompt", default="", help="Text to continue; empty starts a document.")
    parser.add_argument("--max_new_tokens", type=int, default=100, help="Tokens to write. (default: %(default)s)")
    parser.add_argument("--num_samples", type=int, default=1, help="Continuations of it. (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the likeliest. (default: %(default)s)")
    parser.add_argument("--top_k", type=int, default=50, help="Sample from the k likeliest. (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=42, help="(default: %(default)s)")
    args = parser.parse(argv)
    if args.max_new_tokens < 1 or args.num_samples < 1 or args.temperature < 0 or args.top_k < 1:
        raise UserError("--max_new_tokens, --num_samples and --top_k must be at least 1, --temperature at least 0")
    checkpoint = resolve_checkpoint(args.checkpoint)

    import torch

    from gpt2_repro.model.export import load_pair, start_ids

    model, tokenizer = load_pair(checkpoint.source)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    window = model.config.max_position_embeddings
    start = start_ids(tokenizer, args.prompt, window=window)
    ids = torch.tensor([start] * args.num_samples, device=model.device)
    lengths = {"max_new_tokens": min(args.max_new_tokens, window - len(start)), "pad_token_id": tokenizer.eos_token_id}
    sampling = {"do_sample": True, "temperature": args.temperature, "top_k": args.top_k} if args.temperature else {}
    torch.manual_seed(args.seed)
    written = model.generate(ids, attention_mask=torch.ones_like(ids), **lengths, **sampling)
    for number, sample in enumerate(written, 1):
        if args.num_samples > 1:
            print(f"--- {number}")
        print(tokenizer.decode(sample, skip_special_tokens=True))


if __name__ == "__main__":
    cli.run(main)
