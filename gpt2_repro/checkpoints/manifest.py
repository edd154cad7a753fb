"""Write, read and verify the manifests of checkpoints.

A checkpoint is complete if its manifest.json is intact and matches the files.
"""

import contextlib
import hashlib
import json
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from gpt2_repro.files import from_json, read_object, sha256_of, sync, to_json, write_whole
from gpt2_repro.run_record import events, layout
from gpt2_repro.run_record.environment import TrainingRecord
from gpt2_repro.run_record.layout import CHECKPOINT_MANIFEST


SILLY_RENAME = ".nfs"  # prefix of a file on NFS that was deleted while a process had it open


def seal(folder: Path, files: dict[str, dict[str, Any]], **facts: Any) -> None:
    """Flush all files of a staging folder to disk, then write the manifest.

    `facts` are further entries. `files` has `bytes` and `sha256` of the files that are already hashed and flushed.
    """
    files = dict(files)
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name.startswith(SILLY_RENAME):
            continue
        if path.is_file() and name not in files:
            files[name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
            sync(path)
        elif path.is_dir():
            sync(path)
    # The model card of final/ is written later, so the manifest does not list it.
    manifest = json.loads(to_json(facts | {"files": dict(sorted(files.items()))}))
    write_whole(folder / CHECKPOINT_MANIFEST, json.dumps(manifest | {"sha256": manifest_hash(manifest)}, indent=1))
    sync(folder)


def defect(checkpoint: Path, *, read_files: bool = False) -> str | None:
    """Return why a checkpoint or final/ is not complete, or None if it is.

    By default, only the sizes of its files are checked.
    """
    files = read_manifest(checkpoint).get("files")
    if files is None:
        return "its manifest is missing or damaged"
    for name, expected in files.items():
        path = checkpoint / name
        if not path.is_file() or path.stat().st_size != expected["bytes"]:
            return f"{name} is missing or cut short"
    if not read_files:
        return None
    with ThreadPool(8) as pool:  # in contrast to a ThreadPoolExecutor, it does not delay an interrupt
        hashes = zip(files, pool.imap(sha256_of, map(checkpoint.joinpath, files)), strict=True)
        return next((f"{name} is damaged" for name, sha256 in hashes if sha256 != files[name]["sha256"]), None)


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint or final/, or {} if missing or damaged."""
    return intact_manifest(read_object(checkpoint / CHECKPOINT_MANIFEST))


def intact_manifest(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest, or {} if it is damaged."""
    files, identity = manifest.get("files"), manifest.get("run_identity", {})
    if not isinstance(files, dict) or not isinstance(identity, dict):
        return {}
    intact = all(isinstance(file, dict) and {"bytes", "sha256"} <= file.keys() for file in files.values())
    return manifest if intact and manifest.get("sha256") == manifest_hash(manifest) else {}


def manifest_hash(manifest: dict[str, Any]) -> str:
    """Return the sha256 of all entries of a manifest except its entry `sha256`."""
    content = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def training_record(checkpoint: Path) -> TrainingRecord | None:
    """Return how the weights in a `final/` or `checkpoint-N` were trained, or None."""
    manifest = read_manifest(checkpoint)
    if "environment" not in manifest:  # a checkpoint-N uses the environment of its run
        run, known = read_object(checkpoint.parent / layout.ENVIRONMENT), "run_identity" in manifest
        manifest["environment"] = run | {"run_identity": manifest["run_identity"]} if run and known else {}
        step = layout.step_of(checkpoint)
        manifest |= {
            "step": step,
            "averaged": False,
            "losses": events.validation_losses(checkpoint.parent / layout.METRICS, step),
        }
    if "run_identity" not in manifest["environment"]:
        return None
    losses = {key: loss for key, loss in manifest.get("losses", {}).items() if loss is not None}
    with contextlib.suppress(ValueError):
        return from_json(TrainingRecord, manifest | {"losses": losses})
    return None


def checkpoint_size(checkpoint: Path) -> int:
    """Return the total size of a complete checkpoint's files in bytes."""
    return sum(file["bytes"] for file in read_manifest(checkpoint)["files"].values())
