"""The lock file fits the requirements."""

import importlib.metadata

import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.commands import ROOT


def requirements_in(name: str) -> dict[str, Requirement]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(text) for line in lines if (text := line.partition("#")[0].strip())]
    return {canonicalize_name(one.name): one for one in requirements}


def test_the_lock_file_has_every_package_in_one_allowed_version() -> None:
    locked, requested = requirements_in("requirements.lock"), requirements_in("requirements.txt")
    versions = {name: str(one.specifier).removeprefix("==") for name, one in locked.items()}
    assert all(str(one.specifier).startswith("==") for one in locked.values())
    todo = [one for one in requested.values() if one.marker is None or one.marker.evaluate()]
    assert all(one.specifier.contains(versions[name], prereleases=True) for name, one in requested.items())
    for one in todo:  # the closure: `todo` grows
        name = canonicalize_name(one.name)
        assert one.specifier.contains(versions[name], prereleases=True), f"{one} but {versions[name]} is locked"
        if name == "torch" and torch.version.cuda is not None:
            continue  # torch for GPUs pins its packages itself; the lock file has torch for CPUs
        for text in importlib.metadata.requires(name) or []:
            need = Requirement(text)
            extras = [{"extra": extra} for extra in ("", *one.extras)]
            if need.marker is None or any(need.marker.evaluate(extra) for extra in extras):
                todo += [need] if str(need) not in map(str, todo) else []
