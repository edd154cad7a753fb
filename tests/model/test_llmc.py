"""Written model files have llm.c's layout."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import linear
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from gpt2_repro.errors import UserError
from gpt2_repro.model.llmc import read_llmc, require_gpt2, write_llmc


LAYERS, WIDTH, VOCABULARY, WINDOW = 2, 8, 50, 16


@pytest.fixture
def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=LAYERS, n_head=2, n_embd=WIDTH, vocab_size=VOCABULARY, n_positions=WINDOW)
    made = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter))  # biases and gains too
    return made


@pytest.fixture
def path(model: GPT2LMHeadModel, tmp_path: Path) -> Path:
    write_llmc(model, tmp_path / "m.bin", dtype="float32")
    return tmp_path / "m.bin"


def test_other_models_are_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes))
    wide = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, n_inner=24, vocab_size=50, n_positions=16))
    for model in (llama, wide):
        with pytest.raises(UserError, match="only GPT-2"):
            require_gpt2(model)


def test_the_file_is_llm_cs(model: GPT2LMHeadModel, path: Path) -> None:
    """A model file has the tensors that llm.c expects, in the order of llm.c."""
    content = path.read_bytes()
    header = np.frombuffer(content[:1024], dtype=np.int32)
    assert header[:8].tolist() == [20240326, 3, WINDOW, VOCABULARY, LAYERS, 2, WIDTH, 128] and not header[8:].any()
    # The shapes are those of llm.c's dev/eval/export_hf.py.
    blocks = {
        **{"ln1w": (WIDTH,), "ln1b": (WIDTH,)},
        **{"qkvw": (3 * WIDTH, WIDTH), "qkvb": (3 * WIDTH,), "attprojw": (WIDTH, WIDTH), "attprojb": (WIDTH,)},
        **{"ln2w": (WIDTH,), "ln2b": (WIDTH,)},
        **{"fcw": (4 * WIDTH, WIDTH), "fcb": (4 * WIDTH,), "fcprojw": (WIDTH, 4 * WIDTH), "fcprojb": (WIDTH,)},
    }
    shapes = {"wte": (128, WIDTH), "wpe": (WINDOW, WIDTH)}
    shapes |= {name: (LAYERS, *shape) for name, shape in blocks.items()} | {"lnfw": (WIDTH,), "lnfb": (WIDTH,)}
    numbers, place, found = np.frombuffer(content[1024:], dtype=np.float32), 0, {}
    for name, shape in shapes.items():
        found[name] = torch.from_numpy(numbers[place : place + int(np.prod(shape))].reshape(shape).copy())
        place += int(np.prod(shape))
    assert place == len(numbers)
    inner = model.transformer
    assert torch.equal(found["wte"][:VOCABULARY], inner.wte.weight) and not found["wte"][VOCABULARY:].any()
    assert torch.equal(found["lnfb"], inner.ln_f.bias)
    for layer, block in enumerate(inner.h):
        x, wide = torch.randn(3, WIDTH), torch.randn(3, 4 * WIDTH)
        assert torch.allclose(linear(x, found["qkvw"][layer], found["qkvb"][layer]), block.attn.c_attn(x), atol=1e-5)
        assert torch.allclose(linear(x, found["fcw"][layer], found["fcb"][layer]), block.mlp.c_fc(x), atol=1e-5)
        narrow = linear(wide, found["fcprojw"][layer], found["fcprojb"][layer])
        assert torch.allclose(narrow, block.mlp.c_proj(wide), atol=1e-4)
        assert torch.equal(found["ln2w"][layer], block.ln_2.weight)
        assert torch.equal(found["attprojb"][layer], block.attn.c_proj.bias)


@pytest.mark.parametrize(
    "changes",
    [
        *({0: 7}, {1: 4}, {2: -1}, {3: 200}, {4: 10**9}, {4: -2}, {5: 0}, {5: 3}, {6: -8}),
        *({6: 2**31 - 1}, {7: 2**31 - 1}),
        {2: 1, 3: 1, 4: 10**6, 5: 1, 6: 1, 7: 1},
        {4: 0, 6: 1, 5: 1},
    ],
)
def test_a_false_header_is_refused_before_anything_is_built(
    path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[int, int]
) -> None:
    content = np.fromfile(path, dtype=np.int32)
    content[list(changes)] = list(changes.values())
    content.tofile(path)
    monkeypatch.setattr("gpt2_repro.model.llmc.GPT2LMHeadModel", None)
    with pytest.raises(UserError, match=r"m\.bin"):
        read_llmc(path)


def test_a_short_file_and_one_of_many_tiny_layers_are_refused(path: Path) -> None:
    content, header = path.read_bytes(), np.zeros(256, dtype=np.int32)
    header[:8] = (20240326, 5, 1, 1, 100_000, 1, 1, 1)
    weights = np.zeros(25 * 100_000 + 4, dtype=np.int16)  # the length fits
    for damaged in (
        *(content[:size] for size in (0, 5, 1023, 1024, 1027, -1, -4)),
        header.tobytes() + weights.tobytes(),
    ):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"m\.bin"):
            read_llmc(path)
