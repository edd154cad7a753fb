"""`python -m gpt2_repro.export RUN model.gguf` writes files that other programs read as the same model and tokenizer."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from gpt2_repro import tokenization
from gpt2_repro.data.tokenizer import count_characters, train_tokenizer
from gpt2_repro.errors import UserError
from gpt2_repro.export import main
from gpt2_repro.model.load import load_pair
from tests.languages import DECLARATION, TEXTS


gguf = pytest.importorskip("gguf", reason="needs the package gguf of requirements-dev.txt")

END = "<|endoftext|>"
ASCII = [text for text in TEXTS if text.isascii()]
# The regular expressions in tokenizer.json of meta-llama/Llama-3.1-8B and Qwen/Qwen2.5-0.5B.
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
ENDING = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + ENDING
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + ENDING
GPT2_MODULES = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
    "token_embd": "wte",
    "position_embd": "wpe",
    "output_norm": "ln_f",
}


def in_transformers(tokenizer: Tokenizer, end: str | None = END) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end)


def byte_level(*steps: pre_tokenizers.PreTokenizer, ignore_merges: bool = False) -> PreTrainedTokenizerFast:
    """Return a BPE that is trained on TEXTS and divides text by `steps`."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(steps))
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.add_special_tokens([END])
    return in_transformers(tokenizer)


def split_by(expression: str, **options: bool) -> PreTrainedTokenizerFast:
    split = pre_tokenizers.Split(Regex(expression), "isolated")
    return byte_level(split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), **options)


def own_bpe() -> PreTrainedTokenizerFast:
    return in_transformers(train_tokenizer(TEXTS * 3, 800))


def smollm() -> PreTrainedTokenizerFast:
    return byte_level(pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False))


