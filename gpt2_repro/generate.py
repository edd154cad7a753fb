"""Generate text with a checkpoint.

python -m gpt2_repro.generate runs/demo "The meaning of"
python -m gpt2_repro.generate runs/demo FILE:prompt.txt
python -m gpt2_repro.generate openai-community/gpt2 "The meaning of" --num_samples 3 --temperature 0.8

python -m gpt2_repro.generate runs/chat --chat                          answers each line that you type

FILE:prompt.txt reads the prompt from the file prompt.txt.
"""

import argparse
import contextlib
import logging
from pathlib import Path
from typing import Any

from gpt2_repro import cli
from gpt2_repro.checkpoints.checkpoint import resolve_checkpoint
from gpt2_repro.errors import UserError, in_a_line
from gpt2_repro.hardware import gpu_kind
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
    parser.add_argument("--chat", action="store_true", help="Answer lines of standard input, with a chat template.")
    parser.add_argument("--seed", type=cli.between(0, 2**63 - 1), default=42, help="Random seed.")
    args = parser.parse(argv)
    args.prompt = args.prompt or " ".join(args.text)
    if args.prompt.startswith("FILE:"):
        file = Path(args.prompt.removeprefix("FILE:"))
        try:
            args.prompt = file.read_text("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file} cannot be read as a text file in UTF-8: {in_a_line(error)}") from None
    return args


def _open(args: argparse.Namespace) -> tuple[Any, Any]:
    """Return the model of a command, on the GPU if there is one, and its tokenizer."""
    source = resolve_checkpoint(args.checkpoint, unfinished=True).source
    from gpt2_repro.model.load import load_pair

    model, tokenizer = load_pair(source)
    return model.to(gpu_kind() or "cpu"), tokenizer


def main(argv: list[str]) -> None:
    """Load a checkpoint, generate text and print it."""
    if (args := _parse(argv)).chat:
        chat(args)
        return
    for number, text in enumerate(samples(argv), 1):
        if args.num_samples > 1:
            print(f"--- {number}")
        print(text)


def chat(args: argparse.Namespace) -> None:
    """Answer the prompt and each line of standard input, word by word, until its end.

    If the dialogue does not fit into the window, the oldest messages are forgotten.
    """
    model, tokenizer = _open(args)

    import torch
    from transformers import TextStreamer

    if not tokenizer.chat_template:
        fix = "Fine-tune a model that was exported with --chat (docs/after-pretraining.md)."
        raise UserError(f"{args.checkpoint} has no chat template. {fix}")
    room = max_positions(model.config) - min(args.max_new_tokens, max_positions(model.config) // 2)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    messages: list[dict[str, str]] = []
    torch.manual_seed(args.seed)
    with contextlib.suppress(EOFError):
        while line := args.prompt or input("> "):
            args.prompt = ""
            for token in tokenizer.all_special_tokens:  # a typed <|endoftext|> would end the message
                line = line.replace(token, " ")
            messages.append({"role": "user", "content": line.strip()})
            while len(ids := _ids_of(tokenizer, messages)) > room and len(messages) > 1:
                del messages[:2]  # a message and its answer
            if len(ids) > room:
                logger.warning("The message has %d tokens. At most %d fit into the window.", len(ids), room)
                messages.clear()
                continue
            written = _continue(model, [ids], args, tokenizer, streamer=streamer)
            answer = tokenizer.decode(written[0, len(ids) :], skip_special_tokens=True).strip()
            messages.append({"role": "assistant", "content": answer})


def _ids_of(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


def _continue(
    model: Any, rows: list[list[int]], args: argparse.Namespace, tokenizer: Any, streamer: Any = None
) -> Any:
    """Return rows of ids [rows, T] with at most --max_new_tokens further ids, as many as fit into the window."""
    import torch

    ids = torch.tensor(rows, device=model.device)
    new = min(args.max_new_tokens, max_positions(model.config) - ids.shape[1])
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new, "streamer": streamer}
    sampling = {"do_sample": True, "temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    is_greedy = args.temperature < 0.001  # probabilities would overflow
    options |= {"do_sample": False} if is_greedy else sampling
    return model.generate(ids, pad_token_id=tokenizer.eos_token_id, **options)


def samples(argv: list[str]) -> list[str]:
    """Return the texts that a checkpoint generates, for the words of a command line."""
    args = _parse(argv)
    model, tokenizer = _open(args)

    import torch

    from gpt2_repro.tokenization import start_ids

    window = max_positions(model.config)
    start = start_ids(tokenizer, args.prompt)
    room = window - min(args.max_new_tokens, window // 2)
    if len(start) > room:
        logger.warning("The prompt has %d tokens. Only the last %d are used.", len(start), room)
        start = start[-room:]
    if window - len(start) < args.max_new_tokens:
        text = "The model's window has %d tokens, including the prompt. At most %d tokens are generated."
        logger.warning(text, window, window - len(start))
    torch.manual_seed(args.seed)
    written = _continue(model, [start] * args.num_samples, args, tokenizer)
    return [tokenizer.decode(sample, skip_special_tokens=True) for sample in written]


if __name__ == "__main__":
    cli.run(main)
