from pathlib import Path

import pytest

from kitelib.runtime.limits import available_memory_bytes, default_pool_bytes

GIB = 2**30
MEMINFO = "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\n"


@pytest.fixture
def machine(tmp_path):
    """A machine with 8 GiB available; `write` puts files under its /proc and its control groups."""

    class Machine:
        proc = tmp_path / "proc"
        cgroup = tmp_path / "cgroup"

        def write(self, path: Path, text: str) -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

        def available(self) -> int:
            return available_memory_bytes(proc=self.proc, cgroup=self.cgroup)

        def v2(self, group: str, limit: str, current: int, inactive: int = 0, high: str = "max") -> None:
            folder = self.cgroup / group
            self.write(folder / "memory.max", f"{limit}\n")
            self.write(folder / "memory.high", f"{high}\n")
            self.write(folder / "memory.current", f"{current}\n")
            self.write(folder / "memory.stat", f"anon 77\nfile {inactive}\ninactive_file {inactive}\n")

    machine = Machine()
    machine.write(machine.proc / "meminfo", MEMINFO)
    return machine


def test_without_control_groups_it_is_what_the_machine_has(machine):
    assert machine.available() == 8 * GIB


def test_old_kernels_have_only_free_memory(machine):
    machine.write(machine.proc / "meminfo", "MemTotal:       16777216 kB\nMemFree:         1048576 kB\n")
    assert machine.available() == GIB


def test_the_own_group_limits(machine):
    machine.write(machine.proc / "self/cgroup", "0::/user/app\n")
    machine.v2("user/app", str(2 * GIB), GIB)
    assert machine.available() == GIB


def test_page_cache_that_goes_first_is_not_in_use(machine):
    machine.write(machine.proc / "self/cgroup", "0::/app\n")
    machine.v2("app", str(2 * GIB), GIB, inactive=GIB // 2)
    assert machine.available() == GIB + GIB // 2


def test_a_group_above_may_be_tighter(machine):
    machine.write(machine.proc / "self/cgroup", "0::/pod/app/worker\n")
    machine.v2("pod/app/worker", "max", GIB // 4)
    machine.v2("pod/app", str(4 * GIB), GIB)
    machine.v2("pod", str(2 * GIB), GIB + GIB // 2)
    assert machine.available() == GIB // 2


def test_a_group_that_is_throttled_earlier_counts_from_there(machine):
    machine.write(machine.proc / "self/cgroup", "0::/app\n")
    machine.v2("app", str(4 * GIB), GIB, high=str(2 * GIB))
    assert machine.available() == GIB


@pytest.mark.parametrize("name", ["租户", "a:b", "with space", b"\xff".decode("utf-8", "surrogateescape")])
def test_a_group_may_have_any_name(machine, name):
    listed = machine.proc / "self/cgroup"
    listed.parent.mkdir(parents=True)
    listed.write_bytes(f"0::/{name}\n".encode("utf-8", "surrogateescape"))
    machine.v2(name, str(GIB), 0)
    assert machine.available() == GIB


def test_a_limit_above_the_machine_does_not_make_it_bigger(machine):
    machine.write(machine.proc / "self/cgroup", "0::/app\n")
    machine.v2("app", str(100 * GIB), 0)
    assert machine.available() == 8 * GIB


@pytest.mark.parametrize("path", ["/docker/0123abcd", "/../../elsewhere", "/"])
def test_inside_a_container_the_mount_is_the_own_group(machine, path):
    """The kernel names the host's path, which is not there; the limit sits at the mount."""
    machine.write(machine.proc / "self/cgroup", f"0::{path}\n")
    machine.v2(".", str(GIB), GIB // 4)
    assert machine.available() == GIB * 3 // 4


def test_version_one(machine):
    machine.write(
        machine.proc / "self/cgroup", "11:cpu,cpuacct:/app\n4:memory:/app/worker\n1:name=systemd:/app\n0::/\n"
    )
    worker, app = machine.cgroup / "memory/app/worker", machine.cgroup / "memory/app"
    machine.write(worker / "memory.limit_in_bytes", "9223372036854771712\n")
    machine.write(worker / "memory.usage_in_bytes", f"{GIB}\n")
    assert machine.available() == 8 * GIB
    machine.write(app / "memory.limit_in_bytes", f"{3 * GIB}\n")
    machine.write(app / "memory.usage_in_bytes", f"{2 * GIB}\n")
    machine.write(app / "memory.stat", f"inactive_file 5\ntotal_inactive_file {GIB}\n")
    assert machine.available() == 2 * GIB


def test_both_versions_at_once(machine):
    machine.write(machine.proc / "self/cgroup", "4:memory:/\n0::/app\n")
    machine.v2("unified/app", str(GIB), 0)
    assert machine.available() == GIB


def test_a_group_over_its_limit_leaves_nothing(machine):
    machine.write(machine.proc / "self/cgroup", "0::/app\n")
    machine.v2("app", str(GIB), 2 * GIB)
    assert machine.available() == 0


@pytest.mark.parametrize("text", ["", "garbage", "0:", "0::", "::::", "4:memory\n"])
def test_unreadable_lists_of_groups_are_no_limit(machine, text):
    machine.write(machine.proc / "self/cgroup", text)
    machine.write(machine.cgroup / "memory.max", "a lot")
    assert machine.available() == 8 * GIB


def test_android_ends_apps_before_its_memory_is_used_up(machine):
    found = available_memory_bytes(proc=machine.proc, cgroup=machine.cgroup, android=True)
    assert found == 8 * GIB - 16 * GIB // 8
    machine.write(machine.proc / "meminfo", "MemTotal:        4194304 kB\nMemAvailable:     262144 kB\n")
    assert available_memory_bytes(proc=machine.proc, cgroup=machine.cgroup, android=True) == 0


def test_android_is_known_by_its_environment(machine, monkeypatch):
    monkeypatch.setenv("ANDROID_ROOT", "/system")
    assert machine.available() == 6 * GIB


def test_groups_that_may_not_be_read_are_no_limit(machine):
    (machine.proc / "self/cgroup").mkdir(parents=True)  # as unreadable as a file on Android is, also for root
    assert machine.available() == 8 * GIB


def test_systems_without_procfs_give_something_safe(tmp_path):
    found = available_memory_bytes(proc=tmp_path / "none", cgroup=tmp_path / "none")
    assert 2**26 <= found <= 2**45


def test_this_machine():
    total = next((line for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line), None)
    assert total is not None
    assert 0 < default_pool_bytes() <= int(total.split()[1]) * 1024 // 4
