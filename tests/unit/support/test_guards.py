"""The guards of the suite fire: empty test files, blocking calls on the loop, the measured gap of the loop."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from blockbuster import BlockingError

from tests.support.event_loop import MeasureLoopGap

ROOT = Path(__file__).resolve().parents[3]


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    plugins = ["-p", "tests.support.collection", "-p", "no:cacheprovider"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        "/dev/null",
        f"--rootdir={folder}",
        *plugins,
        str(folder),
        *arguments,
    ]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("text", ["", "def check_addition():\n    assert True\n", "class TestNothing:\n    pass\n"])
def test_file_without_a_test_fails_the_run(tmp_path: Path, text: str) -> None:
    (tmp_path / "test_good.py").write_text("def test_good():\n    pass\n")
    (tmp_path / "test_empty.py").write_text(text)
    done = run_pytest(tmp_path)
    assert done.returncode != 0
    assert "test_empty.py" in done.stdout + done.stderr
    assert "test_good.py," not in done.stdout + done.stderr


def test_choosing_tests_by_name_is_no_empty_file(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text("def test_one():\n    pass\n")
    (tmp_path / "test_two.py").write_text("class TestTwo:\n    def test_two(self):\n        pass\n")
    done = run_pytest(tmp_path, "-k", "test_one")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed, 1 deselected" in done.stdout


def call_from_package(code: str) -> Callable[[], object]:
    """A function that the guard takes for one of kitelib's, which it knows by the file a function was compiled from."""
    names: dict[str, object] = {"time": time, "Path": Path}
    exec(compile(f"def call():\n    return {code}\n", str(ROOT / "src" / "kitelib" / "example.py"), "exec"), names)
    call = names["call"]
    assert callable(call)
    return call


@pytest.mark.parametrize("code", ["time.sleep(0.001)", f"Path({str(ROOT / 'LICENSE')!r}).read_bytes()"])
async def test_blocking_call_of_the_package_on_the_loop_fails(code: str) -> None:
    call = call_from_package(code)
    with pytest.raises(BlockingError):
        call()
    await asyncio.to_thread(call)  # where it belongs


async def test_loop_gap_sees_a_blocked_loop(loop_gap: MeasureLoopGap) -> None:
    async with loop_gap() as gap:
        time.sleep(0.2)
    assert gap.longest_s >= 0.15
    assert gap.longest_cpu_s < gap.longest_s


async def test_loop_gap_sees_a_computing_loop(loop_gap: MeasureLoopGap) -> None:
    async with loop_gap() as gap:
        end = time.thread_time() + 0.1
        while time.thread_time() < end:
            pass
    assert gap.longest_cpu_s >= 0.09


async def test_loop_gap_counts_turns_while_the_loop_is_free(loop_gap: MeasureLoopGap) -> None:
    async with loop_gap() as gap:
        await asyncio.sleep(0.05)
    assert gap.turns > 2


async def test_loop_gap_leaves_out_collecting_what_was_there_before(loop_gap: MeasureLoopGap) -> None:
    frozen = gc.get_freeze_count()
    async with loop_gap():
        assert gc.get_freeze_count() > frozen + 10_000
    assert gc.get_freeze_count() == 0
