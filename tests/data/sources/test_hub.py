"""The Hub's paths against a local server that speaks as much of its protocol as listing and fetching need."""

import dataclasses
import gzip
import hashlib
import http.server
import io
import json
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import prepare_data
from gpt2_repro.data.rows import open_rows
from gpt2_repro.data.sources.hub import hub_errors
from gpt2_repro.data.sources.token_files import write_shards
from gpt2_repro.data.tokenizer import train_tokenizer
from gpt2_repro.errors import UserError


REVISION = "0123456789abcdef0123456789abcdef01234567"


def parquet(texts: list[str]) -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pa.table({"text": texts, "id": list(map(str, range(len(texts))))}), sink)
    return sink.getvalue()


@dataclasses.dataclass
class Hub:
    """A server with the files of some repositories.

    Args:
        files: by repository and path.
        faults: by file name, what the next requests for it get: a status, or `broken` for other bytes of that length.
        asked: names of the files that were sent whole.
    """

    files: dict[str, dict[str, bytes]]
    faults: dict[str, list[int | str]] = dataclasses.field(default_factory=dict)
    asked: list[str] = dataclasses.field(default_factory=list)
    url: str = ""


@pytest.fixture
def hub() -> Iterator[Hub]:
    known = Hub({})

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = urllib.parse.unquote(self.path.split("?")[0])
            words = path.strip("/").split("/")
            api = words[:2] == ["api", "datasets"]
            repository = "/".join(words[2:4] if api else words[1:3])
            rest = words[4:] if api else words[3:]
            folders: list[dict[str, str]] = []
            files = known.files.get(repository)
            if files is None:
                return self.send_error(404)
            if not api:
                return self.send_file(files, "/".join(rest[2:]))
            if rest[:1] == ["tree"]:
                folder = "/".join(rest[2:])
                names = [name for name in files if name.startswith(folder + "/" if folder else "")]
                if "recursive=true" not in self.path.lower():
                    inside = [name[len(folder) + 1 if folder else 0 :] for name in names]
                    deeper = sorted({name.split("/")[0] for name in inside if "/" in name})
                    names = [name for name, rest in zip(names, inside, strict=True) if "/" not in rest]
                    folders = [{"type": "directory", "path": f"{folder}/{d}".strip("/"), "oid": "0"} for d in deeper]
            elif rest[:1] == ["paths-info"]:
                content = self.rfile.read(int(self.headers["Content-Length"])).decode()
                names = [name for name in urllib.parse.parse_qs(content)["paths"] if name in files]
            else:
                siblings = [{"rfilename": name} for name in files]
                return self.send(json.dumps({"id": repository, "sha": REVISION, "siblings": siblings}).encode())
            return self.send(json.dumps([*folders, *(self.describe(name, files[name]) for name in names)]).encode())

        def describe(self, name: str, body: bytes) -> dict[str, object]:
            lfs = {"oid": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 1}
            return {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest(), "lfs": lfs}

        def send_file(self, files: dict[str, bytes], name: str) -> None:
            short = name.rsplit("/", 1)[-1]
            if name not in files:
                return self.send_error(404)
            body = files[name]
            if self.command == "GET" and known.faults.get(short):
                fault = known.faults[short].pop(0)
                if fault != "broken":
                    return self.send_error(int(fault))
                body = body[: len(body) // 2] + bytes(len(body) - len(body) // 2)
            if self.command == "GET":
                known.asked.append(short)
            self.send(body, etag=hashlib.sha1(files[name]).hexdigest())

        def send(self, body: bytes, etag: str = "none") -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{etag}"')
            self.send_header("X-Repo-Commit", REVISION)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_POST = do_GET

        def log_message(self, *words: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    known.url = f"http://127.0.0.1:{server.server_port}"
    yield known
    server.shutdown()


Prepare = Callable[..., str]


@pytest.fixture
def prepare_online(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """Prepares with the server as the Hub. Returns the error message, or "" without one."""
    import datasets
    from huggingface_hub import constants

    template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    values = {"ENDPOINT": hub.url, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_CACHE": str(tmp_path / "home")}
    for name, value in (values | {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}).items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)

    def run(*words: object, folder: str = "out") -> str:
        form = ("--tokenizer", "train:300", "--sequence_length", 32, "--validation_tokens", 500, "--num_proc", 1)
        try:
            prepare_data.main([str(word) for word in ("--dataset_dir", tmp_path / folder, *form, *words)])
        except UserError as error:
            return str(error)
        return ""

    return run


@pytest.fixture
def tokenizer(documents: list[str], tmp_path: Path) -> Path:
    train_tokenizer(documents, 300, tmp_path / "tokenizer", sequence_length=32)
    return tmp_path / "tokenizer"


def manifest_of(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def test_a_preset_is_fetched_file_by_file_and_dropped(
    hub: Hub, prepare_online: Prepare, documents: list[str], corpus: list[Path], tmp_path: Path
) -> None:
    source, repository = "fineweb-10bt", "HuggingFaceFW/fineweb"
    hub.files[repository] = {
        "README.md": b"",
        "sample/10BT/000_00000.parquet": parquet(documents[:60]),
        "sample/10BT/001_00000.parquet": parquet(documents[60:]),
        "sample/100BT/000_00000.parquet": parquet(["never read"]),
    }
    # Other bytes than the listing's hash says: the next start fetches this file again, and no other one.
    hub.faults = {"001_00000.parquet": ["broken"]}
    assert "001_00000.parquet" in prepare_online("--source", source)
    assert not prepare_online("--source", source, "--num_proc", 2)
    manifest = manifest_of(tmp_path / "out")
    files = {"repository": repository, "files": "sample/10BT/*.parquet", "revision": REVISION}
    assert manifest["source"] == {"name": source, **files, "weight": 1.0}
    assert not prepare_online("--data_files", *corpus, folder="local")
    assert manifest["sha256"] == manifest_of(tmp_path / "local")["sha256"]
    assert not list(tmp_path.rglob("*.parquet"))  # from the Hub's cache too
    assert hub.asked == ["000_00000.parquet", "001_00000.parquet", "001_00000.parquet"]


def test_a_download_that_fails_is_taken_up_again(
    hub: Hub, prepare_online: Prepare, tokenizer: Path, documents: list[str], tmp_path: Path
) -> None:
    hub.files["HuggingFaceFW/fineweb"] = {
        f"sample/10BT/00{n}.parquet": parquet(documents[n * 30 : n * 30 + 30]) for n in range(4)
    }
    words = ("--tokenizer", tokenizer, "--keep_downloads")
    hub.faults = {"002.parquet": [403]}
    assert "sample/10BT/002.parquet of HuggingFaceFW/fineweb" in prepare_online(*words)
    assert not (tmp_path / "out").exists() and hub.asked == ["000.parquet", "001.parquet"]
    assert not prepare_online(*words)
    assert hub.asked == [f"00{n}.parquet" for n in range(4)]
    assert not (tmp_path / "out.staging").exists()
    assert len(list((tmp_path / "home").rglob("*.parquet"))) == 4  # kept: the next preparation fetches none
    assert not prepare_online(*words, folder="again") and len(hub.asked) == 4


def test_ready_made_tokens_keep_their_validation_shard(
    hub: Hub, prepare_online: Prepare, tokenizer: Path, tmp_path: Path
) -> None:
    stream = np.random.default_rng(0).integers(0, 299, 3000).astype(np.uint16)
    stream[::50] = 299
    files = {}
    for name, piece in (
        ("train_000001", stream[650:1800]),
        ("train_000002", stream[1800:]),
        ("val_000000", stream[:650]),
    ):
        (path,) = write_shards(tmp_path, "fineweb", "val", [piece])
        files[f"fineweb_{name}.bin"] = path.read_bytes()
    hub.files["kjj0/fineweb10B-gpt2"] = files
    words = ("--source", "fineweb-10bt-tokens", "--tokenizer", tokenizer)
    assert "--split source" in prepare_online(*words)
    assert not prepare_online(*words, "--split", "source")
    for split, wanted in (("validation", stream[:650]), ("train", stream[650:])):
        ids, lengths = open_rows(tmp_path / "out" / split).joined()
        rows = ids.reshape(-1, 33)
        assert [*rows[:, :-1].ravel(), rows[-1, -1]] == wanted[: len(rows) * 32 + 1].tolist()
        assert manifest_of(tmp_path / "out")["counts"][split]["tokens"] == len(wanted)


def test_any_dataset_by_its_id_and_a_validation_set_of_another(
    hub: Hub, prepare_online: Prepare, documents: list[str], corpus: list[Path], tmp_path: Path
) -> None:
    readme = (
        "---\nconfigs:\n- config_name: small\n  data_files:\n  - split: train\n    path: small/*.jsonl.gz\n"
        "- config_name: big\n  data_files:\n  - split: train\n    path: big/*.parquet\n---\n"
    )
    lines = ["".join(json.dumps({"body": text}) + "\n" for text in part) for part in (documents[:50], documents[50:])]
    hub.files["someone/prose"] = {
        "README.md": readme.encode(),
        "small/a.jsonl.gz": gzip.compress(lines[0].encode()),
        "small/b.jsonl.gz": gzip.compress(lines[1].encode()),
        "big/a.parquet": parquet(["never read"]),
    }
    pages = [" = One = \n", "", documents[0][:99], " = Two = \n", documents[1][:99]]
    hub.files["Salesforce/wikitext"] = {
        "wikitext-103-raw-v1/train-00000-of-00001.parquet": parquet(["never read"]),
        "wikitext-103-raw-v1/validation-00000-of-00001.parquet": parquet(pages),
    }
    source = ("--source", "someone/prose:small")
    assert not prepare_online(*source, "--text_column", "body", "--validation_sets", "wiki=wikitext-103")
    manifest = manifest_of(tmp_path / "out")
    assert manifest["source"]["revision"] == REVISION and manifest["source"]["config"] == "small"
    assert manifest["validation_sets"]["wiki"]["repository"] == "Salesforce/wikitext"
    assert manifest["counts"]["validation_wiki"]["documents"] == 2
    assert not prepare_online("--data_files", *corpus, folder="local")
    local = manifest_of(tmp_path / "local")["sha256"]
    assert {split: manifest["sha256"][split] for split in local} == local
    for wrong, named in [
        (("--source", "someone/prose:medium"), "someone/prose"),
        ((*source, "--source_split", "test"), "--source_split"),
        (("--source", "someone/nothing"), "someone/nothing"),
    ]:
        assert named in prepare_online(*wrong, folder="wrong")
        assert not list(tmp_path.glob("wrong*"))


def test_without_the_hub_one_line_says_so(type_command, tmp_path: Path) -> None:
    done = type_command("python", "prepare_data.py", "--dataset_dir", tmp_path / "hub", HF_HUB_OFFLINE="1")
    line = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and "HuggingFaceFW/fineweb" in line and "--data_files" in line
    assert "Traceback" not in done.stderr and not list(tmp_path.iterdir())


def test_errors_of_the_network_are_user_errors_and_those_of_this_disk_are_not() -> None:
    for error in (ConnectionError("lost"), TimeoutError(), OSError("urlopen")):
        with pytest.raises(UserError, match="--data_files"), hub_errors("fetch a file"):
            raise error
    with pytest.raises(OSError, match="No space left"), hub_errors("fetch a file"):
        raise OSError(28, "No space left on device")
