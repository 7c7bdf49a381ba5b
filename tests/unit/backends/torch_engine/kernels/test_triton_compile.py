"""The Triton kernels compile for the devices they are meant for, without one at hand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kitelib.backends.torch_engine.kernels import triton_kernels
from kitelib.backends.torch_engine.kernels.triton_attention import (
    FIXED_SPAN,
    Mode,
    Shape,
    attend_constants,
    choose_tile,
)

SHARED_BYTES = {80: 99 << 10, 90: 227 << 10}
"""What one program may use. A100 has 163 KiB, its relatives of capability 86 and 89 have 99."""

LLAMA = Shape(kv_heads=8, group=4, key_dim=128, value_dim=128, item_bytes=2, windowed=False, capped=False)
GEMMA = Shape(kv_heads=4, group=2, key_dim=256, value_dim=256, item_bytes=2, windowed=True, capped=True)
PHI = Shape(kv_heads=32, group=1, key_dim=96, value_dim=96, item_bytes=2, windowed=True, capped=False)
SMALL = Shape(kv_heads=3, group=3, key_dim=64, value_dim=64, item_bytes=2, windowed=False, capped=False)
LATENT = Shape(kv_heads=16, group=1, key_dim=192, value_dim=128, item_bytes=2, windowed=False, capped=False)
EXACT = Shape(kv_heads=2, group=2, key_dim=80, value_dim=80, item_bytes=4, windowed=False, capped=False)

INDEX_TYPES = {"row_starts": "*i32", "contexts": "*i32", "tables": "*i32", "slots": "*i64"}
FLOAT_TYPES = {"partial": "*fp32", "partial_stats": "*fp32", "scale": "fp32", "inner_scale": "fp32"}
DATA = {"query", "key", "value", "key_pages", "value_pages", "out"}
DIVISIBLE = {"query_row", "query_head", "key_row", "key_head", "value_row", "value_head", "key_block", "value_block"}


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is taken from an earlier run."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(kernel: Any, constants: dict[str, Any], data: str, architecture: int, **options: Any) -> Any:
    """A kernel as the launcher would have it compiled: pointers and strides divisible by 16."""
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = f"*{data}" if name in DATA else {**INDEX_TYPES, **FLOAT_TYPES}.get(name, "i32")
        if name in DIVISIBLE or signature[name].startswith("*"):
            attributes[index,] = [["tt.divisibility", 16]]
    target = GPUTarget("cuda", architecture, 32)
    result = triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=options)
    assert f".target sm_{architecture}" in result.asm["ptx"]
    assert result.asm["cubin"][:4] == b"\x7fELF"
    assert result.metadata.shared <= SHARED_BYTES[architecture]
    return result


def compiled_attend(
    shape: Shape, architecture: int, mode: Mode, *, bitwise: bool, single: bool, data: str = "bf16"
) -> Any:
    tile, group_tile = choose_tile(shape, architecture=architecture, bitwise=bitwise, single=single)
    fixed_span = FIXED_SPAN if bitwise else 0
    constants = attend_constants(shape, 16, mode, single=single, fixed_span=fixed_span)
    constants |= {"group_tile": group_tile, "tile_m": tile.m, "tile_n": tile.n}
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": not bitwise}
    return compiled(triton_kernels.attend, constants, data, architecture, **options)


@pytest.mark.parametrize("architecture", [80, 90])
def test_decoding(architecture: int) -> None:
    """Keys and values travel 16 bytes at a time, past the registers, two steps ahead."""
    ptx = compiled_attend(LLAMA, architecture, "partial", bitwise=False, single=True).asm["ptx"]
    assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in ptx
    assert len(re.findall(r"cp\.async\.cg\.shared\.global.*0x10", ptx)) >= 16
    assert re.search(r"cp\.async\.wait_group\s+[1-9]", ptx)


@pytest.mark.parametrize("architecture", [80, 90])
def test_prefill(architecture: int) -> None:
    """Prompts use the matrix units that the device has."""
    ptx = compiled_attend(LLAMA, architecture, "whole", bitwise=False, single=False).asm["ptx"]
    assert ("wgmma.mma_async" if architecture == 90 else "mma.sync") in ptx


@pytest.mark.parametrize("architecture", [80, 90])
def test_bitwise(architecture: int) -> None:
    """Decoding and prefill use the same matrix instructions, and nothing is contracted."""
    instructions = []
    for mode, single in (("partial", True), ("combine", False)):
        ptx = compiled_attend(LLAMA, architecture, mode, bitwise=True, single=single).asm["ptx"]
        instructions.append(set(re.findall(r"wgmma\.mma_async[\w.]*|mma\.sync[\w.]*", ptx)))
        assert not re.search(r"\bfma\.rn\.f32", ptx)
    assert instructions[0] == instructions[1] != set()


@pytest.mark.parametrize(
    ("shape", "architecture", "mode", "bitwise", "single", "data"),
    [
        (GEMMA, 80, "partial", False, False, "bf16"),
        (GEMMA, 90, "partial", False, False, "bf16"),
        (GEMMA, 90, "partial", False, True, "bf16"),
        (GEMMA, 90, "combine", True, False, "fp16"),
        (PHI, 80, "whole", False, False, "fp16"),
        (SMALL, 90, "combine", True, False, "bf16"),
        (LATENT, 90, "whole", False, False, "bf16"),
        (EXACT, 90, "partial", False, True, "fp32"),
    ],
    ids=lambda value: str(value) if isinstance(value, str | int) else f"{value.key_dim}",
)
def test_shapes(shape: Shape, architecture: int, mode: Mode, bitwise: bool, single: bool, data: str) -> None:
    compiled_attend(shape, architecture, mode, bitwise=bitwise, single=single, data=data)


@pytest.mark.parametrize("architecture", [80, 90])
def test_helpers(architecture: int) -> None:
    pages = {
        "block_tokens": 16, "kv_heads": 8, "key_dim": 128, "value_dim": 128, "key_pad": 128, "value_pad": 128,
        "heads_tile": 8, "out_width": 4096, "out_tile": 1024,
    }  # fmt: skip
    ptx = compiled(triton_kernels.write_pages, pages, "bf16", architecture, num_warps=4, enable_fp_fusion=True).asm[
        "ptx"
    ]
    assert len(re.findall(r"st\.global(?:\.L1::\w+)?\.v4", ptx)) >= 2, "16 bytes at a time"
    spans = {
        "windowed": False, "num_heads": 32, "value_dim": 128, "value_pad": 128, "single": True,
        "fixed_span": FIXED_SPAN, "heads_tile": 4, "tile_n": 64,
    }  # fmt: skip
    ptx = compiled(
        triton_kernels.reduce, spans, "bf16", architecture, num_warps=4, enable_fp_fusion=False
    ).asm["ptx"]  # fmt: skip
    assert not re.search(r"\bfma\.rn\.f32", ptx)
