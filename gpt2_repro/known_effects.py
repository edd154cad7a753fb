"""What a deviation from the faithful recipe is known to do: one line a field, each with where it was seen.

The runs behind the lines are described in docs/recipes.md: llm.c's published logs; "the blog", suzyahyah's reproduction,
which lost LAMBADA and wikitext; G. Thomas's ablations of a 163M model without tied embeddings on 3.2B tokens of FineWeb;
nanochat's reports; modded-nanogpt's records. Losses are nats per token.
"""

from collections.abc import Callable
from typing import Any


UNKNOWN = "effect not known here"
THOMAS = "(G. Thomas, 163M: another model and data)"
OTHER_DOCUMENTS = "other validation documents: their losses do not compare, with each other or with published curves"
OTHER_SEED = "another draw: equal runs spread by a sigma of about 0.0013 nats (modded-nanogpt track 3, another model)"
OTHER_SIZE = "llm.c's runs on FineWeb ended at 3.272 for 124M (10.3B tokens) and 2.928 for 350M (31.5B tokens)"


def _source(run: str, recipe: str) -> str:
    if any("edu" in name for name in (run, recipe)):
        return (
            "FineWeb-Edu: LAMBADA 9 to 12 points under GPT-2 models of equal HellaSwag (nanochat's runs, other models)"
        )
    if any("openwebtext" in name for name in (run, recipe)):
        return (
            "OpenWebText, 27.5B tokens: LAMBADA 29.9 to gpt2's 32.6, wikitext 41.3 to its 37.4 (ml-by-hand, own BPE)"
        )
    return f"other text: losses do not compare; {UNKNOWN}"


def _sequence_length(run: int, recipe: int) -> str:
    return (
        f"compare at max_length {min(run, recipe)}; a window of 512 instead of 1024 costs gpt2 0.114 nats on wikitext"
    )


def _separator(run: str, recipe: str) -> str:
    if "none" in (run, recipe):
        return "none: <|endoftext|> is never trained, and lm-eval starts every wikitext page from it"
    return f"llm.c and build-nanogpt put it before, nanoGPT after each document; {UNKNOWN}"


def _optim(run: str, recipe: str) -> str:
    if all(
        name.startswith("adamw_torch") and name.removeprefix("adamw_torch") in ("", "_fused") for name in (run, recipe)
    ):
        return "the same AdamW by another kernel: rounding"
    if "muon" in (run, recipe):
        return f"Muon took 0.65 to 0.74 of AdamW's tokens to one loss (modded-nanogpt, other architectures); {UNKNOWN}"
    return UNKNOWN


def _learning_rate(run: float, recipe: float) -> str:
    if run >= 5e-3:
        return "5e-3 was unstable (the blog)"
    if run <= 5e-5:
        return "5e-5 converged poorly, to a training loss of about 5 (the blog)"
    if 1e-3 <= run <= 2e-3:
        return (
            "1.5e-3 reached 3.28 on FineWeb after 6.4B tokens, llm.c's 6e-4 after 10B (T. Romero's speedrun worklog)"
        )
    return f"5e-5 converged poorly and 5e-3 was unstable (the blog); between them {UNKNOWN}"


def _tokens_per_step(run: int, recipe: int) -> str:
    if run < recipe:
        return "a run with a quarter of the rows stayed at a loss of 7.5 (nanoGPT#411); the blog asks for 500k or more"
    return UNKNOWN


def _train_sampling_strategy(run: str, recipe: str) -> str:
    if "group_by_length" in (run, recipe):
        return f"group_by_length counts tokens_per_step without padding: other steps; {UNKNOWN}"
    return f"llm.c shuffles, build-nanogpt reads in order; {UNKNOWN}"


def _eval_strategy(run: str, recipe: str) -> str:
    return "no validation loss is logged" if run == "no" else "validation losses are logged"


