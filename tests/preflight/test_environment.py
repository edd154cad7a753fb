"""Preflight checks a machine's packages, shared memory, open-file limit and disks."""

import shutil
from pathlib import Path

from gpt2_repro.preflight.environment import Need, check_room


def test_needs_on_one_disk_are_added(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    one, other = Need("data", tmp_path / "not" / "there", 0.6 * free), Need("the run", tmp_path / "run", 0.6 * free)
    assert [finding.mark for finding in check_room([one])] == ["✓"]
    (both,) = check_room([one, other])
    assert both.mark == "✗" and str(one.folder) in both.text and str(other.folder) in both.text
    (tmp_path / "file").touch()
    assert [finding.mark for finding in check_room([Need("data", tmp_path / "file" / "below", 1)])] == ["✗"]
