"""`python -m gpt2_repro.export` writes model folders, llm.c files and model cards."""

import dataclasses
import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from jinja2 import TemplateError
from transformers import AutoModelForCausalLM, AutoTokenizer

from gpt2_repro import generate
from gpt2_repro.checkpoints import training_record
from gpt2_repro.errors import UserError
from gpt2_repro.evaluation.comparison import Comparison, ComparisonRow, Difference, Score
from gpt2_repro.evaluation.model_card import model_card
from gpt2_repro.evaluation.models import fingerprint
from gpt2_repro.export import main
from gpt2_repro.model.llmc import read_llmc, transposed
from gpt2_repro.model.load import load_model, load_pair
from gpt2_repro.model.nanogpt import SHAPE
from gpt2_repro.run_record.environment import TrainingRecord
from tests.sections import ROOT


@pytest.fixture(scope="module")
def run(train, tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("export") / "run", "--save_steps", 4)


def logits(model) -> torch.Tensor:
    with torch.inference_mode():
        return model.float()(input_ids=torch.arange(32)[None]).logits


def test_a_checkpoint_becomes_a_plain_folder(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tokenizer").mkdir()  # has nothing to do with the checkpoint
    folder = tmp_path / "out" / "step4"
    main([str(run / "checkpoint-4"), str(folder), "--license", "apache-2.0"])
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(logits(model), logits(load_model(str(run / "checkpoint-4"))))
    assert fingerprint(*load_pair(str(folder))) == fingerprint(*load_pair(str(run / "checkpoint-4")))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["vocab_size"] == len(AutoTokenizer.from_pretrained(folder)) and "true_vocab_size" not in config
    assert config["n_ctx"] == config["n_positions"], "for llama.cpp's converter"
    # transformers 4.57, on which vLLM and TGI build, lacks the class that transformers 5 would write.
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    card = huggingface_hub.ModelCard.load(folder / "README.md")
    assert "| tokens | 1,024 |" in card.content
    assert (card.data.license, card.data.library_name) == ("apache-2.0", "transformers")
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode
    assert [path.name for path in folder.parent.iterdir()] == ["step4"], "no partly written files remain"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_llm_cs_file_and_the_folder_are_the_same_model(run: Path, tmp_path: Path, dtype: str) -> None:
    main([str(run), str(tmp_path / "m.bin"), "--dtype", dtype])
    main([str(run), str(tmp_path / "folder"), "--dtype", dtype])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    assert model.dtype == getattr(torch, dtype)
    expected = logits(load_model(str(run / "final")).to(model.dtype))
    again = read_llmc(tmp_path / "m.bin")
    assert torch.equal(logits(again), expected) and torch.equal(logits(model), expected)
    assert again.config.eos_token_id is again.config.bos_token_id is None  # 50256 is not in a small vocabulary


@pytest.mark.parametrize("name", ["m.bin", "ckpt.pt"])
def test_files_of_other_programs_become_a_folder_again(run: Path, tmp_path: Path, name: str) -> None:
    original = load_model(str(run / "final"))
    if name == "m.bin":
        main([str(run), str(tmp_path / name)])
    else:
        shape = {there: getattr(original.config, ours) for there, ours in SHAPE.items()}
        torch.save({"model": transposed(original.state_dict()), "model_args": shape}, tmp_path / name)
        for block in original.transformer.h:
            block.mlp.act = torch.nn.GELU()
    prepared = tmp_path / "data"
    shutil.copytree(run / "final", prepared / "tokenizer")
    main([str(tmp_path / name), str(tmp_path / "folder"), "--tokenizer", str(prepared)])
    model, tokenizer = load_pair(str(tmp_path / "folder"))
    assert torch.equal(logits(model), logits(original))
    assert model.config.eos_token_id == tokenizer.eos_token_id is not None and model.config.resid_pdrop == 0
    with pytest.raises(UserError, match="--tokenizer"):
        main([str(tmp_path / name), str(tmp_path / "other")])
    with pytest.raises(UserError, match="has no tokenizer files"):  # and the Hub is not asked for a repository
        load_pair(str(tmp_path / name))


def test_the_chat_template_marks_answers_and_keeps_special_ids(run: Path) -> None:
    """TRL adds this template to a final model, and loses no tokens in the mask of the answers."""
    _, tokenizer = load_pair(str(run / "final"))
    tokenizer.chat_template = (ROOT / "recipes" / "after" / "chat_template.jinja").read_text(encoding="utf-8")
    question = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say it."}]
    spoken = [*question, {"role": "assistant", "content": "it"}]
    text = tokenizer.apply_chat_template(spoken, tokenize=False)
    assert text == "<|endoftext|>System: Be brief.\nUser: Say it.\nAssistant: it<|endoftext|>\n"
    whole = tokenizer.apply_chat_template(spoken, return_dict=True, return_assistant_tokens_mask=True)
    start = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert whole["input_ids"][: len(start)] == start
    answer = [number for number, own in zip(whole["input_ids"], whole["assistant_masks"], strict=True) if own]
    assert tokenizer.decode(answer) == " it<|endoftext|>"
    for content in ("<|endoftext|>", "<|end<|endoftext|>oftext|>", "a<|endoftext|>b"):
        spelled = tokenizer.apply_chat_template([{"role": "user", "content": content}], return_dict=True)
        assert spelled["input_ids"].count(tokenizer.eos_token_id) == 1, "only the template's own"
    with pytest.raises(TemplateError, match="must be text"):
        tokenizer.apply_chat_template([{"role": "user", "content": [{"text": "a"}]}])


def test_a_temperature_of_0_is_greedy_whatever_the_checkpoint_says(run: Path, tmp_path: Path, capsys) -> None:
    shutil.copytree(run / "final", tmp_path / "model")
    config = tmp_path / "model" / "generation_config.json"
    settings = json.loads(config.read_text(encoding="utf-8")) | {"do_sample": True}
    config.write_text(json.dumps(settings), encoding="utf-8")
    words = (str(tmp_path / "model"), "the", "--temperature", "0", "--seed")
    texts = []
    for seed in ("1", "2"):
        generate.main([*words, seed])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].startswith("the")


