"""Datasets of the Hub are listed, downloaded and checked.

A local server acts as the Hub.
"""

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
from gpt2_repro.data.arguments import DataArguments
from gpt2_repro.data.rows import open_rows
from gpt2_repro.data.sources import opening
from gpt2_repro.data.tokenizer import obtain_tokenizer
from gpt2_repro.errors import UserError
from gpt2_repro.files import read_object
from tests.reference import write_llmc_shard


REVISION = "0123456789abcdef0123456789abcdef01234567"


def parquet(texts: list[str]) -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pa.table({"text": texts, "id": list(map(str, range(len(texts))))}), sink)
    return sink.getvalue()


@dataclasses.dataclass
class Hub:
    """State of a local server that acts as the Hub.

    Args:
        files: content of each file, by repository and path.
        faults: the next answers for a file name: an HTTP status, or `broken` to send zeros as content.
        asked: names of the files that the server has sent, in order.
        most_paths: the number of paths above which a question about files is refused.
    """

    files: dict[str, dict[str, bytes]]
    faults: dict[str, list[int | str]] = dataclasses.field(default_factory=dict)
    asked: list[str] = dataclasses.field(default_factory=list)
    most_paths: int = 1000
    url: str = ""


@pytest.fixture
def hub() -> Iterator[Hub]:
    known = Hub({})

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Answer a request for /[api/]datasets/OWNER/NAME/KIND/REVISION/PATH."""
            words = urllib.parse.unquote(self.path.split("?")[0]).strip("/").removeprefix("api/").split("/")
            repository, kind, path = "/".join(words[1:3]), "".join(words[3:4]), "/".join(words[5:])
            files = known.files.get(repository)
            if files is None or (kind == "resolve" and path not in files):
                return self.send_error(404)
            if kind == "resolve":
                return self.send_file(path.rpartition("/")[2], files[path])
            if kind == "tree":
                names = [name for name in files if not path or name.startswith(f"{path}/")]
                if "recursive=true" not in self.path.lower():
                    below = len(path) + 1 if path else 0
                    folders = dict.fromkeys(name[: name.index("/", below)] for name in names if "/" in name[below:])
                    shown = [{"type": "directory", "path": each, "oid": "0"} for each in folders]
                    shown += [self.describe(name, files[name]) for name in names if "/" not in name[below:]]
                    return self.send(json.dumps(shown).encode())
            elif kind == "paths-info":
                content = self.rfile.read(int(self.headers["Content-Length"])).decode()
                paths = urllib.parse.parse_qs(content)["paths"]
                if len(paths) > known.most_paths:
                    return self.send_error(413)
                names = [name for name in paths if name in files]
            else:
                siblings = [{"rfilename": name} for name in files]
                return self.send(json.dumps({"id": repository, "sha": REVISION, "siblings": siblings}).encode())
            return self.send(json.dumps([self.describe(name, files[name]) for name in names]).encode())

        def describe(self, name: str, body: bytes) -> dict[str, object]:
            lfs = {"oid": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 1}
            return {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest(), "lfs": lfs}

        def send_file(self, name: str, body: bytes) -> None:
            etag = hashlib.sha1(body).hexdigest()
            if self.command == "GET":
                fault = known.faults[name].pop(0) if known.faults.get(name) else None
                if isinstance(fault, int):
                    return self.send_error(fault)
                body = bytes(len(body)) if fault == "broken" else body
                known.asked.append(name)
            self.send(body, etag)

        def send(self, body: bytes, etag: str = "none") -> None:
            self.send_response(200)
            for name, value in (("Content-Length", len(body)), ("ETag", f'"{etag}"'), ("X-Repo-Commit", REVISION)):
                self.send_header(name, str(value))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_POST = do_GET

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    known.url = f"http://127.0.0.1:{server.server_port}"
    yield known
    server.shutdown()


Prepare = Callable[..., str]


@pytest.fixture
def prepare_online(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """Return a function that runs prepare_data.py with a local server as the Hub.

    The function returns the error message, or "" after a success.
    """
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
    args = DataArguments(tokenizer="train:300", sequence_length=32)
    obtain_tokenizer(args, tmp_path / "tokenizer", lambda: documents, 0)
    return tmp_path / "tokenizer"


def test_a_preset_is_fetched_file_by_file_checked_and_dropped(
    hub: Hub, prepare_online: Prepare, tokenizer: Path, documents: list[str], corpus: list[Path], tmp_path: Path
) -> None:
    repository = "HuggingFaceFW/fineweb"
    parts = {f"sample/10BT/00{n}.parquet": parquet(documents[n * 33 : n * 33 + 33]) for n in range(4)}
    hub.files[repository] = {"README.md": b"", "sample/100BT/000.parquet": parquet(["never read"]), **parts}
    # First a refused file, then bytes with a wrong hash. Each start fetches only the missing files.
    hub.faults = {"002.parquet": [403, "broken"]}
    words = ("--tokenizer", tokenizer)
    for _ in range(2):
        assert f"sample/10BT/002.parquet of {repository}" in prepare_online(*words)
        assert not (tmp_path / "out").exists()
    assert not prepare_online(*words, "--num_proc", 2)
    assert hub.asked == [f"00{n}.parquet" for n in (0, 1, 2, 2, 3)]
    manifest = read_object(tmp_path / "out" / "manifest.json")
    files = {"repository": repository, "files": "sample/10BT/*.parquet", "revision": REVISION}
    assert manifest["source"] == {"name": "fineweb-10bt", **files}
    assert not prepare_online(*words, "--data_files", *corpus, folder="local")
    assert manifest["sha256"] == read_object(tmp_path / "local" / "manifest.json")["sha256"]
    assert not list(tmp_path.rglob("*.parquet")) and not (tmp_path / "out.staging").exists()
    for folder in ("kept", "again"):  # the second preparation reads the Hub's cache
        assert not prepare_online(*words, "--keep_downloads", folder=folder)
        assert len(hub.asked) == 5 + 4


@pytest.mark.parametrize(
    ("source", "repository", "path"),
    [
        ("dclm-100bt", "HuggingFaceFW/dclm_100BT-shuffled", "data/train-0000{}-of-00100.parquet"),
        ("climbmix", "karpathy/climbmix-400b-shuffle", "shard_0000{}.parquet"),
        ("fineweb-2:deu_Latn", "HuggingFaceFW/fineweb-2", "data/deu_Latn/train/000_0000{}.parquet"),
        ("finewiki:de", "HuggingFaceFW/finewiki", "data/dewiki/000_0000{}.parquet"),
    ],
)
def test_newer_sources_by_their_short_names(
    source: str, repository: str, path: str, hub: Hub, prepare_online: Prepare, tokenizer: Path,
    documents: list[str], corpus: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    hub.most_paths = 2
    monkeypatch.setattr("gpt2_repro.data.sources.hub.MOST_PATHS", 2)
    config = source.partition(":")[2]
    own = [{"split": "train", "path": path.rpartition("/")[0] + "/*"}]
    other = [{"split": "train", "path": "data/other/*"}]
    configs = [{"config_name": name, "data_files": files} for name, files in ((config, own), ("other", other))]
    readme = f"---\nconfigs: {json.dumps(configs)}\n---\n" if config else ""
    others = {"README.md": readme.encode(), "data/other/000.parquet": parquet(["never read"])}
    parts = [documents[:40], documents[40:50], documents[50:]]
    hub.files[repository] = {path.format(number): parquet(part) for number, part in enumerate(parts)} | others
    words = ("--tokenizer", tokenizer)
    assert not prepare_online("--source", source, *words)
    assert not prepare_online("--data_files", *corpus, *words, folder="local")
    manifests = [read_object(tmp_path / name / "manifest.json") for name in ("out", "local")]
    assert manifests[0]["sha256"] == manifests[1]["sha256"] and hub.asked.count("000.parquet") == 0
    assert manifests[0]["source"]["repository"] == repository


def test_ready_made_tokens_keep_their_validation_shard(
    hub: Hub, prepare_online: Prepare, tokenizer: Path, tmp_path: Path
) -> None:
    stream = np.random.default_rng(0).integers(0, 299, 3000).astype(np.uint16)
    stream[::50] = 299
    parts = {"train_000001": stream[650:1800], "train_000002": stream[1800:], "val_000000": stream[:650]}
    for name, ids in parts.items():
        shard = write_llmc_shard(tmp_path / f"{name}.bin", ids).read_bytes()
        hub.files.setdefault("kjj0/fineweb10B-gpt2", {})[f"fineweb_{name}.bin"] = shard
    words = ("--source", "fineweb-10bt-tokens", "--tokenizer", tokenizer)
    assert "--split source" in prepare_online(*words)
    assert not prepare_online(*words, "--split", "source")
    for split, wanted in (("validation", stream[:650]), ("train", stream[650:])):
        rows = open_rows(tmp_path / "out" / split).joined()[0].reshape(-1, 33)
        assert [*rows[:, :-1].ravel(), rows[-1, -1]] == wanted[: len(rows) * 32 + 1].tolist()


def test_any_dataset_by_its_id_and_a_validation_set_of_another(
    hub: Hub, prepare_online: Prepare, documents: list[str], corpus: list[Path], tmp_path: Path
) -> None:
    splits = {"small": "small-*.jsonl.gz", "big": "big-*.parquet"}
    configs = [{"config_name": name, "data_files": [{"split": "train", "path": of}]} for name, of in splits.items()]
    lines = ["".join(json.dumps({"body": text}) + "\n" for text in part) for part in (documents[:50], documents[50:])]
    hub.files["someone/prose"] = {
        "README.md": f"---\nconfigs: {json.dumps(configs)}\n---\n".encode(),
        **{f"small-{n}.jsonl.gz": gzip.compress(part.encode()) for n, part in enumerate(lines)},
        "big-0.parquet": parquet(["never read"]),
    }
    hub.files["emozilla/pg19"] = {
        "data/train-00000-of-00001.parquet": parquet(["never read"]),
        "data/validation-00000-of-00001.parquet": parquet([documents[0][:99], documents[1][:99]]),
    }
    form = ("--split", "hash", "--validation_fraction", 0.3, "--validation_text", "true")
    source = ("--source", "someone/prose:small", "--text_column", "body", "--validation_sets", "books=pg19")
    assert not prepare_online(*source, *form)
    assert hub.asked.count("small-0.jsonl.gz") == 1  # its text is read twice
    manifest = read_object(tmp_path / "out" / "manifest.json")
    assert manifest["source"]["revision"] == REVISION and manifest["source"]["config"] == "small"
    assert manifest["validation_sets"]["books"]["repository"] == "emozilla/pg19"
    assert manifest["counts"]["validation_books"]["documents"] == 2
    assert not prepare_online("--data_files", *corpus, *form, folder="local")
    texts = [(tmp_path / name / "text" / "validation.jsonl").read_bytes() for name in ("out", "local")]
    assert texts[0] == texts[1] and len(texts[0]) > 1000
    local = read_object(tmp_path / "local" / "manifest.json")["sha256"]
    assert {split: manifest["sha256"][split] for split in local} == local


def test_two_revisions_of_one_repository_are_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted preparation of a mixture opens each source at the revision that it had before."""

    class Repository:
        def __init__(self, name: str, revision: str, folder: Path | None) -> None:
            self.name = name
            self.revision = revision

        def resolve(self, *words: object) -> list[object]:
            return []

    monkeypatch.setattr(opening, "Repository", Repository)
    recorded = {"one/web@old": "a" * 40, "one/web@new": "b" * 40}
    args = DataArguments(source="one/web@old=0.5,one/web@new=0.5")
    sources = opening.SourceOpener(args, tmp_path, tmp_path, recorded).open_all()
    assert {source.description["name"]: source.description["revision"] for source in sources.training} == recorded
