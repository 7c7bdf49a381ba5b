"""A device whose storage can't be written, in a car or a kiosk: what is there is used, nothing is written, and one note
says so."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.file_systems import mounted, remounted

MIB = 2**20
ASK = """
import anyio, json, sys
from kitelib import KiteEngine, PoolConfig
async def main():
    async with KiteEngine.open(sys.argv[1], threads=1, n_ctx=512, pool=PoolConfig(disk=sys.argv[2])) as engine:
        known = await engine.generate(list(range(100, 180)), max_tokens=2)
        new = await engine.generate([int(sys.argv[3]) + n for n in range(80)], max_tokens=2)
        with anyio.fail_after(60):
            while not {"written", "dropped"} & {name for name, count in engine.stats()["pool"]["disk"].items() if count}:
                await anyio.sleep(0.02)
            await engine.pool.settle()
        stats = engine.stats()
        print(json.dumps({"cached": known.usage.cached_tokens, "tokens": [known.token_ids, new.token_ids],
                          "notes": stats["notes"], "disk": stats["pool"]["disk"]}))
anyio.run(main)
"""
Device = tuple[Path, Path]


def ask(folder: Path, first: int, pool: str = "pool") -> dict[str, Any]:
    """What an engine on the device says, whose home, caches and temporary files are there too."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("XDG_")}
    there = {"HOME": str(folder / "home"), "TMPDIR": str(folder / "home"), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(folder / "model.gguf"), str(folder / pool), str(first)],
        env=env | there | {"PYTHONDONTWRITEBYTECODE": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def listing(folder: Path) -> list[tuple[str, int, int]]:
    return sorted((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*"))


@pytest.fixture
def device(tmp_path: Path, tiny_model: Callable[..., Path]) -> Iterator[Device]:
    """A small file system with a model, a home, and what one engine left in its disk tier; and a writable twin."""
    twin = tmp_path / "twin"
    with mounted(tmp_path / "device", 64 * MIB) as folder:
        for each in (folder, twin):
            (each / "home").mkdir(parents=True)
            shutil.copy(tiny_model("llama"), each / "model.gguf")
        ask(folder, 500)
        yield folder, twin


def assert_served(folder: Path, twin: Path, reason: str) -> None:
    expected = ask(twin, 700)
    for _ in range(2):
        found = ask(folder, 700)
        assert found["cached"] > 0
        assert found["tokens"] == expected["tokens"]
        about = [note for note in found["notes"] if "disk" in note and reason in note]
        assert len(about) == 1, found["notes"]
        assert (found["disk"]["written"], found["disk"]["dropped"] > 0) == (0, True)
        assert found["disk"]["breaker"] == "closed"
    assert not any("disk" in note for note in expected["notes"])


def test_on_a_read_only_file_system(device: Device) -> None:
    folder, twin = device
    before = listing(folder)
    remounted(folder, "ro")
    try:
        assert_served(folder, twin, "Read-only file system")
        assert ask(folder, 700, pool="absent")["cached"] == 0
        assert listing(folder) == before
    finally:
        remounted(folder, "rw")


def test_on_a_full_file_system(device: Device) -> None:
    folder, twin = device
    filled = subprocess.run(
        ["dd", "if=/dev/zero", f"of={folder / 'filler'}", "bs=4k"], capture_output=True, check=False
    )
    assert b"No space left" in filled.stderr
    assert_served(folder, twin, "No space left")