# What is known, by field, in the order of printing. A text, or a function of the run's value and the recipe's.
KNOWN_EFFECTS: dict[str, str | Callable[[Any, Any], str]] = {
    "source": _source,
    "data_files": "text of your own: no published loss or score stands beside it",
    "tokenizer": "losses per token do not compare: the blog's own BPE had about 0.5 less at an equal HellaSwag",
    "sequence_length": _sequence_length,
    "packing": f"wrap keeps documents apart and drops their windows under min_length; {UNKNOWN}",
    "min_length": f"drops short documents and the ends of long ones; {UNKNOWN}",
    "separator": _separator,
    "max_tokens": f"another amount of text; a run that is longer repeats it; {UNKNOWN}",
    "init_from": "trained weights at the start: no reproduction from scratch",
    "model_type": f"another architecture: curves and scores published for GPT-2 do not apply; {UNKNOWN}",
    "config_overrides": f"another function or shape of the same parts; {UNKNOWN}",
    "n_layer": OTHER_SIZE,
    "n_embd": OTHER_SIZE,
    "dropout": f"without it 3.6413, with 0.1 3.6915 {THOMAS}",
    "document_mask": f"less context, in validation too: losses do not compare with those without; {UNKNOWN}",
    "pad_vocab_to_multiple_of": "padding ids are never predicted: speed, and initial weights as by another seed",
    "optim": _optim,
    "learning_rate": _learning_rate,
    "adam_beta1": UNKNOWN,
    "adam_beta2": f"0.999 is transformers' default, which the blog seems to have kept; {UNKNOWN}",
    "adam_epsilon": UNKNOWN,
    "weight_decay": f"0.01 gave 3.6429, 0.1 on all weights 3.6915 {THOMAS}; the blog: not critical",
    "max_grad_norm": f"with clipping 3.6783, without 3.6915 {THOMAS}; nanochat saw no effect",
    "warmup_steps": f"llm.c has 700, build-nanogpt 715, nanoGPT 2,000; {UNKNOWN}",
    "lr_scheduler_type": f"llm.c has both cosine and warmup_stable_decay; {UNKNOWN}",
    "decay_fraction": f"of warmup_stable_decay; llm.c has 0.2; {UNKNOWN}",
    "final_learning_rate_fraction": f"llm.c ends at 0, build-nanogpt and nanoGPT at 0.1; {UNKNOWN}",
    "tokens_per_step": _tokens_per_step,
    "total_tokens": "llm.c on FineWeb: 3.859 at 1.0B tokens, 3.554 at 2.6B, 3.392 at 5.2B, 3.272 at 10.3B, the end",
    "max_steps": "the cosine spans the steps: a shorter run is no beginning of a longer one (that is stop_at_step)",
    "stop_at_step": "ends there with the schedule of the whole run: compare at equal steps",
    "train_sampling_strategy": _train_sampling_strategy,
    "bf16": f"fp32 gave 3.6790, mixed precision 3.6915 {THOMAS}",
    "accept_any_hardware": "true takes fp32 where there is no bf16: environment.json says what ran",
    "seed": OTHER_SEED,
    "data_seed": OTHER_SEED,
    "split": OTHER_DOCUMENTS,
    "validation_tokens": OTHER_DOCUMENTS,
    "validation_fraction": OTHER_DOCUMENTS,
    "split_seed": OTHER_DOCUMENTS,
    "eval_tokens": "published FineWeb losses are means over the first 10,485,760 validation tokens",
    "eval_strategy": _eval_strategy,
    "logging_nan_inf_filter": "true hides losses that are not finite",
    "tasks": "only tasks that both have compare",
    "baseline": "differences stand against another model",
    "max_length": "gpt2's wikitext word perplexity: 37.4 at 1024, 42.5 at 512; LAMBADA and HellaSwag fit in 224 tokens",
}


def known_effect(field: str, run: Any, recipe: Any) -> str:
    """What it is known to do that `field` is `run` where the recipe has `recipe`, in at most 110 characters."""
    effect = KNOWN_EFFECTS.get(field, UNKNOWN)
    return effect if isinstance(effect, str) else effect(run, recipe)
