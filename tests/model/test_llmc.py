"""Written model files have llm.c's layout."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import linear
from transformers import GPT2Config, GPT2LMHeadModel

from gpt2_repro.model.llmc import write_llmc


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


def test_the_file_is_llm_cs(model: GPT2LMHeadModel, tmp_path: Path) -> None:
    """A model file has the tensors that llm.c expects, in the order of llm.c."""
    write_llmc(model, tmp_path / "m.bin", dtype="float32")
    content = (tmp_path / "m.bin").read_bytes()
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
