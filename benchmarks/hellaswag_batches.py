"""Compare the speed of this project's HellaSwag scoring with two common methods.

python benchmarks/hellaswag_batches.py --data hellaswag_val.jsonl.gz --tokenizer openai-community/gpt2 --items 32
python benchmarks/hellaswag_batches.py --data Rowan/hellaswag --tokenizer openai-community/gpt2            # on a GPU

This project scores HellaSwag while a model trains. In this script, the scored model is an untrained GPT-2 124M on one
device, in bf16 on a GPU and in fp32 on a CPU. Each round measures all methods in turn. The last column of the table is
the share of items for which a method chooses the same ending as this project.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config


sys.path.insert(0, str(Path(__file__).parents[1]))
from gpt2_repro.evaluation.hellaswag import HellaSwag, read_items
from gpt2_repro.model.pretraining import make_pretraining


VOCABULARY = 50_257


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="HellaSwag's validation split: a file or a Hub id.")
    parser.add_argument("--tokenizer", required=True, help="GPT-2's tokenizer: a folder or a Hub id.")
    parser.add_argument("--items", type=int, help="Items, evenly spread over the split. (default: all)")
    parser.add_argument("--positions", type=int, help="Positions per pass. (default: 65,536 on a GPU, 2,048 on a CPU)")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device, dtype = (torch.device("cuda"), torch.bfloat16) if cuda else (torch.device("cpu"), torch.float32)
    positions = options.positions or (65_536 if cuda else 2048)
    tokenizer, items = AutoTokenizer.from_pretrained(options.tokenizer), read_items(options.data)
    items = items[:: max(1, len(items) // (options.items or len(items)))]
    scorer = HellaSwag(items, tokenizer, window=1024)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50_304, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="causal_sdpa").to(device).eval()
    model = make_pretraining(model, vocab_size=VOCABULARY)

    def by_length() -> torch.Tensor:
        losses = scorer.losses(
            lambda ids, labels: model(input_ids=ids, shift_labels=labels, reduction="none").loss,
            positions=positions,
            device=device,
        )
        return losses.argmin(1)

    @torch.no_grad()
    def in_groups(size: int) -> torch.Tensor:
        """Return the index of the best ending of each item.

        A forward pass scores `size` endings. An item has 4 endings.
        """
        # With 4 endings, a pass processes one item, as in build-nanogpt's hellaswag.py.
        means = []
        for first in range(0, len(scorer.rows), size):
            ids, labels, _ = (part.to(device) for part in scorer.collate(range(first, first + size)))
            logits = model(input_ids=ids).logits.float()
            each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
            means.append(each.sum(1) / (labels >= 0).sum(1))
        return torch.cat(means).view(-1, 4).argmin(1)

    contenders: dict[str, Callable[[], torch.Tensor]] = {
        "this project": by_length,
        "one item per pass, as in build-nanogpt": lambda: in_groups(4),
        "one ending per pass": lambda: in_groups(1),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    answers = {name: contend() for name, contend in contenders.items()}  # this also warms up each contender
    for _ in range(options.rounds):
        for name, contend in contenders.items():
            began = time.perf_counter()
            contend().cpu()
            seconds[name].append(time.perf_counter() - began)
    ours = statistics.median(seconds["this project"])
    tokens = sum(len(row) - 1 for row, _ in scorer.rows)
    print(
        f"{len(items):,} items, {tokens:,} tokens, {positions:,} positions per pass, "
        f"{device}, {dtype}, torch {torch.__version__}\n"
    )
    print("| contender | seconds, median | relative time | same answers |\n| --- | ---: | ---: | ---: |")
    for name, times in seconds.items():
        same = (answers[name] == answers["this project"]).float().mean().item()
        print(f"| {name} | {statistics.median(times):.2f} | {statistics.median(times) / ours:.2f} | {same:.1%} |")


if __name__ == "__main__":
    main()
