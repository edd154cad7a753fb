"""A language small enough that a model of it is trained in seconds, a sound model, and models with a planted defect.

A document of "village" tells of one of forty people and one of forty places, one of "market" of a good and its price, over
and over: whoever reads the context knows which. So context, domain, position and the start of a document all matter.
"""

import functools
import itertools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.evaluation.documents import cut_passages


WINDOW, END = 64, "<|endoftext|>"
KINDS = {"village": ("visits", "the", "people", "places"), "market": ("costs", "exactly", "goods", "prices")}


def words_of(slot: str) -> list[str]:
    syllables = ["".join(pair) for pair in itertools.product("bdfgklmn", "aeiou")]
    return [f"{syllable}{'lorintha' if slot in ('places', 'prices') else 'min'}{slot[:2]}" for syllable in syllables]


def sentences(kind: str, source: random.Random) -> list[str]:
    verb, article, *slots = KINDS[kind]
    subject, thing = (source.choice(words_of(slot)) for slot in slots)
    count = source.randint(8, 30)
    return [
        f"{subject} {verb} {article} {thing} {source.choice(['today', 'often', 'quite often'])}." for _ in range(count)
    ]


def tell(kinds: Sequence[str], count: int, *, seed: int) -> list[list[str]]:
    """Documents as their sentences."""
    source = random.Random(seed)
    return [sentences(source.choice(kinds), source) for _ in range(count)]


def texts_of(told: Sequence[Sequence[str]]) -> list[str]:
    return [" ".join(document) for document in told]


@pytest.fixture(scope="session")
def language() -> PreTrainedTokenizerFast:
    """Its tokenizer, of whole words."""
    words = [END, ".", "today", "quite", "often"]
    for verb, article, *slots in KINDS.values():
        words += [verb, article, *(word for slot in slots for word in words_of(slot))]
    level = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="often"))
    level.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=level, bos_token=END, eos_token=END)


def train(
    tokenizer: PreTrainedTokenizerFast,
    texts: Sequence[str],
    *,
    rows: int = WINDOW,
    separator: bool = True,
    steps: int = 200,
    seed: int = 0,
) -> GPT2LMHeadModel:
    """A GPT-2 with WINDOW positions, trained on the texts packed into rows of so many targets."""
    end = tokenizer.eos_token_id
    stream: list[int] = []
    for ids in tokenizer(list(texts))["input_ids"]:
        stream += [end, *ids] if separator else ids
    packed = torch.tensor([stream[start : start + rows + 1] for start in range(0, len(stream) - rows, rows)])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for so small a model a second one is no help, and a hindrance where its core is taken
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(
        GPT2Config(
            **{"vocab_size": len(tokenizer), "n_positions": WINDOW, "n_embd": 64, "n_layer": 2, "n_head": 2},
            **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
            **{"bos_token_id": end, "eos_token_id": end, "initializer_range": 0.1},
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, max(20, steps), pct_start=0.1)
    for _ in range(steps):
        batch = packed[torch.randint(len(packed), (1024 // rows,))]
        logits = model(batch[:, :-1]).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    torch.set_num_threads(threads)
    return model.eval()


@pytest.fixture(scope="session")
def planted(language: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a trained model by the name of what is wrong with it, or of how it differs soundly."""
    both = tell(list(KINDS), 4000, seed=1)
    torn = [sentence for document in both for sentence in document]
    random.Random(2).shuffle(torn)
    makers: dict[str, Callable[[], GPT2LMHeadModel]] = {
        "sound": lambda: train(language, texts_of(both)),
        "other_seed": lambda: train(language, texts_of(both), seed=1),
        "random": lambda: train(language, texts_of(both), steps=1),
        "brief": lambda: train(language, texts_of(both), steps=120),
        "untrained_positions": lambda: train(language, texts_of(both), rows=WINDOW // 2),
        "no_separator": lambda: train(language, texts_of(both), separator=False),
        "market_alone": lambda: train(language, texts_of(tell(["market"], 4000, seed=1))),
        "torn_documents": lambda: train(language, [" ".join(torn[at : at + 10]) for at in range(0, len(torn), 10)]),
    }

    @functools.cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        makers[name]().save_pretrained(folder)
        language.save_pretrained(folder)
        return folder

    return make


def write_lines(path: Path, column: str, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="session")
def local_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LAMBADA is of the village, wikitext of the market."""
    folder = tmp_path_factory.mktemp("local")
    passages = cut_passages(texts_of(tell(["village"], 300, seed=8)), 300)
    write_lines(folder / "lambada_openai.jsonl", "text", passages)
    write_lines(folder / "wikitext.jsonl", "page", texts_of(tell(["market"], 300, seed=9)))
    return folder


@pytest.fixture(scope="session")
def prepared(
    language: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[tuple[str, ...]], Path]:
    """A prepared folder of documents of some kinds, with a further validation set of the village."""

    @functools.cache
    def make(kinds: tuple[str, ...]) -> Path:
        folder = tmp_path_factory.mktemp("prepared")
        language.save_pretrained(folder / "tokenizer")
        village = write_lines(folder / "village.jsonl", "text", texts_of(tell(["village"], 300, seed=6)))
        train_file = write_lines(folder / "train.jsonl", "text", texts_of(tell(kinds, 3000, seed=5)))
        prepare(
            DataArguments(
                data_files=[str(train_file)],
                tokenizer=str(folder / "tokenizer"),
                sequence_length=WINDOW,
                split="hash",
                validation_fraction=0.1,
                validation_sets=[f"village={village}"],
                dataset_dir=str(folder / "data"),
            )
        )
        return folder / "data"

    return make
