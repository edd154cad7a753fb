"""Rows, samples, scores and the final model use one tokenizer, whatever its kind."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AddedToken, AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from gpt2_repro.data.prepared import PreparedData
from gpt2_repro.evaluation import __main__ as evaluation
from gpt2_repro.evaluation.scorer import Scorer
from gpt2_repro.model.load import load_tokenizer
from gpt2_repro.tokenization import encode, for_rows, start_ids
from tests.reference import write_jsonl


END = "<|endoftext|>"
LINES = [
    "First Citizen: It's 2024, isn't it?",
    "ROMEO  said  no.",
    "CAFÉ naïve 12345 + 1,000",
    "def f(x):\n\treturn 1",
]
SPELLED = ["one <|endoftext|> two </s> three <s> four [SEP] five [CLS] <unk> x</s>y <|im_end|> z", "[SEP]<s></s>"]
LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
REGEX = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\p{L}+|\s+|[^\s\p{L}\p{N}]+"), "isolated")
OWN = pre_tokenizers.Sequence([REGEX, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def byte_level(splitter: Any, *, normalizer: Any = None, added: tuple[str | AddedToken, ...] = ()) -> Tokenizer:
    """Return a byte-level BPE with its own splitter and added tokens in this order."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = LEVEL, decoders.ByteLevel()
    options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    made.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=360, **options))
    made.pre_tokenizer = splitter
    if normalizer is not None:
        made.normalizer = normalizer
    for token in added:
        (made.add_special_tokens if str(token).startswith("<|") else made.add_tokens)([token])
    return made


def unigram() -> Tokenizer:
    letters = sorted(set("".join([*LINES, *SPELLED])) - {" "})
    pieces = [("<unk>", 0.0), ("<s>", -2.0), ("</s>", -2.0), ("▁", -3.0), ("▁said", -4.0), ("Citizen", -4.0)]
    made = Tokenizer(models.Unigram(pieces + [(letter, -5.0) for letter in letters], unk_id=0, byte_fallback=False))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return made


def word_piece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.WhitespaceSplit()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    made.train_from_iterator(LINES, trainers.WordPieceTrainer(vocab_size=120, special_tokens=special))
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return made


def llama() -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"acdefinorstuxy"]
    vocabulary = {piece: number for number, piece in enumerate([*pieces, "▁s", "ai", "▁sai", "</", "</s"])}
    merges = [("▁", "s"), ("a", "i"), ("▁s", "ai")]
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


# How to make each kind of tokenizer, its tokenizer_config.json, and the position of its separator.
KINDS: dict[str, tuple[Callable[[], Tokenizer], dict[str, Any], str]] = {
    "gpt2 with its own regex": (
        lambda: byte_level(OWN, added=(END,)),
        {"tokenizer_class": "GPT2Tokenizer", "eos_token": END},
        "after",
    ),
    "neox": (
        lambda: byte_level(LEVEL, added=("<|padding|>", "  ", END, "First Citizen", "ROMEO", "<|x|>", "said  ")),
        {"tokenizer_class": "GPTNeoXTokenizerFast", "bos_token": END, "eos_token": END},
        "before",
    ),
    "qwen": (
        lambda: byte_level(OWN, normalizer=normalizers.NFC(), added=(END, "<|im_end|>")),
        {"tokenizer_class": "Qwen2Tokenizer", "eos_token": {"content": "<|im_end|>"}, "pad_token": END},
        "before",
    ),
    "a line break that is special": (
        lambda: byte_level(LEVEL, added=(END, AddedToken("|", special=True), AddedToken("é", special=True))),
        {"tokenizer_class": "GPT2Tokenizer", "eos_token": END},
        "before",
    ),
    "lower case, no separator": (
        lambda: byte_level(LEVEL, normalizer=normalizers.Lowercase(), added=(END,)),
        {"tokenizer_class": "GPT2Tokenizer", "bos_token": END, "eos_token": END},
        "none",
    ),
    "end of text that is not special": (
        lambda: byte_level(LEVEL, added=(AddedToken(" yes"), AddedToken("[SEP]", special=False))),
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "[SEP]"},
        "before",
    ),
    "unigram": (unigram, {"tokenizer_class": "T5Tokenizer", "bos_token": "<s>", "eos_token": "</s>"}, "after"),
    "bert": (word_piece, {"tokenizer_class": "BertTokenizer", "eos_token": "[SEP]"}, "before"),
    "llama": (
        llama,
        {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True},
        "before",
    ),
}


