"""The Triton kernels agree with the definition of attention, in Triton's interpreter on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kitelib.backends.torch_engine.kernels.triton_attention import Shape, TritonAttention, choose_tile
from kitelib.backends.torch_engine.plan import StepPlan
from kitelib.errors import UnsupportedOptionError

CASES = Path(__file__).with_name("triton_interpreted.py")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("group", ["bits or spans", "not bits and not spans"])
def test_interpreted(group: str) -> None:
    """The cases of triton_interpreted.py, in a process of their own: the interpreter is chosen when triton loads."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=0", "-k", group, str(CASES)],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        cwd=CASES.parents[5],
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    assert int(passed[1]) >= 15
    assert "skipped" not in done.stdout


def shape(**changes: int) -> Shape:
    sizes = {"kv_heads": 8, "group": 4, "key_dim": 128, "value_dim": 128, "item_bytes": 2, **changes}
    return Shape(**sizes, windowed=False, capped=False)


def test_one_tile_for_all_work_in_mode_bitwise() -> None:
    for architecture in (80, 90):
        for dim in (64, 80, 128, 256):
            tiles = {
                choose_tile(shape(key_dim=dim), architecture=architecture, bitwise=True, single=single)
                for single in (False, True)
            }
            assert len(tiles) == 1


def test_large_groups_share_a_decode_tile() -> None:
    tile, group_tile = choose_tile(shape(kv_heads=1, group=20), architecture=90, bitwise=False, single=True)
    assert (tile.m, group_tile) == (32, 20)
    tile, group_tile = choose_tile(shape(kv_heads=1, group=71), architecture=90, bitwise=False, single=True)
    assert (tile.m, group_tile) == (64, 64)


def meta_plan(sequences: int, rows: int, context: int) -> StepPlan:
    """A plan whose tensors have sizes but no content."""

    def tensor(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=torch.int32, device="meta")

    total = sequences * rows
    return StepPlan(
        num_rows=total,
        num_sequences=sequences,
        max_rows=rows,
        max_context=context,
        row_starts=tensor(sequences + 1),
        contexts=tensor(sequences),
        tables=tensor(sequences, context // 16),
        slots=tensor(total),
        positions=tensor(total),
    )


@pytest.mark.parametrize("bitwise", [False, True])
def test_launches_depend_on_sizes_only(bitwise: bool) -> None:
    """So they need no look at the device, and a captured graph serves all contents."""
    kernel = TritonAttention(16, bitwise=bitwise, max_context=1 << 17, architecture=90)

    def programs(sequences: int, rows: int, context: int) -> tuple[str, int]:
        launch = kernel._plan_launch(shape(), meta_plan(sequences, rows, context), 0, torch.device("meta"))
        return launch.mode, launch.tiles * launch.head_tiles * launch.programs

    for sequences in (1, 16, 64):
        mode, count = programs(sequences, 1, 8192)
        assert mode == "partial"
        assert count >= 132, "decoding fills 132 multiprocessors"
    assert programs(1, 8192, 8192)[0] == ("combine" if bitwise else "whole")
    assert programs(1, 32, 8192)[0] == "partial", "a short piece of a long prompt is shared, too"


def test_large_heads_are_refused() -> None:
    with pytest.raises(UnsupportedOptionError, match="key dim 512"):
        choose_tile(shape(key_dim=512), architecture=90, bitwise=False, single=False)


def test_odd_blocks_are_refused() -> None:
    with pytest.raises(UnsupportedOptionError, match="block_tokens=24"):
        TritonAttention(24, bitwise=False, max_context=4096)


def test_importing_the_launcher_loads_no_triton() -> None:
    code = "import kitelib.backends.torch_engine.kernels.triton_attention, sys; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
