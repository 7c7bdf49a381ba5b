"""How many threads a model computes with where nobody said."""

from __future__ import annotations

import os
import pathlib

__all__ = ["default_threads"]

_MOST_THREADS = 8


def default_threads() -> int:
    """Compute threads for a library that shares its machine: usable cores less one, from 1 to 8.

    A usable core is a physical one that this process may run on (affinity, cgroup CPU quota). Second hardware
    threads don't count: matrix kernels saturate the units that two of them share. One core stays with the host
    application and its event loop, because every step waits for its slowest thread: a thread that has to share its
    core slows all others down. Past 8 threads, decoding is bound by memory bandwidth on most machines.
    """
    usable = _physical_cores(_affinity())
    quota = _cgroup_cpus()
    if quota is not None:
        usable = min(usable, int(quota))
    return max(1, min(_MOST_THREADS, usable - 1))


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _physical_cores(cpus: set[int], root: str = "/sys/devices/system/cpu") -> int:
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
        entries = [line.split(":", 2) for line in pathlib.Path(proc).read_text().splitlines()]
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
