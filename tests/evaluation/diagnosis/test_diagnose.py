"""`gpt2_repro.diagnose` names the defect of a model, and no other defect.

For a model without a defect, `gpt2_repro.diagnose` names no defect.
"""

import copy
import functools
import itertools
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from gpt2_repro import diagnose
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.errors import UserError
from gpt2_repro.evaluation.comparison import DIAGNOSIS_TABLES
from gpt2_repro.evaluation.documents import cut_passages


WINDOW, END = 64, "<|endoftext|>"
# A "village" document repeats a person and a place. A "market" document repeats a product and its price. The loss
# therefore depends on the context, the kind of text, the position and the start of the document.
KINDS = {"village": ("visits", "the", "people", "places"), "market": ("costs", "exactly", "goods", "prices")}


def words_of(slot: str) -> list[str]:
    syllables = ["".join(pair) for pair in itertools.product("bdfgklmn", "aeiou")]
    return [f"{syllable}{'lorintha' if slot in ('places', 'prices') else 'min'}{slot[:2]}" for syllable in syllables]


def make_documents(count: int, *, seed: int, kind: str = "") -> list[str]:
    """Return documents of 8 to 30 sentences.

    `kind` is the topic of all documents: village or market. If `kind` is empty, the topic of each document is random.
    """
    source, documents = random.Random(seed), []
    for _ in range(count):
        verb, article, *slots = KINDS[kind or source.choice(list(KINDS))]
        subject, thing = (source.choice(words_of(slot)) for slot in slots)
        ends = [source.choice(["today", "often", "quite often"]) for _ in range(source.randint(8, 30))]
        documents.append(" ".join(f"{subject} {verb} {article} {thing} {end}." for end in ends))
    return documents


