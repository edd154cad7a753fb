"""`python -m gpt2_repro.export` writes model folders, llm.c files and model cards."""

import dataclasses
import importlib.util
import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from jinja2 import TemplateError
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from gpt2_repro import generate
from gpt2_repro.checkpoints.manifest import training_record
from gpt2_repro.errors import UserError
from gpt2_repro.evaluation.comparison import (
    ComparedModel,
    Comparison,
    ComparisonRow,
    Difference,
    EvaluationSettings,
    Score,
    TaskDetails,
)
from gpt2_repro.evaluation.model_card import Results, find_results, model_card
from gpt2_repro.evaluation.models import fingerprint
from gpt2_repro.evaluation.references import DOCUMENTS
from gpt2_repro.evaluation.scores import Metric, compare, join_seeds
from gpt2_repro.evaluation.tasks import LOCAL_TASKS
from gpt2_repro.export import main
from gpt2_repro.model.llmc import read_llmc, transposed
from gpt2_repro.model.load import load_model, load_pair
from gpt2_repro.model.nanogpt import SHAPE
from gpt2_repro.run_record.environment import TrainingRecord
from gpt2_repro.tokenization import start_ids
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


GREEDILY = {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "num_beams": 3, "suppress_tokens": [7]}


@pytest.mark.parametrize("settings", [{}, GREEDILY, {"do_sample": True, "top_k": 3}])
def test_a_temperature_of_0_is_argmax(run: Path, tmp_path: Path, settings: dict, capsys) -> None:
    folder = tmp_path / "model"
    shutil.copytree(run / "final", folder)
    config = folder / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text(encoding="utf-8")) | settings), encoding="utf-8")
    model, tokenizer = load_pair(str(folder))
    ids = start_ids(tokenizer, "the")
    for _ in range(12):
        with torch.inference_mode():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == tokenizer.eos_token_id:
            break
    generate.main([str(folder), "the", "--temperature", "0", "--max_new_tokens", "12"])
    assert capsys.readouterr().out == tokenizer.decode(ids, skip_special_tokens=True) + "\n"


def snippet(folder: Path) -> str:
    """Return the code in the model card of a folder."""
    card = (folder / "README.md").read_text(encoding="utf-8")
    return card.partition("```python\n")[2].partition("```")[0]


def test_the_code_in_the_card_generates(run: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """The model has 32 positions, fewer than the 256 tokens that a pipeline generates by default."""
    main([str(run / "checkpoint-4"), str(tmp_path / "export")])
    capsys.readouterr()
    for folder in (run / "final", tmp_path / "export"):
        monkeypatch.chdir(folder)
        exec(snippet(folder), {})
        assert capsys.readouterr().out.startswith("The meaning of life is")
        (text,) = pipeline("text-generation", model=str(folder))("a" * 20)
        assert text["generated_text"].startswith("a" * 20)


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
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no login"))
    Path("there").mkdir()
    with pytest.raises(UserError, match=message):
        main([str(run), *words.split()])
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_options_of_a_gguf_file(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["m", "--dtype", "float16"], ["m.bin", "--dtype", "float16"], ["m.gguf", "--push_to_hub", "a/b"]):
        with pytest.raises(UserError, match=words[1]):
            main([str(run), str(tmp_path / words[0]), *words[1:]])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install gguf"):
        main([str(run), str(tmp_path / "m.gguf")])
    assert not list(tmp_path.iterdir())


SECRET = "hf_secretsecret"


@pytest.fixture(params=["HF_TOKEN", "login"])
def login(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch) -> None:
    """Log in to the Hub: in the environment, or as `hf auth login` stores the token."""
    stored = tmp_path / "stored" / "token"
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(stored))
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    if request.param == "HF_TOKEN":
        monkeypatch.setenv("HF_TOKEN", SECRET)
    else:
        stored.parent.mkdir()
        stored.write_text(f"{SECRET}\n", encoding="utf-8")