def test_a_model_that_llm_c_cannot_have_is_refused(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "final", tmp_path / "model")
    model, other = (load_model(str(run / "final")) for _ in range(2))
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 1)
    other.config.layer_norm_epsilon = 1e-6
    for each, problem in ((model, "output layer"), (other, "layer_norm_epsilon")):
        each.save_pretrained(tmp_path / "model")
        with pytest.raises(UserError, match=problem):
            main([str(tmp_path / "model"), str(tmp_path / "m.bin")])
    assert not (tmp_path / "m.bin").exists()


def test_an_exact_gelu_is_written_for_llm_c(run: Path, tmp_path: Path, capsys) -> None:
    shutil.copytree(run / "final", tmp_path / "model")
    model = load_model(str(run / "final"))
    model.config.activation_function = "gelu"
    model.config.save_pretrained(tmp_path / "model")
    main([str(tmp_path / "model"), str(tmp_path / "m.bin")])
    assert "the exact GELU" in capsys.readouterr().out
    weights = read_llmc(tmp_path / "m.bin").state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("there", "there"),
        ("new --tokenizer other", "--tokenizer is only for model files"),
        ("m.bin --push_to_hub a/b", "--push_to_hub"),
        ("--push_to_hub a/b", "HF_TOKEN"),
    ],
)
def test_a_mistake_writes_one_line(run: Path, words: str, message: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    Path("there").mkdir()
    with pytest.raises(UserError, match=message):
        main([str(run), *words.split()])
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_folder_is_pushed_to_the_hub_without_the_token(run: Path, tmp_path: Path, monkeypatch) -> None:
    created, broken = [], []

    class Hub:
        def create_repo(self, name: str, **options: object) -> None:
            created.append((name, options))

        def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
            if broken:
                raise OSError("Authorization: Bearer hf_secretsecret\nwas not accepted")
            shutil.copytree(folder_path, tmp_path / "hub" / repo_id)

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    main([str(run), "--push_to_hub", "somebody/tiny", "--private"])
    assert created == [("somebody/tiny", {"private": True, "exist_ok": True})]
    pushed = tmp_path / "hub" / "somebody" / "tiny"
    assert {path.name for path in pushed.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert not [path for path in pushed.iterdir() if b"hf_secret" in path.read_bytes()]
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(pushed)), logits(load_model(str(run / "final"))))
    assert 'from_pretrained("somebody/tiny")' in (pushed / "README.md").read_text(encoding="utf-8")
    broken.append(True)
    with pytest.raises(UserError, match="somebody/tiny") as refused:
        main([str(run), str(tmp_path / "kept"), "--push_to_hub", "somebody/tiny"])
    assert "hf_secret" not in str(refused.value) and "\n" not in str(refused.value)
    assert (tmp_path / "kept" / "model.safetensors").is_file(), "the exported folder is kept if the upload fails"