@pytest.fixture(scope="module")
def language() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per word of the artificial language of these tests."""
    words = [END, ".", "today", "quite", "often"]
    for verb, article, *slots in KINDS.values():
        words += [verb, article, *(word for slot in slots for word in words_of(slot))]
    level = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="often"))
    level.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=level, bos_token=END, eos_token=END)


def train_model(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[GPT2LMHeadModel]:
    """Train a GPT-2 with WINDOW positions. Return copies after 0, 70 and 200 steps."""
    end = tokenizer.eos_token_id
    stream = [number for ids in tokenizer(texts)["input_ids"] for number in (end, *ids)]
    packed = torch.tensor([stream[start : start + WINDOW + 1] for start in range(0, len(stream) - WINDOW, WINDOW)])
    torch.manual_seed(0)
    config = GPT2Config(
        **{"vocab_size": len(tokenizer), "n_positions": WINDOW, "n_embd": 64, "n_layer": 2, "n_head": 2},
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0),
        **{"bos_token_id": end, "eos_token_id": end, "initializer_range": 0.1, "activation_function": "relu"},
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, 201, pct_start=0.1)
    kept = []
    for step in range(201):
        if step in (0, 70, 200):
            kept.append(copy.deepcopy(model).eval())
        batch = packed[torch.randint(len(packed), (16,))]
        logits = model(batch[:, :-1]).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return kept


@pytest.fixture(scope="module")
def planted(language: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that saves a model with a named defect and returns the model folder."""
    untrained, brief, sound = train_model(language, make_documents(2000, seed=1))

    def with_random(weights: str, rows: slice | list[int], kept: float = 0.0, scale: float = 0.1) -> GPT2LMHeadModel:
        model = copy.deepcopy(sound)
        with torch.no_grad():
            table = model.get_parameter(f"transformer.{weights}.weight")
            table[rows] = kept * table[rows] + torch.randn_like(table[rows]) * scale
        return model

    def without_attention() -> GPT2LMHeadModel:
        model = copy.deepcopy(sound)
        for block in model.transformer.h:
            block.attn.c_proj.weight.data.zero_()
        return model

    village = language.convert_tokens_to_ids([*words_of("people"), *words_of("places")])
    makers: dict[str, Callable[[], GPT2LMHeadModel]] = {
        "untrained": lambda: untrained,
        "brief": lambda: brief,
        "sound": lambda: sound,
        "noisy": lambda: with_random("wte", slice(None), kept=1.0, scale=0.002),
        "no_context": without_attention,
        "untrained_positions": lambda: with_random("wpe", slice(WINDOW // 2, WINDOW)),
        "no_separator": lambda: with_random("wte", [language.eos_token_id]),
        "no_village": lambda: with_random("wte", village),
    }

    @functools.cache
    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        torch.manual_seed(1)
        makers[name]().save_pretrained(folder)
        language.save_pretrained(folder)
        return folder

    return make


def write_lines(path: Path, column: str, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def local_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with generated texts in place of the LAMBADA and wikitext data."""
    folder = tmp_path_factory.mktemp("local")
    passages = cut_passages(make_documents(150, seed=8, kind="village"), 150)
    write_lines(folder / "lambada_openai.jsonl", "text", passages)
    write_lines(folder / "wikitext.jsonl", "page", make_documents(150, seed=9, kind="market"))
    return folder


@pytest.fixture(scope="module")
def prepared(language: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder of generated text with two validation sets."""
    folder = tmp_path_factory.mktemp("prepared")
    language.save_pretrained(folder / "tokenizer")
    village = write_lines(folder / "village.jsonl", "text", make_documents(150, seed=6, kind="village"))
    both = write_lines(folder / "train.jsonl", "text", make_documents(1000, seed=5))
    sets = {"split": "hash", "validation_fraction": 0.1, "validation_sets": [f"village={village}"]}
    places = {"data_files": [str(both)], "tokenizer": str(folder / "tokenizer"), "dataset_dir": str(folder / "data")}
    prepare(DataArguments(sequence_length=WINDOW, **sets, **places))
    return folder / "data"


@pytest.fixture
def run(planted: Callable[[str], Path], prepared: Path, local_data: Path, tmp_path: Path) -> Callable[..., Any]:
    def go(name: str, baseline: str = "sound") -> dict[str, Any]:
        words = [planted(name), "--baseline", planted(baseline), "--dataset_dir", prepared]
        words += ["--local_data", local_data, "--tokens", "4000", "--output_dir", tmp_path / name, "--device", "cpu"]
        diagnose.main([*map(str, words)])
        return json.loads((tmp_path / name / "diagnosis.json").read_text(encoding="utf-8"))

    return go


@pytest.mark.parametrize(
    ("name", "baseline", "causes"),
    [
        ("untrained_positions", "sound", ["untrained positions"]),
        ("no_separator", "sound", ["a separator that was not learned"]),
        ("no_village", "sound", ["the text that it was trained on"]),
        ("no_context", "sound", ["context that is not used"]),
        ("untrained", "sound", ["context that is not used"]),
        ("noisy", "sound", []),
        ("brief", "sound", []),
        ("sound", "no_separator", []),
        ("sound", "untrained_positions", []),
    ],
)
def test_a_planted_defect_is_named_and_nothing_else(run, name: str, baseline: str, causes: list[str]) -> None:
    found = run(name, baseline)
    assert [its["name"] for its in found["causes"]] == causes and (causes or not found["not_judged"])
    assert all(cause in found["conclusion"] for cause in causes)
    assert [jump["position"] for jump in found["jump"]] == ([32] if name == "untrained_positions" else [])
    assert ("--diff_recipe" in found["conclusion"]) == (not causes)


def test_both_files_hold_the_same_numbers(run, tmp_path: Path, capsys) -> None:
    found = run("brief")
    table = (tmp_path / "brief" / "diagnosis.md").read_text(encoding="utf-8")
    assert table in capsys.readouterr().out and found["window"] == WINDOW
    labels = [bucket["label"] for bucket in found["domains"]]
    assert labels == ["validation text", "validation village", "LAMBADA passages", "wikitext"]
    for bucket in itertools.chain.from_iterable(found[name] for name in DIAGNOSIS_TABLES):
        shown = f"| {bucket['label']} | {bucket['tokens']:,} | {bucket['ours']:.3f} | {bucket['theirs']:.3f} |"
        assert shown.replace("-", "−") in table
    sizes = [sum(bucket["tokens"] for bucket in found[name]) for name in ("domains", "frequencies")]
    assert sizes[0] == sizes[1] > 3 * 4000
    later = [[its for its in found[name] if its["label"] != "1"] for name in ("starts", "bare", "start_cost")]
    starts, bare, cost = (sum(bucket["ours"] * bucket["tokens"] for bucket in its) for its in later)
    assert cost == pytest.approx(starts - bare, rel=1e-6)


def test_without_a_trained_baseline_a_run_with_the_same_tokenizer_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, tokenizer in (("a", "1"), ("b", "2"), ("c", "1")):
        Path(name, "final").mkdir(parents=True)
        Path(name, "recipe.yaml").write_text("evaluation: {baseline: untrained}", encoding="utf-8")
        Path(name, "environment.json").write_text(
            json.dumps({"data": {"tokenizer_sha256": tokenizer}}), encoding="utf-8"
        )
    for run, told in (("a", "--baseline c."), ("b", "as --baseline.")):
        with pytest.raises(UserError, match=re.escape(told)):
            diagnose._baseline(None, Path(run))


def test_mistakes_are_one_line(planted, local_data: Path, model, tokenizer, tmp_path: Path) -> None:
    sound, stranger = str(planted("sound")), str(tmp_path / "stranger")
    model.save_pretrained(stranger)
    tokenizer.save_pretrained(stranger)
    for name, content in (("torn/wikitext.jsonl", '{"page": "a"}\n{"pa'), ("empty/lambada_openai.jsonl", "")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(content, encoding="utf-8")
    for words, message in [
        (["--baseline", stranger, "--local_data", str(local_data)], "--baseline"),
        (["--baseline", sound], "--dataset_dir"),
        (["--baseline", sound, "--local_data", str(tmp_path / "torn")], "line 2"),
        (["--baseline", sound, "--local_data", str(tmp_path / "empty")], "lambada_openai.jsonl"),
        (["--baseline", sound, "--output_dir", str(tmp_path / "torn/wikitext.jsonl")], "--output_dir"),
        (["--baseline", sound, "--local_data", str(tmp_path / "none")], "--local_data"),
        (["--baseline", sound, "--dataset_dir", str(tmp_path / "none")], "prepare_data.py"),
        (["--baseline", str(tmp_path / "none")], "none"),
        *((["--tokens", value], "--tokens") for value in ("0", "many", "nan", "inf")),
        (["--max_length", "2"], "--max_length"),
        (["--token", "3"], "'--tokens'"),
    ]:
        with pytest.raises(UserError) as refused:
            diagnose.main([sound, *words])
        assert message in str(refused.value) and "\n" not in str(refused.value)
