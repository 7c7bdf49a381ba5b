"""The CUDA kernels of the adapters, run by Triton's interpreter, and compiled for the GPUs that are meant."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")


def test_cases_hold_in_the_interpreter() -> None:
    cases = Path(__file__).with_name("lora_interpreted.py")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", str(cases)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert "5 passed" in run.stdout


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_kernels_compile_without_a_device(
    capability: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget

    from kitelib.backends.torch_engine.kernels import triton_lora

    types: dict[str, Any] = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
    sizes: dict[str, Any] = {"dtype": types[dtype], "tile_rows": 16, "rank_step": 16}
    pointers = {
        "x": f"*{dtype}", "out": f"*{dtype}", "partial": "*fp32", "factors": "*fp32", "ranks": "*i32",
        "tile_first": "*i32", "tile_rows_of": "*i32", "tile_adapters": "*i32", "addresses": "*i64",
    }  # fmt: skip
    for kernel, more in (
        (triton_lora.shrink, {"feature_step": 64}),
        (triton_lora.expand, {"width": 64, "pieces": 8, "precision": "ieee" if dtype == "fp32" else "tf32"}),
    ):
        constants = {**sizes, **more}
        signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in kernel.arg_names}
        source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants)
        compiled = triton.compile(
            source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4, "enable_fp_fusion": False}
        )
        assert "mma" in compiled.asm["ptx"] or dtype == "fp32"
