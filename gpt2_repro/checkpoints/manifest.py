"""Write, read and verify the manifests of checkpoints.

A checkpoint is complete if its manifest.json is intact and matches the files.
"""

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


def seal(folder: Path, files: dict[str, dict[str, Any]], **facts: Any) -> int:
    """Flush all files of a staging folder to disk, then write the manifest. Return the files' total size in bytes.

    `facts` are further entries. `files` has `bytes` and `sha256` of the files that are already hashed and flushed.
    """
    all_files = dict(files)
    for path in sorted(folder.rglob("*")):
        if path.name.startswith(SILLY_RENAME):
            continue
        name = str(path.relative_to(folder))
        if path.is_dir():
            sync(path)
        elif path.is_file() and name not in files:
            size = path.stat().st_size
            all_files[name] = {"bytes": size, "sha256": sha256_of(path)}
            sync(path)
    # The model card of final/ is written later, so the manifest does not list it.
    facts["files"] = dict(sorted(all_files.items()))
    manifest = json.loads(to_json(facts))
    manifest["sha256"] = manifest_hash(manifest)
    text = json.dumps(manifest, indent=1)
    write_whole(folder / CHECKPOINT_MANIFEST, text)
    sync(folder)
    return _total_size(manifest)


def defect(checkpoint: Path, *, read_files: bool = False) -> str | None:
    """Return why a checkpoint or final/ is not complete, or None if it is.

    By default, only the sizes of its files are checked.
    """
    files = read_manifest(checkpoint).get("files")
    if files is None:
        return "its manifest is missing or damaged"
    for name, expected in files.items():
        path = checkpoint / name
        is_whole = path.is_file() and path.stat().st_size == expected["bytes"]
        if not is_whole:
            return f"{name} is missing or cut short"
    if not read_files:
        return None
    paths = [checkpoint / name for name in files]
    with ThreadPool(8) as pool:  # in contrast to a ThreadPoolExecutor, it does not delay an interrupt
        hashes = pool.imap(sha256_of, paths)
        for name, sha256 in zip(files, hashes, strict=True):
            if sha256 != files[name]["sha256"]:
                return f"{name} is damaged"
    return None


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint or final/, or {} if missing or damaged."""
    return intact_manifest(read_object(checkpoint / CHECKPOINT_MANIFEST))


def intact_manifest(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return a manifest, or {} if it is damaged."""
    files = manifest.get("files")
    identity = manifest.get("run_identity", {})
    if not isinstance(files, dict) or not isinstance(identity, dict):
        return {}
    for file in files.values():
        if not isinstance(file, dict) or "bytes" not in file or "sha256" not in file:
            return {}
    if manifest.get("sha256") != manifest_hash(manifest):
        return {}
    return manifest


def manifest_hash(manifest: dict[str, Any]) -> str:
    """Return the sha256 of all entries of a manifest except its entry `sha256`."""
    content = dict(manifest)
    content.pop("sha256", None)
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def training_record(checkpoint: Path) -> TrainingRecord | None:
    """Return how the weights in a `final/` or `checkpoint-N` were trained, or None."""
    manifest = read_manifest(checkpoint)
    if "environment" not in manifest:  # a checkpoint-N uses the environment of its run
        run_directory = checkpoint.parent
        environment = read_object(run_directory / layout.ENVIRONMENT)
        if not environment or "run_identity" not in manifest:
            return None
        environment["run_identity"] = manifest["run_identity"]
        step = layout.step_of(checkpoint)
        manifest["environment"] = environment
        manifest["step"] = step
        averaged = (checkpoint / layout.AVERAGED_WEIGHTS).is_file()  # which `load_model` loads
        manifest["averaged"] = averaged
        manifest["losses"] = events.model_losses(run_directory / layout.METRICS, step, averaged=averaged)
    if "run_identity" not in manifest["environment"]:
        return None
    losses: dict[str, Any] = {}
    for key, loss in manifest.get("losses", {}).items():
        if loss is not None:
            losses[key] = loss
    manifest["losses"] = losses
    try:
        return from_json(TrainingRecord, manifest)
    except ValueError:
        return None


def checkpoint_size(checkpoint: Path) -> int:
    """Return the total size of a complete checkpoint's files in bytes, or 0 if its manifest is missing or damaged."""
    return _total_size(read_manifest(checkpoint))


def _total_size(manifest: dict[str, Any]) -> int:
    size = 0
    for file in manifest.get("files", {}).values():
        size += file["bytes"]
    return size
