"""The Hub preset against a local server that speaks as much of the Hub's protocol as a download needs."""

import hashlib
import http.server
import io
import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from gpt2_repro.data.tokenizer import train_tokenizer


REVISION = "0123456789abcdef0123456789abcdef01234567"
REPOSITORIES = ("HuggingFaceFW/fineweb", "HuggingFaceFW/fineweb-edu")
FAILING: set[str] = set()  # names of files that the server refuses


def parquet(texts: list[str]) -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pa.table({"text": texts, "id": list(map(str, range(len(texts))))}), sink)
    return sink.getvalue()


@pytest.fixture
def hub(documents: list[str]) -> Iterator[str]:
    files = {
        "sample/10BT/000_00000.parquet": parquet(documents[:60]),
        "sample/10BT/001_00000.parquet": parquet(documents[60:]),
        "data/other.parquet": parquet(["never read"]),
    }

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            repository = next((name for name in REPOSITORIES if f"/{name}/" in f"{path}/"), "")
            if path == f"/api/datasets/{repository}":
                self.answer(json.dumps({"id": repository, "sha": REVISION, "siblings": []}).encode())
            elif path.startswith(f"/api/datasets/{repository}/tree/{REVISION}"):
                folder = path.split(REVISION)[1].strip("/").replace("%2F", "/")
                self.answer(
                    json.dumps(
                        [
                            {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                            for name, body in files.items()
                            if name.startswith(folder)
                        ]
                    ).encode()
                )
            elif path.rsplit("/", 1)[-1] in FAILING:
                self.send_error(403)
            elif path.startswith(f"/datasets/{repository}/resolve/{REVISION}/"):
                self.answer(files[path.split(f"{REVISION}/")[1]])
            else:
                self.send_error(404)

        def answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", REVISION)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.mark.parametrize(
    ("words", "source", "repository"),
    [((), "fineweb-10bt", REPOSITORIES[0]), (("--source", "fineweb-edu-10bt"), "fineweb-edu-10bt", REPOSITORIES[1])],
    ids=["default", "edu"],
)
def test_a_preset_reads_its_files_from_the_hub(
    hub: str, type_command, corpus, tmp_path: Path, words: tuple[str, ...], source: str, repository: str
) -> None:
    options = ("--tokenizer", "train:300", "--sequence_length", "32", "--validation_tokens", "500", "--num_proc", "2")
    online = {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    done: subprocess.CompletedProcess[str] = type_command(
        "python", "prepare_data.py", *words, "--dataset_dir", tmp_path / "hub", *options, **online
    )
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "hub" / "manifest.json").read_text())
    assert manifest["source"] == {
        "name": source,
        "repository": repository,
        "folder": "sample/10BT",
        "revision": REVISION,
    }
    local = ("--data_files", *corpus, "--dataset_dir", tmp_path / "local")
    assert type_command("python", "prepare_data.py", *local, *options).returncode == 0
    assert manifest["sha256"] == json.loads((tmp_path / "local" / "manifest.json").read_text())["sha256"]
    # What was downloaded is dropped again, from the cache too.
    assert not [path for path in tmp_path.rglob("*.parquet")]


@pytest.mark.parametrize(
    "network",
    [{"HF_HUB_OFFLINE": "1"}, {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}],
    ids=["offline", "unreachable"],
)
def test_without_the_hub_one_line_says_so(type_command, tmp_path: Path, network: dict[str, str]) -> None:
    done = type_command(
        "python", "prepare_data.py", "--dataset_dir", tmp_path / "hub", "--tokenizer", "train:300", **network
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: cannot list HuggingFaceFW/fineweb on the Hub")
    assert "Traceback" not in done.stderr and "--data_files" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_download_that_fails_is_taken_up_again(hub: str, type_command, tmp_path: Path) -> None:
    options = ("--tokenizer", "train:300", "--sequence_length", "32", "--validation_tokens", "500", "--num_proc", "1")
    words = ("python", "prepare_data.py", "--dataset_dir", tmp_path / "hub", *options)
    online = {"HF_ENDPOINT": hub, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    FAILING.add("001_00000.parquet")
    try:
        # The tokenizer is there already, so the first file is staged before the second one fails.
        (tmp_path / "tokenizer").mkdir()
        train_tokenizer(["some text to learn from"], 257, tmp_path / "tokenizer", sequence_length=32)
        words = (*words[:4], "--tokenizer", tmp_path / "tokenizer", *options[2:])
        done = type_command(*words, **online)
    finally:
        FAILING.clear()
    assert done.returncode == 2
    assert "cannot fetch sample/10BT/001_00000.parquet" in done.stderr.splitlines()[-1]
    assert (tmp_path / "hub.staging" / "tokens-00000.npz").exists() and not (tmp_path / "hub").exists()
    done = type_command(*words, **online)
    assert done.returncode == 0, done.stderr
    assert "taking up the interrupted preparation" in done.stdout
    assert not (tmp_path / "hub.staging").exists()