def with_added_tokens() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose special token "and" would be the result of merges, and with a token that is not special."""
    tokenizer = own_bpe()
    assert "and" in tokenizer.get_vocab()
    tokenizer.add_special_tokens({"additional_special_tokens": ["and"]})
    tokenizer.add_tokens([AddedToken("rights. ", normalized=False)])
    return tokenizer


def characters(texts: list[str]) -> PreTrainedTokenizerFast:
    return in_transformers(count_characters(texts), end=None)


TOKENIZERS = {
    "gpt-2": own_bpe,
    "smollm": smollm,
    "llama-bpe": lambda: split_by(LLAMA3, ignore_merges=True),
    "dbrx": lambda: split_by(LLAMA3),
    "qwen2": lambda: split_by(QWEN2),
    "char": lambda: characters(ASCII),
    "added tokens": with_added_tokens,
    "no merges": lambda: in_transformers(train_tokenizer(TEXTS, 257)),
}


def gpt2(vocab_size: int, end: int | None = 0, **options: object) -> GPT2LMHeadModel:
    shape = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 1024, "vocab_size": vocab_size}
    return GPT2LMHeadModel(GPT2Config(**{**shape, "bos_token_id": end, "eos_token_id": end, **options})).eval()


def llama(vocab_size: int, end: int | None = 0, **options: object) -> LlamaForCausalLM:
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"intermediate_size": 48, "vocab_size": vocab_size, "max_position_embeddings": 1024}
    return LlamaForCausalLM(LlamaConfig(**{**shape, "bos_token_id": end, "eos_token_id": end, **options})).eval()


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    """Save a model with larger weights than initial ones, which make errors visible."""
    source = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.data += torch.randn(weight.shape, generator=source) / 8
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.arange(32)[None] % model.config.vocab_size).logits


@pytest.fixture(scope="module")
def run(train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("gguf") / "run")


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32"])
def test_a_file_has_the_weights_of_a_run(run: Path, tmp_path: Path, dtype: str | None) -> None:
    path = tmp_path / "new" / "model.gguf"
    options = ["--dtype", dtype] if dtype else []
    main([str(run), str(path), *options])
    assert [file.name for file in path.parent.iterdir()] == ["model.gguf"], "no partly written files remain"
    weights = load_file(run / "final" / "model.safetensors")
    tensors = gguf.GGUFReader(path).tensors
    assert len(tensors) == len(weights)
    for tensor in tensors:
        *block, module, part = tensor.name.split(".")
        prefix = f"h.{block[1]}." if block else ""
        expected = weights[f"transformer.{prefix}{GPT2_MODULES[module]}.{part}"]
        if part == "weight" and ".c_" in GPT2_MODULES[module]:
            expected = expected.T
        kind = "float32"
        if expected.ndim == 2 and module != "position_embd":
            kind = dtype or "float16"
        assert tensor.tensor_type.name == {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[kind]
        values = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(values, expected.to(getattr(torch, kind)).float())


def test_a_file_has_the_tokenizer_and_the_shape_of_a_run(run: Path, tmp_path: Path) -> None:
    main([str(run), str(tmp_path / "model.gguf")])
    model, tokenizer = load_pair(str(run / "final"))
    description = json.loads((run / "final" / "tokenizer.json").read_text(encoding="utf-8"))
    end = tokenizer.eos_token_id
    types = [1] * len(tokenizer)
    types[end] = 3
    expected = {
        "general.architecture": "gpt2",
        "gpt2.block_count": 2,
        "gpt2.context_length": model.config.n_positions,
        "gpt2.embedding_length": 32,
        "gpt2.feed_forward_length": 128,
        "gpt2.attention.head_count": 2,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokenizer.convert_ids_to_tokens(range(len(tokenizer))),
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in description["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": end,
        "tokenizer.ggml.eos_token_id": end,
        "tokenizer.ggml.add_bos_token": False,  # a row has its separators as ids
    }
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    fields = {name: reader.get_field(name).contents() for name in expected}
    assert fields == expected
    assert reader.get_field("gpt2.attention.layer_norm_epsilon").contents() == pytest.approx(1e-5)


MODELS = {
    "gpt2": lambda: gpt2(800, layer_norm_epsilon=1e-3, n_inner=80),
    "gpt2 with its own output layer": lambda: gpt2(800, tie_word_embeddings=False),
    "llama": lambda: llama(800, rms_norm_eps=1e-3, rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
    "llama with shared embeddings": lambda: llama(800, tie_word_embeddings=True, head_dim=16),
}


@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_the_same_model_and_tokenizer(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokenizer = own_bpe()
    model = MODELS[name]()
    main([str(save(model, tokenizer, tmp_path / "model")), str(tmp_path / "m.gguf"), "--dtype", "float32"])
    # The reader of transformers (5.23) has no n_inner of GPT-2.
    options = {"n_inner": model.config.n_inner} if "gpt2" in name else {}
    again = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32, **options)
    assert (logits(again) - logits(model)).abs().max() < 1e-4
    assert logits(model).std() > 0.1
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    width = reader.get_field(f"{model.config.model_type}.feed_forward_length").contents()
    (up,) = [tensor for tensor in reader.tensors if tensor.name == "blk.0.ffn_up.weight"]
    assert up.shape.tolist() == [32, width]
    read = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    plain = [text for text in TEXTS if END not in text]
    assert [read(text)["input_ids"] for text in plain] == tokenization.encode(tokenizer, plain)


def test_a_vocabulary_with_added_tokens_and_padding_is_complete(tmp_path: Path) -> None:
    tokenizer = with_added_tokens()
    tokenizer.chat_template = "{{ messages[0].content }}"
    size = len(tokenizer)
    main([str(save(gpt2(size + 3), tokenizer, tmp_path / "model")), str(tmp_path / "m.gguf")])
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    tokens = reader.get_field("tokenizer.ggml.tokens").contents()
    types = reader.get_field("tokenizer.ggml.token_type").contents()
    assert len(tokens) == len(set(tokens)) == len(types) == size + 3
    assert types[size:] == [5] * 3
    assert reader.get_field("tokenizer.chat_template").contents() == tokenizer.chat_template
    of_added = {token: types[tokens.index(token)] for token in (END, "and", "rights. ")}
    assert of_added == {END: 3, "and": 3, "rights. ": 4}
    merges = reader.get_field("tokenizer.ggml.merges").contents()
    results = {merge.replace(" ", "") for merge in merges}
    assert "and" not in results and "Ġand" in results


def test_a_tokenizer_that_adds_a_start_token_does_so_in_llama_cpp(tmp_path: Path) -> None:
    tokenizer = own_bpe()
    adds = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, tokenizer.eos_token_id)])
    tokenizer.backend_tokenizer.post_processor = adds
    main([str(save(gpt2(800), tokenizer, tmp_path / "model")), str(tmp_path / "m.gguf")])
    assert gguf.GGUFReader(tmp_path / "m.gguf").get_field("tokenizer.ggml.add_bos_token").contents() is True


def test_an_id_that_no_text_has_ends_a_text_if_documents_have_no_separator(tmp_path: Path) -> None:
    """llama.cpp would end a text at the ordinary token 11."""
    tokenizer = in_transformers(train_tokenizer(TEXTS, 300), end=None)
    main([str(save(gpt2(300), tokenizer, tmp_path / "model")), str(tmp_path / "m.gguf")])
    end = gguf.GGUFReader(tmp_path / "m.gguf").get_field("tokenizer.ggml.eos_token_id").contents()
    assert end == tokenizer.get_vocab()[END]


def without_end() -> PreTrainedTokenizerFast:
    description = json.loads(own_bpe().backend_tokenizer.to_str())
    description["added_tokens"] = []
    return in_transformers(Tokenizer.from_str(json.dumps(description)), end=None)


def with_prefix_space() -> PreTrainedTokenizerFast:
    return byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True))


def normalized() -> PreTrainedTokenizerFast:
    tokenizer = own_bpe()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def with_stripped_token() -> PreTrainedTokenizerFast:
    tokenizer = own_bpe()
    tokenizer.add_tokens([AddedToken("<|user|>", lstrip=True)])
    return tokenizer


def unigram() -> PreTrainedTokenizerFast:
    return in_transformers(Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)))


def of_words() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({"one": 0, "two": 1}, "one"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return in_transformers(tokenizer, end=None)


def without_bytes() -> PreTrainedTokenizerFast:
    tokenizer = own_bpe()
    expression = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(expression), "isolated")
    return tokenizer


def of_letters() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return in_transformers(tokenizer)


UNREADABLE = {
    "characters beyond ASCII": lambda: characters(TEXTS),
    "words": of_words,
    "letters": of_letters,
    "no bytes": without_bytes,
    "unigram": unigram,
    "no end of text": without_end,
    "space before a text": with_prefix_space,
    "normalizer": normalized,
    "an added token with white space": with_stripped_token,
    "another expression": lambda: split_by(r"\w+|\W"),
    "ignore_merges": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), ignore_merges=True),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_tokenizer_that_llama_cpp_does_not_have_is_refused(name: str, tmp_path: Path) -> None:
    tokenizer = UNREADABLE[name]()
    save(gpt2(len(tokenizer)), tokenizer, tmp_path / "model")
    with pytest.raises(UserError):
        main([str(tmp_path / "model"), str(tmp_path / "new" / "m.gguf")])
    assert not (tmp_path / "new").exists()


def test_a_character_tokenizer_with_unused_ids_is_refused(tmp_path: Path) -> None:
    save(gpt2(100), characters(ASCII), tmp_path / "model")
    with pytest.raises(UserError):
        main([str(tmp_path / "model"), str(tmp_path / "m.gguf")])


def qwen3() -> Qwen3ForCausalLM:
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    return Qwen3ForCausalLM(Qwen3Config(**shape, intermediate_size=48, vocab_size=800, head_dim=16))


def too_large() -> GPT2LMHeadModel:
    model = gpt2(800)
    model.transformer.h[1].mlp.c_fc.weight.data[0, 0] = 70_000
    return model


LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
OTHER_MODELS = {
    "another architecture": qwen3,
    "fewer ids than the tokenizer": lambda: gpt2(799),
    "another activation": lambda: gpt2(800, activation_function="relu"),
    "another scale": lambda: gpt2(800, scale_attn_by_inverse_layer_idx=True),
    "biases": lambda: llama(800, attention_bias=True),
    "another rotation": lambda: llama(800, rope_parameters=LINEAR),
    "a weight beyond float16": too_large,
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_a_model_that_llama_cpp_would_compute_otherwise_is_refused(name: str, tmp_path: Path) -> None:
    save(OTHER_MODELS[name](), own_bpe(), tmp_path / "model")
    with pytest.raises(UserError):
        main([str(tmp_path / "model"), str(tmp_path / "new" / "m.gguf")])
    assert not (tmp_path / "new").exists()


def test_a_refusal_is_one_line(type_command, tmp_path: Path) -> None:
    save(gpt2(1200), characters(TEXTS), tmp_path / "model")
    done = type_command("python", "-m", "gpt2_repro.export", tmp_path / "model", tmp_path / "new" / "m.gguf")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert not (tmp_path / "new").exists()


def test_a_file_that_exists_is_kept(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_text("mine", encoding="utf-8")
    with pytest.raises(UserError, match=r"m\.gguf"):
        main([str(run), str(path)])
    assert path.read_text(encoding="utf-8") == "mine"


class LlamaCpp:
    """llama.cpp's server with a GGUF file."""

    def __init__(self, path: Path) -> None:
        xllamacpp = pytest.importorskip("xllamacpp", reason="needs llama.cpp: pip install xllamacpp")
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = 512
        params.n_parallel = 1
        params.n_gpu_layers = 0
        params.cpuparams.n_threads = 1
        params.cpuparams_batch.n_threads = 1
        params.fit_params = False
        params.warmup = False
        self.server = xllamacpp.Server(params)

    def post(self, path: str, **content: object) -> dict[str, Any]:
        url = self.server.listening_address + path
        request = urllib.request.Request(url, json.dumps(content).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)

    def ids(self, text: str) -> list[int]:
        return self.post("/tokenize", content=text, add_special=False, parse_special=False)["tokens"]

    def text(self, ids: list[int]) -> str:
        return self.post("/detokenize", tokens=ids)["content"]


