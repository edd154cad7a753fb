"""llm.c's model files: read as llm.c lays them out, and back to the same logits."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from gpt2_repro.errors import UserError
from gpt2_repro.model.llmc import read_llmc, write_llmc


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


def logits(model: GPT2LMHeadModel) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.arange(WINDOW)[None]).logits


def test_the_file_is_llm_cs(model: GPT2LMHeadModel, tmp_path: Path) -> None:
    """By the shapes of llm.c's own reader, one after another (dev/eval/export_hf.py)."""
    write_llmc(model, tmp_path / "m.bin", dtype="float32")
    content = (tmp_path / "m.bin").read_bytes()
    header = np.frombuffer(content[:1024], dtype=np.int32)
    assert header[:8].tolist() == [20240326, 3, WINDOW, VOCABULARY, LAYERS, 2, WIDTH, 128] and not header[8:].any()
    shapes = {
        "wte": (128, WIDTH),
        "wpe": (WINDOW, WIDTH),
        "ln1w": (LAYERS, WIDTH),
        "ln1b": (LAYERS, WIDTH),
        "qkvw": (LAYERS, 3 * WIDTH, WIDTH),
        "qkvb": (LAYERS, 3 * WIDTH),
        "attprojw": (LAYERS, WIDTH, WIDTH),
        "attprojb": (LAYERS, WIDTH),
        "ln2w": (LAYERS, WIDTH),
        "ln2b": (LAYERS, WIDTH),
        "fcw": (LAYERS, 4 * WIDTH, WIDTH),
        "fcb": (LAYERS, 4 * WIDTH),
        "fcprojw": (LAYERS, WIDTH, 4 * WIDTH),
        "fcprojb": (LAYERS, WIDTH),
        "lnfw": (WIDTH,),
        "lnfb": (WIDTH,),
    }
    numbers, place, found = np.frombuffer(content[1024:], dtype=np.float32), 0, {}
    for name, shape in shapes.items():
        found[name] = torch.from_numpy(numbers[place : place + int(np.prod(shape))].reshape(shape).copy())
        place += int(np.prod(shape))
    assert place == len(numbers)
    inner = model.transformer
    assert torch.equal(found["wte"][:VOCABULARY], inner.wte.weight) and not found["wte"][VOCABULARY:].any()
    assert torch.equal(found["lnfb"], inner.ln_f.bias)
    for layer, block in enumerate(inner.h):
        x = torch.randn(3, WIDTH)
        query = torch.nn.functional.linear(x, found["qkvw"][layer], found["qkvb"][layer])
        assert torch.allclose(query, block.attn.c_attn(x), atol=1e-5)
        wide = torch.nn.functional.linear(x, found["fcw"][layer], found["fcb"][layer])
        assert torch.allclose(wide, block.mlp.c_fc(x), atol=1e-5)
        narrow = torch.nn.functional.linear(wide, found["fcprojw"][layer], found["fcprojb"][layer])
        assert torch.allclose(narrow, block.mlp.c_proj(block.mlp.c_fc(x)), atol=1e-4)
        assert torch.equal(found["ln2w"][layer], block.ln_2.weight)
        assert torch.equal(found["attprojb"][layer], block.attn.c_proj.bias)


def test_fp32_reads_back_to_the_same_logits(model: GPT2LMHeadModel, tmp_path: Path) -> None:
    write_llmc(model, tmp_path / "m.bin", dtype="float32")
    assert torch.equal(logits(read_llmc(tmp_path / "m.bin")), logits(model))


def test_bf16_reads_back_to_the_rounded_model(model: GPT2LMHeadModel, tmp_path: Path) -> None:
    write_llmc(model, tmp_path / "m.bin", dtype="bfloat16")
    assert (tmp_path / "m.bin").stat().st_size < 1024 + 2 * (model.num_parameters() + 128 * WIDTH)
    again = logits(read_llmc(tmp_path / "m.bin"))
    assert torch.equal(again, logits(model.to(torch.bfloat16).float()))


def test_what_is_no_model_file_is_refused(model: GPT2LMHeadModel, tmp_path: Path) -> None:
    (tmp_path / "short.bin").write_bytes(b"x" * 100)
    (tmp_path / "tokens.bin").write_bytes(np.full(300, 20240520, dtype=np.int32).tobytes())
    for name in ("short.bin", "tokens.bin"):
        with pytest.raises(UserError, match="is no model file of llm.c"):
            read_llmc(tmp_path / name)
    model.config.n_inner = 3 * WIDTH
    with pytest.raises(UserError, match="of a feed-forward width of 4 x n_embd"):
        write_llmc(model, tmp_path / "m.bin", dtype="float32")
