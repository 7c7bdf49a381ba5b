"""How many threads a model computes with where nobody said."""

from __future__ import annotations

import os
import pathlib

__all__ = ["default_threads"]

_MOST_THREADS = 8
_CPUS = "/sys/devices/system/cpu"


def default_threads() -> int:
    """Compute threads for a library that shares its machine: its fast cores, but one less than there are, from 1 to 8.

    A core is a physical one that this process may run on (affinity, cgroup CPU quota). Second hardware threads don't
    count: matrix kernels saturate the units that two of them share. Every step waits for its slowest thread, so cores
    of less than half the speed of the fastest don't count either where the system tells (big.LITTLE phones), and one
    core stays with the host application and its event loop: a thread that has to share its core slows all others
    down. Where there are slow cores, the application has those. Past 8 threads, decoding is bound by memory bandwidth
    on most machines.
    """
    cpus = _affinity()
    usable = _physical_cores(cpus)
    quota = _cgroup_cpus()
    if quota is not None:
        usable = min(usable, int(quota))
    return max(1, min(_MOST_THREADS, _physical_cores(_fast(cpus)), usable - 1))


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _fast(cpus: set[int], root: str = _CPUS) -> set[int]:
    """Those with at least half the capacity, or else the highest clock rate, of the fastest; all if it is not known of
    each."""
    for file in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        speeds = {cpu: _number(pathlib.Path(root, f"cpu{cpu}", file)) for cpu in cpus}
        if all(speeds.values()):
            most = max(speeds.values())
            return {cpu for cpu, speed in speeds.items() if 2 * speed >= most}
    return cpus


def _number(path: pathlib.Path) -> int:
    """The number in a file; 0 if there is none."""
    try:
        text = path.read_text(errors="replace").strip()
    except OSError:
        return 0
    return int(text) if text.isdecimal() else 0


def _physical_cores(cpus: set[int], root: str = _CPUS) -> int:
    """Distinct cores behind logical CPUs; CPUs whose siblings are unknown count as a core each."""
    cores = set()
    for cpu in cpus:
        try:
            cores.add(pathlib.Path(root, f"cpu{cpu}/topology/thread_siblings_list").read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return len(cores)


def _cgroup_cpus(proc: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> float | None:
    """CPUs allowed by the tightest cgroup quota on the way up to the root (v2 and v1); None if unlimited."""
    try:
        entries = [line.split(":", 2) for line in pathlib.Path(proc).read_text(errors="surrogateescape").splitlines()]
    except OSError:
        return None
    limits = []
    for _, controllers, group in (entry for entry in entries if len(entry) == 3):
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = pathlib.Path(root, controllers) if controllers else pathlib.Path(root)
        folder = base / group.strip("/")
        for level in (folder, *folder.parents):
            limits.append(_quota(level))
            if level == base:
                break
    return min((limit for limit in limits if limit is not None), default=None)


def _quota(folder: pathlib.Path) -> float | None:
    """Quota over period of one cgroup folder, in CPUs."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        return float(quota) / float(period) if quota not in ("max", "-1") else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