@pytest.mark.usefixtures("login")
def test_a_folder_is_pushed_to_the_hub_without_the_token(run: Path, tmp_path: Path, monkeypatch, capfd) -> None:
    created, broken, tokens = [], [], []

    class Hub:
        def __init__(self, token: str) -> None:
            tokens.append(token)

        def create_repo(self, name: str, **options: object) -> None:
            created.append((name, options))

        def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
            if broken:
                raise OSError(f"Authorization: Bearer {SECRET}\nwas not accepted")
            shutil.copytree(folder_path, tmp_path / "hub" / repo_id)

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    main([str(run), "--push_to_hub", "somebody/tiny", "--private"])
    assert created == [("somebody/tiny", {"private": True, "exist_ok": True})] and tokens == [SECRET]
    pushed = tmp_path / "hub" / "somebody" / "tiny"
    assert {path.name for path in pushed.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert not [path for path in pushed.iterdir() if SECRET.encode() in path.read_bytes()]
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(pushed)), logits(load_model(str(run / "final"))))
    assert "somebody/tiny" in snippet(pushed)
    broken.append(True)
    with pytest.raises(UserError, match="somebody/tiny") as refused:
        main([str(run), str(tmp_path / "kept"), "--push_to_hub", "somebody/tiny"])
    assert SECRET not in str(refused.value) and "\n" not in str(refused.value)
    assert (tmp_path / "kept" / "model.safetensors").is_file(), "the exported folder is kept if the upload fails"
    assert SECRET not in "".join(capfd.readouterr())


OPENAI = "openai-community/gpt2"
REVISION = "e" * 64
WORSE = Difference(-0.0156, 0.005, verdict="worse")
VALUES = {"me": Score(0.31, 0.0065, difference=WORSE), OPENAI: Score(0.3256, 0.0065)}
ROW = ComparisonRow("lambada_openai", "acc", True, VALUES)
COMMAND = "bash evaluate.sh /home/me/runs/x --local_data '/home/me/d'"
ME = ComparedModel("me", "runs/me/final", revision=REVISION)
LAMBADA = "EleutherAI/lambada_openai"
COMPARISON = Comparison(
    baseline=OPENAI,
    command=COMMAND,
    date="2026-11-28",
    versions={"lm_eval": "0.4.13"},
    task_details={"lambada_openai": TaskDetails(1.0, 5153, LAMBADA)},
    models=[ME, ComparedModel(OPENAI, OPENAI, is_local=False)],
    rows=[ROW],
)
RESULTS = Results(COMPARISON, ME)


@pytest.fixture(scope="module")
def record(run: Path) -> TrainingRecord:
    return training_record(run / "final")


def recorded(record: TrainingRecord, source: dict, init_from: str) -> TrainingRecord:
    environment = record.environment
    data, identity = environment.data | {"source": source}, environment.run_identity | {"init_from": init_from}
    return dataclasses.replace(record, environment=dataclasses.replace(environment, data=data, run_identity=identity))


