"""The tables of `gpt2_repro.diagnose` show the defect of a model."""

import copy
import functools
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from gpt2_repro import diagnose
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.preparation.prepare import prepare
from gpt2_repro.errors import UserError
from gpt2_repro.evaluation.comparison import DIAGNOSIS_TABLES
from gpt2_repro.evaluation.tasks import cut_passages


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


def train_model(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> GPT2LMHeadModel:
    """Train a GPT-2 with WINDOW positions for 200 steps."""
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
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, 200, pct_start=0.1)
    for _ in range(200):
        batch = packed[torch.randint(len(packed), (16,))]
        logits = model(batch[:, :-1]).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.eval()


@pytest.fixture(scope="module")
def planted(language: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that saves a model with a named defect and returns the model folder."""
    sound = train_model(language, make_documents(2000, seed=1))

    @functools.cache
    def make(name: str) -> Path:
        torch.manual_seed(1)
        model = copy.deepcopy(sound)
        village = language.convert_tokens_to_ids([*words_of("people"), *words_of("places")])
        with torch.no_grad():
            if name == "no_context":
                for block in model.transformer.h:
                    block.attn.c_proj.weight.zero_()
            elif name != "sound":
                weights, rows = {
                    "untrained_positions": ("wpe", slice(WINDOW // 2, WINDOW)),
                    "no_separator": ("wte", [language.eos_token_id]),
                    "no_village": ("wte", village),
                }[name]
                table = model.get_parameter(f"transformer.{weights}.weight")
                table[rows] = torch.randn_like(table[rows]) * 0.1
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
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


def test_a_planted_defect_is_shown_by_its_table(planted, prepared, local_data, tmp_path: Path, capsys) -> None:
    differences = {}
    for name in ("untrained_positions", "no_separator", "no_village", "no_context"):
        words = [planted(name), "--baseline", planted("sound"), "--dataset_dir", prepared, "--device", "cpu"]
        words += ["--local_data", local_data, "--tokens", "4000", "--output_dir", tmp_path / name]
        diagnose.main([*map(str, words)])
        diagnosis = json.loads((tmp_path / name / "diagnosis.json").read_text(encoding="utf-8"))
        tables = {key: {row["label"]: row for row in diagnosis[key]} for key in DIAGNOSIS_TABLES}
        assert list(tables["domains"]) == ["validation text", "validation village", "LAMBADA passages", "wikitext"]
        differences[name] = {
            (key, label): row["difference"]["value"] for key, rows in tables.items() for label, row in rows.items()
        }
        markdown = (tmp_path / name / "diagnosis.md").read_text(encoding="utf-8")
        assert markdown in capsys.readouterr().out and diagnosis["window"] == WINDOW
        for row in itertools.chain(*(rows.values() for rows in tables.values())):
            shown = f"| {row['label']} | {row['tokens']:,} | {row['ours']:.3f} | {row['theirs']:.3f} |"
            assert shown.replace("-", "−") in markdown
        sizes = [sum(row["tokens"] for row in diagnosis[key]) for key in ("domains", "frequencies")]
        assert sizes[0] == sizes[1] > 3 * 4000

    positions = [value for cell, value in differences["untrained_positions"].items() if cell[0] == "positions"]
    assert max(map(abs, positions[:10])) < 1e-4 < 0.03 < min(positions[10:])  # the tenth range ends at position 31
    unlearned, foreign, blind = (differences[name] for name in ("no_separator", "no_village", "no_context"))
    assert unlearned["ends", "the separator"] > 3 and abs(unlearned["domains", "wikitext"]) < 0.02
    assert foreign["domains", "LAMBADA passages"] > 1 > 0.02 > abs(foreign["domains", "wikitext"])
    assert blind["gain", "LAMBADA passages"] < -3 and abs(blind["sentence", "LAMBADA passages"]) < 0.5
    assert min(blind["domains", name] for name in ("wikitext", "validation text")) > 1


def test_mistakes_are_one_line(planted, local_data: Path, model, tokenizer, tmp_path: Path) -> None:
    sound, stranger = str(planted("sound")), str(tmp_path / "stranger")
    model.save_pretrained(stranger)
    tokenizer.save_pretrained(stranger)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn/wikitext.jsonl").write_text('{"page": "a"}\n{"pa', encoding="utf-8")
    for words, message in [
        (["--baseline", stranger, "--local_data", str(local_data)], "--baseline"),
        (["--baseline", sound], "--dataset_dir"),
        (["--baseline", "untrained"], "--baseline"),
        (["--baseline", sound, "--local_data", str(tmp_path / "torn")], "line 2"),
        (["--baseline", sound, "--dataset_dir", str(tmp_path / "none")], "none"),
        (["--baseline", sound, "--tokens", "0"], "--tokens"),
        (["--baseline", sound, "--max_length", "2"], "--max_length"),
    ]:
        with pytest.raises(UserError) as refused:
            diagnose.main([sound, *words])
        assert message in str(refused.value) and "\n" not in str(refused.value)