def greedy(model: PreTrainedModel, ids: list[int], count: int) -> list[int]:
    """Return the most likely next tokens."""
    ids = list(ids)
    for _ in range(count):
        with torch.inference_mode():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[-count:]


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENIZERS)
def test_llama_cpp_has_the_same_ids(name: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[name]()
    texts = ASCII if name == "char" else TEXTS
    model = gpt2(len(tokenizer), tokenizer.eos_token_id)
    main([str(save(model, tokenizer, tmp_path / "model")), str(tmp_path / "m.gguf")])
    reader = LlamaCpp(tmp_path / "m.gguf")
    assert [reader.ids(text) for text in texts] == tokenization.encode(tokenizer, texts)


@pytest.mark.slow
def test_llama_cpp_has_the_ids_of_gpt2(real_data: Path, tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(real_data / "gpt2")
    novels = (real_data / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")
    pages = (real_data / "wikitext" / "wikitext2_validation_pages.jsonl").read_text(encoding="utf-8")
    texts = [*TEXTS, novels, pages]
    model = gpt2(len(tokenizer), tokenizer.eos_token_id)
    main([str(save(model, tokenizer, tmp_path / "model")), str(tmp_path / "m.gguf")])
    reader = LlamaCpp(tmp_path / "m.gguf")
    for text, ids in zip(texts, tokenization.encode(tokenizer, texts), strict=True):
        assert reader.ids(text) == ids


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer_name", ["gpt-2", "char"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_llama_cpp_generates_the_same_text(family: str, tokenizer_name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tokenizer = TOKENIZERS[tokenizer_name]()
    if family == "gpt2":
        model = gpt2(len(tokenizer), tokenizer.eos_token_id, n_inner=80, layer_norm_epsilon=1e-3)
    else:
        model = llama(len(tokenizer), tokenizer.eos_token_id, head_dim=16, tie_word_embeddings=True)
    folder = save(model, tokenizer, tmp_path / "model")
    main([str(folder), str(tmp_path / "m.gguf"), "--dtype", "float32"])
    reader = LlamaCpp(tmp_path / "m.gguf")
    prompts = [DECLARATION["english"][:60], "two   three"]
    for ids in tokenization.encode(tokenizer, prompts):
        answer = reader.post("/completion", prompt=ids, n_predict=20, temperature=0, n_probs=10, return_tokens=True)
        expected = greedy(model, ids, 20)
        assert answer["tokens"] == expected
        assert answer["content"] == tokenizer.decode(expected)
        with torch.inference_mode():
            own = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        for token in answer["completion_probabilities"][0]["top_logprobs"]:
            assert abs(token["logprob"] - own[token["id"]]) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_llama_cpp_reads_a_run(run: Path, tmp_path: Path, dtype: str) -> None:
    main([str(run), str(tmp_path / "m.gguf"), "--dtype", dtype])
    reader = LlamaCpp(tmp_path / "m.gguf")
    model, tokenizer = load_pair(str(run / "final"))
    ids = tokenization.start_ids(tokenizer, "the")
    answer = reader.post("/completion", prompt=ids, n_predict=20, temperature=0, n_probs=10, return_tokens=True)
    with torch.inference_mode():
        own = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    for token in answer["completion_probabilities"][0]["top_logprobs"]:
        assert abs(token["logprob"] - own[token["id"]]) < 0.05
    texts = [text for text in TEXTS if text]
    assert [reader.ids(text) for text in texts] == tokenization.encode(tokenizer, texts)
    spelled = f"one {END} two"
    assert tokenizer.eos_token_id not in reader.ids(spelled)
    assert reader.text(reader.ids(spelled)) == spelled