def test_the_card_has_no_names_of_local_files(run: Path, record: TrainingRecord, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    name = "/home/me/secret-a.jsonl=0.7,secret-b.jsonl=0.3"
    files = [{"path": "/home/me/secret-a.jsonl", "bytes": 5}, {"path": "secret-b.jsonl", "bytes": 6}]
    mixed = {"name": name, "sources": [{"name": "secret-a.jsonl", "files": files}, {"name": "org/set"}]}
    for source in (mixed, {"name": "files", "files": files}, {"name": "secret-a.jsonl", "files": files}):
        card = model_card("me", recorded(record, source, "/home/me/runs/secret/final"), RESULTS)
        assert "/home" not in card and "secret" not in card
        assert '{"local files": 2, "bytes": 11}' in card
    assert "org/set" in model_card("me", recorded(record, mixed, ""))
    final = (run / "final" / "README.md").read_text(encoding="utf-8")
    assert str(run.parent) not in final and "a.jsonl" not in final and "b.jsonl" not in final


def test_the_card_has_no_names_of_local_files_in_the_deviations(record: TrainingRecord) -> None:
    fields = {
        "data.source": ["secret.txt", "data/secret", "/home/secret"],
        "data.tokenizer": [
            "./secret",
            "secret/a/tokenizer.json",
            "tokenizer-secret.json",
            "char",
            "train:300",
            "org/b",
        ],
        "model.init_from": ["/home/secret/final", "runs/secret", "org/b"],
        "data.data_files": ["secret.txt"],
    }
    rows = [{"field": field, "run": value, "recipe": "-"} for field, values in fields.items() for value in values]
    source = {"name": "files", "files": [{"path": "secret.txt", "bytes": 5}]}
    changed = recorded(record, source, "")
    environment = dataclasses.replace(changed.environment, deviations=rows)
    card = model_card("me", dataclasses.replace(changed, environment=environment))
    assert "secret" not in card
    assert [card.count(f"| {value} | - |") for value in ("char", "train:300", "org/b")] == [1, 1, 2]
    public = recorded(record, {"name": "org/b:part", "repository": "org/b"}, "")
    rows = [{"field": "data.source", "run": "org/b:part", "recipe": "-"}]
    environment = dataclasses.replace(public.environment, deviations=rows)
    assert "| org/b:part | - |" in model_card("me", dataclasses.replace(public, environment=environment))


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


def evaluated(card: str) -> list[huggingface_hub.EvalResult]:
    return huggingface_hub.ModelCard(card).data.eval_results or []


def test_results_stand_in_the_card_in_the_hubs_form(record: TrainingRecord) -> None:
    card = model_card("me", record, RESULTS)
    (result,) = evaluated(card)
    assert (result.dataset_type, result.dataset_split) == (LAMBADA, "test")
    assert (result.metric_type, result.metric_value) == ("acc", 0.31)
    assert "| task | metric | this model | openai-community/gpt2 | difference |" in card
    assert "| lambada_openai | acc ↑ | 0.3100 ± 0.0065 | 0.3256 ± 0.0065 | −0.0156 ± 0.0050 worse (one seed) |" in card
    assert f"lambada_openai: 5,153 documents of {LAMBADA}" in card


@pytest.mark.parametrize(
    ("task", "metric", "details", "words"),
    [
        ("lambada_openai", "acc", TaskDetails(1.0, 5152, LAMBADA), f"5,152 documents of {LAMBADA}"),
        (
            "lambada_openai",
            "acc",
            TaskDetails(1.0, 5153, "secret/lambada_openai.jsonl"),
            "5,153 documents of local files",
        ),
        ("lambada_openai", "acc (clean)", TaskDetails(1.0, 5153, LAMBADA), "5,153 documents"),
        ("wikitext", "word_perplexity", TaskDetails(2.0, 15, "secret/wikitext.jsonl"), "15 documents of local files"),
        ("last_word", "acc", TaskDetails(1.0, 40, "secret/validation.jsonl"), "40 documents of local files"),
        ("arc_challenge", "acc", TaskDetails(1.0, 1172, "allenai/ai2_arc"), "1,172 documents of allenai/ai2_arc"),
        (
            "bits_per_byte_secret",
            "bits_per_byte",
            TaskDetails(1.0, 3, "secret"),
            "local text 1: 3 documents of local files",
        ),
        ("mmlu", "acc", TaskDetails(1.0, None, None), "mmlu: an unknown number"),
    ],
)
def test_only_a_complete_split_of_the_hub_is_a_result_of_the_hub(
    record: TrainingRecord, task: str, metric: str, details: TaskDetails, words: str
) -> None:
    row = dataclasses.replace(ROW, task=task, metric=metric)
    comparison = dataclasses.replace(COMPARISON, task_details={task: details}, rows=[row])
    card = model_card("me", record, Results(comparison, ME))
    assert not evaluated(card)
    assert words in card and "0.3100" in card
    assert "secret" not in card


def test_the_sizes_of_public_splits_are_known() -> None:
    assert DOCUMENTS.keys() == {task for task, known in LOCAL_TASKS.items() if known.dataset}


@pytest.mark.parametrize("name", ["gpt2", "models/gpt2", "/models/openai-community/gpt2", "final (runs/secret)"])
def test_a_local_baseline_has_no_name_of_the_hub(record: TrainingRecord, name: str) -> None:
    row = dataclasses.replace(ROW, values={"me": VALUES["me"], name: VALUES[OPENAI]})
    baseline = ComparedModel(name, name, is_local=True)
    comparison = dataclasses.replace(COMPARISON, rows=[row], baseline=name, models=[ME, baseline])
    evaluation = model_card("me", record, Results(comparison, ME)).partition("## Evaluation")[2].partition("## ")[0]
    assert "0.3256" in evaluation and "gpt2" not in evaluation and "secret" not in evaluation


def stored(path: Path, comparison: Comparison) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(comparison.to_json(), encoding="utf-8")


def test_the_scores_of_a_model_are_found(tmp_path: Path, record: TrainingRecord) -> None:
    """In the comparison of the run, in the scores by --follow, and in a comparison of several seeds."""
    final, other = tmp_path / "run" / "final", tmp_path / "other" / "final"
    assert find_results(final, REVISION) is None
    by_follow = tmp_path / "run/evaluation/final/comparison.json"
    stored(by_follow, COMPARISON)
    assert find_results(final, REVISION) == RESULTS
    assert find_results(final, "f" * 64) is None
    stored(by_follow, dataclasses.replace(COMPARISON, limit=5))
    assert find_results(final, REVISION) is None, "a smoke test"
    stored(by_follow, COMPARISON)
    first, second = "a" * 64, "b" * 64
    metric = Metric("lambada_openai", "acc", None, None, True, details=TaskDetails(None, 5153, LAMBADA))
    scored = [
        (ComparedModel(name, revision=revision), [dataclasses.replace(metric, value=value)])
        for name, revision, value in (("me", first, 0.31), ("you", second, 0.29), (OPENAI, "c", 0.3256))
    ]
    columns = join_seeds(scored, {"me": "setting", "you": "setting"}, {"me": "1", "you": "2"})
    metadata = {"date": "2026-11-28", "command": "", "versions": {"lm_eval": "0.4.13"}}
    joined = compare(columns, columns[1][0], EvaluationSettings(max_length=1024), metadata)
    stored(tmp_path / "run/evaluation/comparison.json", joined)
    assert find_results(final, REVISION) == RESULTS
    for folder, revision, own in ((final, first, 0.31), (other, second, 0.29)):
        results = find_results(folder, revision)
        card = model_card("me", record, results)
        (result,) = evaluated(card)
        assert result.metric_value == own
        assert "| task | metric | this model | mean of 2 seeds | baseline |" in card
        assert f"| lambada_openai | acc ↑ | {own:.4f} | 0.3000; 2 seeds ± 0.0141 | 0.3256 |" in card


@pytest.mark.parametrize(("averaged", "words"), [(True, "are an average"), (False, "are those of step"), (None, None)])
def test_the_card_of_a_run_with_an_average_names_its_weights(record: TrainingRecord, averaged, words) -> None:
    environment = record.environment
    identity = dict(environment.run_identity) | {"ema_steps": 5}
    changed = dataclasses.replace(environment, run_identity=identity)
    card = model_card("me", dataclasses.replace(record, environment=changed, averaged=averaged))
    assert ("The weights are" in card) == (words is not None)
    assert words is None or words in card
    assert "The weights are" not in model_card("me", record)


def test_the_card_lists_how_the_run_deviates(record: TrainingRecord) -> None:
    card = model_card("me", record)
    listed = {line.split()[1] for line in card.splitlines() if line.startswith(("| model.", "| data.", "| training."))}
    assert listed == {each["field"] for each in record.environment.deviations} - {"data.data_files"}
    assert "| training.learning_rate | 0.01 | 0.0006 |" in card
