"""Scores equal those of lm-eval's own class."""

import pickle
import random

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoConfig, AutoModelForCausalLM

from gpt2_repro.evaluation.scorer import SHARING, Scorer


def requests(kind: str, arguments: list[tuple[str, ...]]) -> list[Instance]:
    return [Instance(kind, {}, args, 0, ("task", number, 1)) for number, args in enumerate(arguments)]  # type: ignore[arg-type]


@pytest.mark.parametrize("positions", [1, 200, 10_000])
@pytest.mark.parametrize("model_type", [*SHARING, "gpt_neo"])
def test_scores_equal_those_of_lm_eval(model_type: str, positions: int, model, tokenizer, prose) -> None:
    """Continuations of one context share a row, except for architectures whose attention is not known to allow it."""
    if model_type != "gpt2":
        torch.manual_seed(0)
        shape = {"vocab_size": 300, "hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": 128}
        if model_type == "gpt_neo":
            shape |= {"num_layers": 2, "attention_types": [[["global", "local"], 1]]}
        else:
            shape |= {"num_hidden_layers": 2, "intermediate_size": 64, "num_key_value_heads": 2}
        config = AutoConfig.for_model(model_type, **shape, initializer_range=0.3)
        model = AutoModelForCausalLM.from_config(config).eval()
    options = {"pretrained": model, "tokenizer": tokenizer, "max_length": 64, "batch_size": 2}
    ours, stock = Scorer(positions=positions, **options), HFLM(**options)
    source = random.Random(0)
    words = [document.split() for document in prose]
    cuts = [(text, source.randrange(len(text) - 8), source.randrange(1, 8)) for text in words for _ in range(4)]
    # lm-eval (0.4.13) scores the wrong tokens if a second request has the same text with a later cut.
    cuts = list({(len(text), at + length): (text, at, length) for text, at, length in cuts}.values())
    pairs = [(" ".join(text[:at]), " " + " ".join(text[at : at + length])) for text, at, length in cuts]
    # Several continuations of one context, some longer than the window, and one of them twice.
    pairs += [("the river", f" {' '.join(text[:length])}") for text in words for length in (1, 9, 20)]
    mine, theirs = (one.loglikelihood(requests("loglikelihood", pairs)) for one in (ours, stock))
    assert [score for score, _ in mine] == pytest.approx([score for score, _ in theirs], abs=1e-4)
    assert [greedy for _, greedy in mine] == [greedy for _, greedy in theirs]
    rolling = requests("loglikelihood_rolling", [(document,) for document in prose])
    mine, theirs = (one.loglikelihood_rolling(rolling) for one in (ours, stock))
    assert mine == pytest.approx(theirs, rel=1e-6)
    for score, ids in zip(mine, tokenizer(prose)["input_ids"], strict=True):
        assert sum(number for _, number in score.windows) == len(ids)
        assert pickle.loads(pickle.dumps(score)).windows == score.windows
