"""The Hub's paths against a local server that speaks as much of its protocol as listing and fetching need."""

import dataclasses
import gzip
import hashlib
import http.server
import io
import json
import subprocess
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

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
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"])).decode()
            try:
                self.paths = json.loads(content)["paths"]
            except ValueError:
                self.paths = urllib.parse.parse_qs(content)["paths"]
            self.do_GET()

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
                names = [name for name in self.paths if name in files]
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

        def log_message(self, *words: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    known.url = f"http://127.0.0.1:{server.server_port}"
    yield known
    server.shutdown()


Prepare = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def prepare_online(hub: Hub, type_command, tmp_path: Path) -> Prepare:
    def run(*words: object, folder: str = "out", **settings: str) -> subprocess.CompletedProcess[str]:
        online = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
        online |= {"HF_HUB_DISABLE_XET": "1"} | settings
        form = ("--tokenizer", "train:300", "--sequence_length", 32, "--validation_tokens", 500, "--num_proc", 1)
        where = ("--dataset_dir", tmp_path / folder)
        return type_command("python", "prepare_data.py", *form, *where, *words, **online)

    return run


def manifest_of(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def test_a_preset_is_fetched_file_by_file_and_dropped(
    hub: Hub, prepare_online: Prepare, documents, corpus, tmp_path: Path
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
    damaged = prepare_online("--source", source, "--num_proc", 2)
    assert damaged.returncode == 2 and "001_00000.parquet" in damaged.stderr.splitlines()[-1], damaged.stderr
    done = prepare_online("--source", source, "--num_proc", 2)
    assert done.returncode == 0, done.stderr
    manifest = manifest_of(tmp_path / "out")
    files = {"repository": repository, "files": "sample/10BT/*.parquet", "revision": REVISION}
    assert manifest["source"] == {"name": source, **files, "weight": 1.0}
    assert prepare_online("--data_files", *corpus, folder="local", HF_HUB_OFFLINE="1").returncode == 0
    assert manifest["sha256"] == manifest_of(tmp_path / "local")["sha256"]
    assert not [path for path in tmp_path.rglob("*.parquet")]  # from the Hub's cache too
    assert hub.asked == ["000_00000.parquet", "001_00000.parquet", "001_00000.parquet"]


def test_a_download_that_fails_is_taken_up_again(
    hub: Hub, prepare_online: Prepare, documents: list[str], tmp_path: Path
) -> None:
    hub.files["HuggingFaceFW/fineweb"] = {
        f"sample/10BT/00{n}.parquet": parquet(documents[n * 30 : n * 30 + 30]) for n in range(4)
    }
    train_tokenizer(documents, 300, tmp_path / "tokenizer", sequence_length=32)
    words = ("--tokenizer", tmp_path / "tokenizer", "--keep_downloads")
    hub.faults = {"002.parquet": [403]}
    done = prepare_online(*words)
    assert done.returncode == 2
    assert "sample/10BT/002.parquet of HuggingFaceFW/fineweb" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()
    assert hub.asked == ["000.parquet", "001.parquet"]
    # The revision that the first start began with is kept.
    done = prepare_online(*words)
    assert done.returncode == 0, done.stderr
    assert "taking up the interrupted preparation" in done.stdout
    assert hub.asked == [f"00{n}.parquet" for n in range(4)]
    assert not (tmp_path / "out.staging").exists()
    assert len(list((tmp_path / "home").rglob("*.parquet"))) == 4  # kept: the next preparation fetches none
    assert prepare_online(*words, folder="again").returncode == 0 and len(hub.asked) == 4


def test_ready_made_tokens_keep_their_validation_shard(
    hub: Hub, prepare_online: Prepare, documents: list[str], tmp_path: Path
) -> None:
    stream = np.random.default_rng(0).integers(0, 299, 3000).astype(np.uint16)
    stream[::50] = 299
    shards = tmp_path / "shards"
    shards.mkdir()
    write_shards(shards, "fineweb", "val", [stream[:650]])
    for number, piece in enumerate((stream[650:1800], stream[1800:]), 1):
        (path,) = write_shards(shards, "fineweb", "train", [piece])
        path.rename(shards / f"train_{number}")
    files = {f"fineweb_train_00000{n}.bin": (shards / f"train_{n}").read_bytes() for n in (1, 2)}
    hub.files["kjj0/fineweb10B-gpt2"] = files | {"fineweb_val_000000.bin": next(shards.glob("*val*")).read_bytes()}
    train_tokenizer(documents, 300, tmp_path / "tokenizer", sequence_length=32)
    words = ("--source", "fineweb-10bt-tokens", "--tokenizer", tmp_path / "tokenizer")
    done = prepare_online(*words)
    assert (
        done.returncode == 2 and "brings its own validation tokens: add --split source" in done.stderr.splitlines()[-1]
    )
    done = prepare_online(*words, "--split", "source")
    assert done.returncode == 0, done.stderr
    for split, wanted in (("validation", stream[:650]), ("train", stream[650:])):
        ids, lengths = open_rows(tmp_path / "out" / split).joined()
        rows = ids.reshape(-1, 33)
        assert [*rows[:, :-1].ravel(), rows[-1, -1]] == wanted[: len(rows) * 32 + 1].tolist()
        assert manifest_of(tmp_path / "out")["counts"][split]["tokens"] == len(wanted)
    assert not list(tmp_path.rglob("fineweb_*.bin.*")) and not (tmp_path / "out.staging").exists()


def test_any_dataset_by_its_id_and_a_validation_set_of_another(
    hub: Hub, prepare_online: Prepare, documents: list[str], corpus, tmp_path: Path
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
    words = ("--source", "someone/prose:small", "--text_column", "body", "--validation_sets", "wiki=wikitext-103")
    done = prepare_online(*words)
    assert done.returncode == 0, done.stderr
    manifest = manifest_of(tmp_path / "out")
    assert manifest["source"]["revision"] == REVISION and manifest["source"]["config"] == "small"
    assert manifest["validation_sets"]["wiki"]["repository"] == "Salesforce/wikitext"
    assert prepare_online("--data_files", *corpus, folder="local").returncode == 0
    local = manifest_of(tmp_path / "local")
    assert {split: manifest["sha256"][split] for split in local["sha256"]} == local["sha256"]
    assert manifest["counts"]["validation_wiki"]["documents"] == 2
    assert len(open_rows(tmp_path / "out" / "validation_wiki")) == manifest["counts"]["validation_wiki"]["rows"] > 0
    for wrong, message in [
        (("--source", "someone/prose:medium"), "someone/prose cannot be opened"),
        (
            ("--source", "someone/prose:small", "--source_split", "test"),
            "has no split 'test': --source_split can be train",
        ),
        (("--source", "someone/nothing"), "list someone/nothing on the Hub"),
    ]:
        done = prepare_online(*wrong, folder="wrong")
        assert done.returncode == 2 and message in done.stderr.splitlines()[-1], done.stderr
        assert not (tmp_path / "wrong").exists() and not (tmp_path / "wrong.staging").exists()


@pytest.mark.parametrize(
    "network",
    [{"HF_HUB_OFFLINE": "1"}, {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}],
    ids=["offline", "unreachable"],
)
def test_without_the_hub_one_line_says_so(type_command, tmp_path: Path, network: dict[str, str]) -> None:
    words = ("--dataset_dir", tmp_path / "hub", "--tokenizer", "train:300")
    done = type_command("python", "prepare_data.py", *words, **network)
    assert done.returncode == 2
    assert "HuggingFaceFW/fineweb" in done.stderr.splitlines()[-1] and "--data_files" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_errors_of_the_network_are_user_errors_and_those_of_this_disk_are_not() -> None:
    for error in (ConnectionError("lost"), TimeoutError(), OSError("urlopen")):
        with pytest.raises(UserError, match="--data_files"), hub_errors("fetch a file"):
            raise error
    with pytest.raises(OSError, match="No space left"), hub_errors("fetch a file"):
        raise OSError(28, "No space left on device")
