"""How much memory this process may really use: the machine's, and that of every control group around it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

__all__ = ["available_memory_bytes", "default_pool_bytes"]

_FALLBACK_BYTES: Final = 2**30  # where nothing can be read: small enough for a phone
_POOL_SHARE: Final = 4
_ANDROID_RESERVE: Final = 8  # of all memory, one part in so many stays free


def default_pool_bytes() -> int:
    """A quarter of the available memory: the default bound of the in-process tier, bytes."""
    return available_memory_bytes() // _POOL_SHARE


def available_memory_bytes(
    *, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup"), android: bool | None = None
) -> int:
    """Bytes that this process can still take before the machine or a control group runs out; never negative.

    The least of the machine's available memory and, for this process's control group and each one above it (versions
    1 and 2), the limit less what is in use; page cache that the kernel would drop first (``inactive_file``) does not
    count as in use. Where the system tells neither (Windows, macOS): half of the physical memory, or 1 GiB.

    Android lets apps read the machine's memory but not their control groups, and ends them well before nothing is
    left: an eighth of the whole memory does not count as available there.

    Args:
        proc: where procfs is mounted.
        cgroup: where the control groups are mounted.
        android: whether this is Android; None means to find out.
    """
    bounds = [_machine_bytes(proc, android=_is_android() if android is None else android), *_cgroup_bytes(proc, cgroup)]
    return max(0, min(bounds))


def _is_android() -> bool:
    # Before Python 3.13 the platform is "linux" there as well; the system sets the variable for every app.
    return sys.platform == "android" or "ANDROID_ROOT" in os.environ


def _machine_bytes(proc: Path, *, android: bool) -> int:
    fields = _fields(proc / "meminfo")
    reserve = fields.get("MemTotal:", 0) // _ANDROID_RESERVE if android else 0
    for name in ("MemAvailable:", "MemFree:"):  # kernels before 3.14 have only the second
        if name in fields:
            return (fields[name] - reserve) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):
        return _FALLBACK_BYTES


def _cgroup_bytes(proc: Path, cgroup: Path) -> Iterator[int]:
    """What each control group around this process still has room for; nothing for those without a limit."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        hierarchy, controllers, path = [*line.split(":", 2), "", ""][:3]
        if hierarchy == "0" and not controllers:
            for mount in (cgroup, cgroup / "unified"):  # the second on systems that run both versions
                for folder in _upwards(mount, path):
                    yield from _room(folder, ("memory.max", "memory.high"), "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            for folder in _upwards(cgroup / "memory", path):
                yield from _room(folder, ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """The folder of a control group and of those above it, up to and including the mount.

    Inside a container the path may be that of the host, which is not there; the mount then is the container's own
    group, so the walk still ends at the limit that counts.
    """
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    for count in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:count])


def _room(folder: Path, limits: tuple[str, ...], usage: str, reclaimable: str) -> Iterator[int]:
    used = _number(folder / usage)
    if used is None:
        return
    for name in limits:
        limit = _number(folder / name)
        if limit is not None:  # "max" and missing files mean no limit; version 1 says it with a huge number
            yield limit - max(0, used - _fields(folder / "memory.stat").get(reclaimable, 0))


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _fields(path: Path) -> dict[str, int]:
    """First two words of each line, where the second is a number."""
    pairs = (line.split() for line in _text(path).splitlines())
    return {words[0]: int(words[1]) for words in pairs if len(words) >= 2 and words[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="surrogateescape")  # a group's name may be any bytes
    except OSError:
        return ""