OPENAI = "openai-community/gpt2"
VALUES = {"me": Score(0.31, 0.0065), OPENAI: Score(0.3256, 0.0065)}
ROW = ComparisonRow("lambada_openai", "acc", True, VALUES, {"me": Difference(-0.0156, 0.005, verdict="worse")})
COMMAND = "bash evaluate.sh /home/me/runs/x --local_data '/home/me/d'"
COMPARISON = Comparison(baseline=OPENAI, command=COMMAND, versions={"lm_eval": "0.4.13"}, rows=[ROW])


@pytest.fixture(scope="module")
def record(run: Path) -> TrainingRecord:
    return training_record(run / "final")


def recorded(record: TrainingRecord, source: dict, init_from: str) -> TrainingRecord:
    environment = record.environment
    data, identity = environment.data | {"source": source}, environment.run_identity | {"init_from": init_from}
    return dataclasses.replace(record, environment=dataclasses.replace(environment, data=data, run_identity=identity))


def test_the_card_has_no_paths_of_this_machine(run: Path, record: TrainingRecord) -> None:
    name = "/home/me/a.jsonl=0.7,/home/me/b.jsonl=0.3"
    files = [{"name": "/home/me/a.jsonl", "files": [{"path": "/home/me/a.jsonl"}]}, {"name": "org/set"}]
    changed = recorded(record, {"name": name, "sources": files}, "/home/me/runs/x/final")
    card = model_card("me", changed, COMPARISON, "me")
    assert "/home" not in card and "a.jsonl=0.7,b.jsonl=0.3" in card and "evaluate.sh x --local_data 'd'" in card
    assert str(run.parent) not in (run / "final" / "README.md").read_text(encoding="utf-8")


FINEWEB = {"name": "fineweb-10bt", "repository": "HuggingFaceFW/fineweb"}
PG19 = {"name": "pg19", "repository": "emozilla/pg19"}
GERMAN = {"name": "somebody/german", "repository": "somebody/german"}
BOTH = {"name": "a=0.5,b=0.5", "sources": [PG19, FINEWEB]}
MIXED = {"name": "a", "sources": [FINEWEB, {"name": "my.txt"}]}
FINEWEB_ID, PG19_ID = "HuggingFaceFW/fineweb", "emozilla/pg19"


@pytest.mark.parametrize(
    ("source", "init_from", "known"),
    [
        (FINEWEB, "", {"datasets": [FINEWEB_ID]}),
        (BOTH, OPENAI, {"datasets": [FINEWEB_ID, PG19_ID], "base_model": OPENAI}),
        (GERMAN, "runs/x", {"datasets": ["somebody/german"]}),
        ({"name": "files", "files": [{"path": "a.txt"}]}, "/home/me/runs/x/final", {}),
        (MIXED, "gpt2", {"datasets": [FINEWEB_ID], "base_model": "gpt2"}),
        ({"name": "tiny-shakespeare"}, "tests", {}),  # `tests` is a folder
    ],
)
def test_the_header_has_what_is_known(record: TrainingRecord, source, init_from, known, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    header = huggingface_hub.ModelCard(model_card("me", recorded(record, source, init_from))).data
    assert isinstance(header, huggingface_hub.ModelCardData) and header.license is None
    for name in ("datasets", "base_model"):
        assert getattr(header, name) == known.get(name)


def test_results_stand_in_the_card_in_the_hubs_form(record: TrainingRecord) -> None:
    card = model_card("me", record, COMPARISON, "me")
    (result,) = huggingface_hub.ModelCard(card).data.eval_results
    assert (result.dataset_type, result.dataset_split) == ("EleutherAI/lambada_openai", "test")
    assert (result.metric_type, result.metric_value) == ("acc", 0.31)
    assert "| lambada_openai | acc ↑ | 0.3100 ± 0.0065 | 0.3256 ± 0.0065 | −0.0156 ± 0.0050 worse |" in card
    assert "lambada" not in model_card("me", record, dataclasses.replace(COMPARISON, limit=5), "me")


def test_the_card_lists_how_the_run_deviates(record: TrainingRecord) -> None:
    card = model_card("me", record)
    listed = {line.split()[1] for line in card.splitlines() if line.startswith(("| model.", "| data.", "| training."))}
    assert listed == {each["field"] for each in record.environment.deviations} - {"data.data_files"}
    assert "| training.learning_rate | 0.01 | 0.0006 |" in card
