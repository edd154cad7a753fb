"""python -m gpt2_repro.export: folders, llm.c's files and the Hub, which is a server on this machine here."""

import base64
import hashlib
import http.server
import json
import threading
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from gpt2_repro.card import model_card
from gpt2_repro.checkpoint import training_record
from gpt2_repro.errors import UserError
from gpt2_repro.export import main
from gpt2_repro.model.export import load_model
from gpt2_repro.model.llmc import read_llmc


@pytest.fixture(scope="module")
def run(train, tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("export") / "run", "--save_steps", 4)


def logits(model) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.arange(32)[None]).logits


def test_a_checkpoint_becomes_a_plain_folder(run: Path, tmp_path: Path, capsys) -> None:
    main([str(run / "checkpoint-4"), str(tmp_path / "out" / "step4")])
    folder = tmp_path / "out" / "step4"
    assert "read back to the same model" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(logits(model), logits(load_model(str(run / "checkpoint-4"))))
    config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] == len(AutoTokenizer.from_pretrained(folder)) and "true_vocab_size" not in config
    assert "| tokens | 1,024 |" in (folder / "README.md").read_text()
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode
    assert [path.name for path in folder.parent.iterdir()] == ["step4"], "nothing half-written is left"


def test_half_the_bytes_in_bf16(run: Path, tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        main([str(run), str(tmp_path / dtype), "--dtype", dtype])
    sizes = [(tmp_path / dtype / "model.safetensors").stat().st_size for dtype in ("float32", "bfloat16")]
    assert sizes[1] < 0.6 * sizes[0]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "bfloat16").dtype == torch.bfloat16


