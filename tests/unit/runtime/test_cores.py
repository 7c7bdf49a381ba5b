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


# Capacities of real chips, little cores first as Linux numbers them.
PHONES = {
    "four big, four little": ([250] * 4 + [870] * 3 + [1024], 4),
    "two big, six little": ([414] * 6 + [1024] * 2, 2),
    "three classes": ([330] * 4 + [700] * 4 + [1024], 5),
    "all alike": ([1024] * 4, 3),
    "near enough": ([800] * 6 + [1024] * 2, 7),
    "one core": ([1024], 1),
}


def machine(root: Path, file: str, speeds: list[int]) -> None:
    for cpu, speed in enumerate(speeds):
        path = root / f"cpu{cpu}" / file
        path.parent.mkdir(parents=True)
        path.write_text(f"{speed}\n")


@pytest.mark.parametrize("file", ["cpu_capacity", "cpufreq/cpuinfo_max_freq"])
@pytest.mark.parametrize("name", list(PHONES))
def test_slow_cores_of_a_phone_compute_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, name: str
) -> None:
    speeds, expected = PHONES[name]
    machine(tmp_path, file, speeds)
    of_root = {each: getattr(cores, each) for each in ("_fast", "_physical_cores")}
    for each, function in of_root.items():
        monkeypatch.setattr(cores, each, lambda cpus, f=function: f(cpus, str(tmp_path)))
    monkeypatch.setattr(cores, "_affinity", lambda: set(range(len(speeds))))
    monkeypatch.setattr(cores, "_cgroup_cpus", lambda: None)
    assert default_threads() == expected
    monkeypatch.setattr(cores, "_cgroup_cpus", lambda: 2.0)
    assert default_threads() == 1


def test_a_cpu_that_tells_no_speed_makes_all_count(tmp_path: Path) -> None:
    machine(tmp_path, "cpu_capacity", [250, 250, 1024])
    assert cores._fast({0, 1, 2}, str(tmp_path)) == {2}
    assert cores._fast({0, 1}, str(tmp_path)) == {0, 1}  # pinned to the little ones
    (tmp_path / "cpu1" / "cpu_capacity").write_text("")
    assert cores._fast({0, 1, 2}, str(tmp_path)) == {0, 1, 2}
    assert cores._fast({0, 1, 2, 7}, str(tmp_path / "none")) == {0, 1, 2, 7}


def test_a_list_of_groups_that_may_not_be_read_is_no_limit(tmp_path: Path) -> None:
    (tmp_path / "cgroup").mkdir()  # as unreadable as a file on Android is, also for root
    assert cores._cgroup_cpus(str(tmp_path / "cgroup"), str(tmp_path)) is None
    (tmp_path / "listed").write_bytes(b"3:cpuset:/top-app\n0::/uid_10123/\xff\n")
    assert cores._cgroup_cpus(str(tmp_path / "listed"), str(tmp_path / "none")) is None
