"""How many threads a model gets: cores of this process, less one, within what a control group allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from kitelib.runtime import cores
from kitelib.runtime.cores import default_threads


def test_default_threads_leave_a_core_and_stay_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= default_threads() <= 8
    for usable, quota, expected in [(1, None, 1), (2, None, 1), (4, None, 3), (64, None, 8), (64, 2.5, 1), (8, 0.5, 1)]:
        monkeypatch.setattr(cores, "_physical_cores", lambda cpus, n=usable: n)
        monkeypatch.setattr(cores, "_cgroup_cpus", lambda q=quota: q)
        assert default_threads() == expected


def test_hardware_threads_of_one_core_count_once(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert cores._physical_cores({0, 1, 2, 3}, str(tmp_path)) == 2
    assert cores._physical_cores({0, 2}, str(tmp_path)) == 1
    assert cores._physical_cores({0, 9}, str(tmp_path)) == 2  # nothing known about 9


def test_the_tightest_cgroup_quota_counts(tmp_path: Path) -> None:
    proc, root = tmp_path / "cgroup", tmp_path / "fs"
    (root / "a" / "b").mkdir(parents=True)
    proc.write_text("0::/a/b\n")
    assert cores._cgroup_cpus(str(proc), str(root)) is None
    (root / "a" / "b" / "cpu.max").write_text("max 100000\n")
    (root / "a" / "cpu.max").write_text("250000 100000\n")
    assert cores._cgroup_cpus(str(proc), str(root)) == 2.5
    # Version 1: one hierarchy per controller.
    (root / "cpu,cpuacct" / "c").mkdir(parents=True)
    (root / "cpu,cpuacct" / "c" / "cpu.cfs_quota_us").write_text("150000\n")
    (root / "cpu,cpuacct" / "c" / "cpu.cfs_period_us").write_text("100000\n")
    proc.write_text("5:cpu,cpuacct:/c\n4:memory:/a\n")
    assert cores._cgroup_cpus(str(proc), str(root)) == 1.5
    assert cores._cgroup_cpus(str(tmp_path / "absent"), str(root)) is None