@pytest.mark.parametrize("checkpoint", ["final", "checkpoint-4"])
def test_llm_cs_file_is_the_same_model(run: Path, checkpoint: str, tmp_path: Path) -> None:
    main([str(run / checkpoint), str(tmp_path / "m.bin"), "--format", "llmc"])
    assert torch.equal(logits(read_llmc(tmp_path / "m.bin")), logits(load_model(str(run / checkpoint))))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "nowhere to export to"),
        ("there", "there is there already"),
        ("new --push_to_hub name", "takes ORG/NAME"),
        ("m.bin --format llmc --push_to_hub a/b", "takes ORG/NAME, and --format hf"),
        ("new --format gguf", "invalid choice: 'gguf'"),
        ("--push_to_hub a/b", "Set HF_TOKEN"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    run: Path, words: str, told: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    Path("there").mkdir()
    with pytest.raises(UserError, match=told):
        main([str(run), *words.split()])
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


class Hub(http.server.BaseHTTPRequestHandler):
    """What the Hub answers to an upload; keeps what it was sent."""

    files: dict[str, bytes]
    objects: dict[str, bytes]
    tokens: set[str | None]

    def log_message(self, *args: object) -> None: ...

    def answer(self, content: object, code: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_PUT(self) -> None:
        body = self.body()
        self.objects[hashlib.sha256(body).hexdigest()] = body
        self.answer({})

    def do_GET(self) -> None:
        self.answer({"id": "somebody/tiny", "sha": "0" * 40, "siblings": [], "name": "somebody", "type": "user"})

    def do_POST(self) -> None:
        self.tokens.add(self.headers.get("Authorization"))
        body, host = self.body(), f"http://{self.headers['Host']}"
        if self.path == "/api/repos/create":
            name = json.loads(body)
            return self.answer({"url": f"{host}/{name['organization']}/{name['name']}"})
        if self.path.endswith("/preupload/main"):
            asked = json.loads(body)["files"]
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith("safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in asked
            ]
            return self.answer({"files": modes})
        if self.path.endswith("/objects/batch"):
            objects = [
                {**one, "actions": {"upload": {"href": f"{host}/upload/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return self.answer({"transfer": "basic", "objects": objects})
        if self.path.endswith("/commit/main"):
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
                elif entry["key"] == "lfsFile":
                    self.files[entry["value"]["path"]] = self.objects[entry["value"]["oid"]]
            url = f"{host}/somebody/tiny/commit/{'0' * 40}"
            return self.answer({"commitUrl": url, "commitOid": "0" * 40, "success": True})
        return self.answer({"errors": [], "warnings": []})


def test_a_folder_is_pushed_to_the_hub(run: Path, type_command, tmp_path: Path) -> None:
    handler = type("Served", (Hub,), {"files": {}, "objects": {}, "tokens": set()})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": "hf_secretsecret",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path),
    }
    try:
        words = ("python", "-m", "gpt2_repro.export", run, "--push_to_hub", "somebody/tiny", "--private")
        done = type_command(*words, **environment)
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Pushed: " in done.stdout and handler.tokens == {"Bearer hf_secretsecret"}
    files = handler.files
    assert files.keys() >= {"config.json", "model.safetensors", "tokenizer.json", "README.md"}
    assert not [name for name, content in files.items() if b"hf_secret" in content]
    folder = tmp_path / "pulled"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), logits(load_model(str(run / "final"))))
    assert 'from_pretrained("somebody/tiny")' in (folder / "README.md").read_text()
    unreachable = type_command(*words[:4], tmp_path / "kept", *words[4:], **environment)
    assert unreachable.returncode == 2 and "error: cannot upload to somebody/tiny" in unreachable.stderr
    assert (tmp_path / "kept" / "model.safetensors").is_file(), "what was written stays, whatever the Hub does"


def test_the_card_has_no_paths_of_this_machine(run: Path) -> None:
    record = training_record(run / "final")
    name = "/home/me/a.jsonl=0.7,/home/me/b.jsonl=0.3"
    files = [{"name": "/home/me/a.jsonl", "files": [{"path": "/home/me/a.jsonl"}]}, {"name": "org/set"}]
    data = record["environment"]["data"] | {"source": {"name": name, "sources": files}}
    comparison = {
        **{"limit": None, "baseline": None, "max_length": 8, "dtype": "float32", "date": "2026-12-01"},
        **{"command": "bash evaluate.sh /home/me/runs/x --local_data '/home/me/d'", "versions": {"lm_eval": "0"}},
        "rows": [
            {
                "task": "t",
                "metric": "m",
                "higher_is_better": None,
                "values": {"me": {"value": 1.0, "stderr": None}},
                "difference": {},
            }
        ],
    }
    trajectory = record["environment"]["trajectory"] | {"init_from": "/home/me/runs/x/final"}
    changed = record["environment"] | {"data": data, "trajectory": trajectory}
    card = model_card("me", record | {"environment": changed}, comparison, "me")
    assert "/home" not in card and "a.jsonl=0.7,b.jsonl=0.3" in card and "org/set" in card
    assert "bash evaluate.sh x --local_data 'd'" in card


def test_results_stand_in_the_card_in_the_hubs_form(run: Path) -> None:
    record = training_record(run / "final")
    comparison = {
        "limit": None,
        "baseline": "openai-community/gpt2",
        "max_length": 1024,
        "dtype": "float32",
        "command": "bash evaluate.sh runs/x",
        "date": "2026-12-01T00:00:00+00:00",
        "versions": {"lm_eval": "0.4.13"},
        "rows": [
            {
                "task": "lambada_openai",
                "metric": "acc",
                "higher_is_better": True,
                "values": {
                    "me": {"value": 0.31, "stderr": 0.0065},
                    "openai-community/gpt2": {"value": 0.3256, "stderr": 0.0065},
                },
                "difference": {"me": {"value": -0.0156, "stderr": 0.005, "verdict": "worse"}},
            }
        ],
    }
    card = model_card("me", record, comparison, "me")
    header = yaml.safe_load(card.split("---")[1])
    (result,) = header["model-index"][0]["results"]
    assert result["dataset"] == {"name": "LAMBADA (OpenAI)", "type": "EleutherAI/lambada_openai", "split": "test"}
    assert result["metrics"] == [{"type": "acc", "name": "acc", "value": 0.31}]
    assert "| lambada_openai | acc ↑ | 0.3100 ± 0.0065 | 0.3256 ± 0.0065 | −0.0156 ± 0.0050 worse |" in card
    from huggingface_hub import ModelCard

    assert ModelCard(card).data.eval_results[0].metric_value == 0.31
    smoke = model_card("me", record, comparison | {"limit": 5}, "me")
    assert "model-index" not in smoke and "lambada" not in smoke


def test_the_card_lists_how_the_run_deviates(run: Path) -> None:
    record = training_record(run / "final")
    environment = record["environment"]
    card = (run / "final" / "README.md").read_text()
    assert "## Deviations from `recipes/gpt2_124m.yaml`" in card
    assert "| training.learning_rate | 0.01 | 0.0006 |" in card
    listed = {
        line.split(" | ")[0] for line in card.splitlines() if line.startswith(("| model.", "| data.", "| training."))
    }
    assert listed == {f"| {its['field']}" for its in environment["deviations"]} - {"| data.data_files"}
    assert str(run.parent) not in card
    assert "does not deviate" in model_card("me", record | {"environment": environment | {"deviations": []}})
    del environment["deviations"]  # a run of before
    assert "deviat" not in model_card("me", record).lower()