def write(folder: Path, kind: str) -> Path:
    make, config, _ = KINDS[kind]
    folder.mkdir()
    make().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def prepare(type_warm: Callable[..., Any], *words: object) -> None:
    done = type_warm("python", "prepare_data.py", *words)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_one_tokenizer_gives_all_ids(kind: str, tmp_path: Path, type_warm, monkeypatch: pytest.MonkeyPatch) -> None:
    separator = KINDS[kind][2]
    tokenizer, data, run = write(tmp_path / "tokenizer", kind), tmp_path / "data", tmp_path / "run"
    parts = {"val": [f"{number} {line}" for number in range(20) for line in LINES]}
    parts["train"] = [*parts["val"], *SPELLED, *reversed(parts["val"])]
    for name, documents in parts.items():
        write_jsonl(tmp_path / f"{name}.jsonl", documents)
    form = ("--sequence_length", 64, "--separator", separator, "--dataset_dir", data)
    source = ("--data_files", tmp_path / "train.jsonl", tmp_path / "val.jsonl", "--split", "source")
    prepare(type_warm, *source, "--tokenizer", tokenizer, "--validation_text", "true", *form)
    training = {"tokens_per_step": 128, "max_steps": 2, "per_device_train_batch_size": 2, "bf16": False}
    training |= {"use_cpu": True, "warmup_steps": 0, "eval_tokens": 0, "sample_tokens": 4}
    recipe = {"model": {"n_layer": 1, "n_head": 2, "n_embd": 16}, "training": training}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    done = type_warm("python", "train.py", tmp_path / "recipe.yaml", "--output_dir", run, *form)
    assert done.returncode == 0, done.stderr

    # Rows
    final = AutoTokenizer.from_pretrained(run / "final")
    library = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    end = final.eos_token_id
    assert (end is None) == (separator == "none") and final.bos_token_id == end
    encoded = {text: library.encode(text, add_special_tokens=False).ids for text in [*parts["val"], *SPELLED]}
    assert all(final(text)["input_ids"] == encoded[text] for text in parts["val"])
    ours = load_tokenizer(str(run / "final"))
    # An unknown character has the id of <unk> or [UNK].
    named = re.findall(r"[<\[][^ <\[]+[>\]]", SPELLED[0])
    special = {library.token_to_id(token) for token in named if token != "<unk>"} - {None}
    assert special
    for text, ids in zip(SPELLED, encode(ours, SPELLED), strict=True):
        encoded[text] = ids
        assert ids and not special & set(ids)
    for split, documents in (("validation", parts["val"]), ("train", parts["train"])):
        stream = stream_of(data, split)
        expected = [number for text in documents for number in with_separator(encoded[text], end, separator)]
        assert 0 <= len(expected) - len(stream) < 64 and stream == expected[: len(stream)]

    # Samples begin as documents begin.
    for text in (LINES[0], SPELLED[0]):
        assert start_ids(ours, text) == [*([] if end is None else [end]), *encode(ours, [text])[0]]
    assert start_ids(ours, "") == [end] if end is not None else start_ids(ours, "")[0] not in ours.all_special_ids

    # Scores
    monkeypatch.chdir(tmp_path)
    words = ("--tasks", "document_perplexity", "--local_data", data, "--baseline", "none", "--device", "cpu")
    evaluation.main([*map(str, (run, *words, "--output_dir", "scores", "--no_cache"))])
    rows = json.loads((tmp_path / "scores/comparison.json").read_text(encoding="utf-8"))["rows"]
    (scores,) = [row["values"] for row in rows if row["metric"] == "nats_per_token"]
    text = (data / "text/validation.jsonl").read_text(encoding="utf-8")
    texts = [json.loads(line)["text"] for line in text.splitlines()]
    wanted = nats_per_token(run / "final", [final(text)["input_ids"] for text in texts], end)
    (score,) = scores.values()
    assert score["value"] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_of_a_cut_document_is_the_text_of_its_rows(kind: str, tmp_path: Path, type_warm) -> None:
    separator, data = KINDS[kind][2], tmp_path / "data"
    text = " ".join(f"{number} {line} ½ ﬁ" for number in range(200) for line in LINES)
    (tmp_path / "one.txt").write_text(text, encoding="utf-8")
    words = ("--data_files", tmp_path / "one.txt", "--tokenizer", write(tmp_path / "tokenizer", kind))
    words += ("--sequence_length", 8, "--separator", separator, "--validation_tokens", 200)
    prepare(type_warm, *words, "--validation_text", "true", "--dataset_dir", data)
    (line,) = (data / "text/validation.jsonl").read_text(encoding="utf-8").splitlines()
    held_out = json.loads(line)["text"]
    stream = stream_of(data, "validation")
    ids = encode(load_tokenizer(str(data / "tokenizer")), [held_out])[0]
    expected = [*([stream[0]] if separator == "before" else []), *ids]
    assert text.startswith(held_out) and stream[:-4] == expected[: len(stream) - 4]
    assert abs(len(stream) - len(expected)) < 8


def test_without_a_separator_one_token_is_only_context(tmp_path: Path) -> None:
    description, config = for_rows(write(tmp_path / "source", "lower case, no separator"), separator="none")
    folder = tmp_path / "model"
    model = GPT2LMHeadModel(GPT2Config(vocab_size=400, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(description), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = load_tokenizer(str(folder))
    scorer = Scorer(pretrained=model, tokenizer=tokenizer, max_length=16, batch_size=2, positions=32)
    texts = ["a", "", "def f(x)"]
    instances = [Instance("loglikelihood_rolling", {}, (text,), number) for number, text in enumerate(texts)]
    one, none, scored = scorer.loglikelihood_rolling(instances)
    ids = encode(tokenizer, texts)[2]
    assert one == none == 0.0
    assert -scored / (len(ids) - 1) == pytest.approx(nats_per_token(folder, [ids], None), abs=1e-4)
    # An ending without a token is an error. It must not be the most likely ending.
    with pytest.raises(AssertionError):
        scorer.loglikelihood([Instance("loglikelihood", {}, ("def", ""), 0)])


def stream_of(data: Path, split: str) -> list[int]:
    rows = [row["input_ids"].tolist() for row in PreparedData.read(data).rows(split)]
    return [*(number for row in rows for number in row[:-1]), rows[-1][-1]]


def with_separator(ids: list[int], end: int | None, separator: str) -> list[int | None]:
    return {"before": [end, *ids], "after": [*ids, end], "none": ids}[separator]


def nats_per_token(folder: Path, documents: list[list[int]], end: int | None) -> float:
    """Return the mean loss on short documents with `end` as the only prefix."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    nats, count = 0.0, 0
    for ids in documents:
        row = torch.tensor([*([] if end is None else [end]), *ids])
        assert len(row) <= model.config.n_positions + 1
        with torch.inference_mode():
            logits = model(row[None, :-1]).logits[0].log_softmax(dim=1)
        nats -= logits.gather(1, row[1:, None]).sum().item()
        count += len(row) - 1
    return nats / count
