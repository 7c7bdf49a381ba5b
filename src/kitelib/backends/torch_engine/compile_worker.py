"""The process that compiles a model's forward pass: ``python -m kitelib.backends.torch_engine.compile_worker JOB``.

JOB is a JSON object made by `CompiledDecode`. The program appears in its folder in one piece or not at all. The process
ends, with all it started, when its standard input does: that is, when the engine is closed or its process is gone. The
last line on standard error says what went wrong.

One program serves every number of rows: the compiler keeps the sizes symbolic. Programs for fixed sizes would hold the
weights once each, and were not faster where that was tried.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import threading
import time
import zipfile
from typing import TYPE_CHECKING, Any

from kitelib.backends.torch_engine.plan import StepState, use_step
from kitelib.backends.torch_engine.program import (
    LIBRARY,
    OPERATIONS,
    RECORD,
    Program,
    ProgramRecord,
    failure_file,
)

if TYPE_CHECKING:
    import torch

    from kitelib.backends.torch_engine.forward import Forward

__all__ = ["CompileError", "compile_program", "main"]

_KEPT = 4
"""Programs in a cache folder; the oldest go first."""
_EXAMPLE_ROWS, _EXAMPLE_OUTPUTS = 16, 12  # what the compiler picks its kernels for; different, or it takes them for one
_TOLERANCE = {"float32": 2e-3, "bfloat16": 0.1, "float16": 0.05}
_TIMED_ROWS = 16


class CompileError(Exception):
    """This model can't be compiled here, or it does not pay: trying again is of no use."""


def main(arguments: list[str]) -> int:
    """Compiles; the exit status."""
    job = json.loads(arguments[0])
    _end_with_input()
    os.nice(job["niceness"])
    # If memory gets short nevertheless, this process has to go, not the engine.
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/oom_score_adj").write_text("1000")
    folder = pathlib.Path(job["folder"])
    logging.disable(logging.WARNING)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one at a time: each needs gigabytes
        if ProgramRecord.read(folder) is not None:
            return 0
        for stale in folder.parent.glob("build-*"):
            shutil.rmtree(stale, ignore_errors=True)
        build = pathlib.Path(tempfile.mkdtemp(prefix="build-", dir=folder.parent))
        try:
            _compile_job(job, build, folder)
        except CompileError as error:
            failure_file(folder).write_text(str(error), encoding="utf-8")
            sys.stderr.write(f"\n{error}\n")
            return 1
        except Exception as error:  # noqa: BLE001 - foreign code: anything may come out of it
            sys.stderr.write(f"\n{_one_line(error)}\n")
            return 1
        finally:
            shutil.rmtree(build, ignore_errors=True)
        _forget_old(folder)
    return 0


def _end_with_input() -> None:
    def watch() -> None:
        # Not `sys.stdin`: its lock, held by this thread at the end of the process, would abort it.
        while os.read(0, 4096):
            pass
        with contextlib.suppress(OSError):
            if os.getpgrp() == os.getpid():
                os.killpg(0, signal.SIGKILL)  # the C++ compiler too
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _compile_job(job: dict[str, Any], build: pathlib.Path, folder: pathlib.Path) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(build / "inductor")
    os.environ["TMPDIR"] = tempfile.tempdir = str(build)
    import torch

    from kitelib.backends.torch_engine.forward import Forward
    from kitelib.backends.torch_engine.opening import open_model

    torch.set_num_threads(job["threads"])
    opened = open_model(job["path"], dtype=job["dtype"], kv_dtype=job["kv_dtype"], experts=job["experts"])
    if opened.model_state.hex() != job["model_state"]:
        raise ValueError("the model's files have changed since the engine was opened")
    done = compile_program(Forward(opened.model, latent=False), build, max_rows=job["max_rows"])
    if folder.exists():
        shutil.rmtree(folder)
    done.rename(folder)


def compile_program(forward: Forward, build: pathlib.Path, *, max_rows: int) -> pathlib.Path:
    """Compiles the forward pass of a model on the CPU for the number of threads that torch has now.

    Args:
        forward: whose attention runs in a step; not latent.
        build: an empty folder.
        max_rows: most rows of a pass.

    Returns:
        A folder in `build` as `Program` loads it, checked against the model itself.

    Raises:
        CompileError: it fails, computes something else, or is not faster.
    """
    import torch

    begin = time.monotonic()
    package = build / "step.pt2"
    try:
        with torch.no_grad():
            exported = _export(forward, max_rows)
            torch._inductor.aoti_compile_and_package(
                exported, package_path=str(package), inductor_configs=_settings(forward)
            )
    except Exception as error:  # the compiler meets foreign code
        raise CompileError(f"the compiler failed: {_one_line(error)}") from error
    del exported
    target = build / "program"
    target.mkdir(mode=0o700)
    uses_amx = _unpack(package, target)
    package.unlink()
    compile_s = time.monotonic() - begin
    record = ProgramRecord(max_rows, (target / LIBRARY).stat().st_size, uses_amx, compile_s, 0.0)
    record.write(target)
    program = Program(target)
    _check(program, forward, max_rows)
    speedup = _speedup(program, forward)
    if speedup < 1.0:
        raise CompileError(f"the compiled program takes {1 / speedup:.2f} times as long as the model itself")
    ProgramRecord(max_rows, record.library_bytes, uses_amx, compile_s, round(speedup, 2)).write(target)
    return target


def _export(forward: Forward, max_rows: int) -> Any:
    import torch

    module_type: Any = torch.nn.Module

    class Step(module_type):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = forward.model  # so that its weights are found

        def forward(self, ids: torch.Tensor, positions: torch.Tensor, select: torch.Tensor) -> torch.Tensor:
            return forward.logits(ids, positions, select)

    ids, positions, _ = _inputs(forward, _EXAMPLE_ROWS)
    rows = torch.export.Dim("rows", min=2, max=max_rows)
    outputs = torch.export.Dim("outputs", min=2, max=max_rows)
    return torch.export.export(
        Step().eval(),
        (ids, positions, torch.arange(_EXAMPLE_OUTPUTS)),
        dynamic_shapes={"ids": {1: rows}, "positions": {1: rows}, "select": {0: outputs}},
        strict=False,
    )


def _settings(forward: Forward) -> dict[str, Any]:
    import torch

    dtype = next(forward.model.parameters()).dtype
    # With AMX the compiler's own kernels won on every shape tried, but beside busy processes its measurements pick others.
    sure = dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    return {
        "freezing": True,
        "max_autotune": True,
        "max_autotune_gemm_backends": "CPP" if sure else "CPP,ATEN",
    }


def _unpack(package: pathlib.Path, target: pathlib.Path) -> bool:
    """Takes the library and its list of operations out of the package; whether the code uses AMX."""
    uses_amx = False
    found = {}
    with zipfile.ZipFile(package) as archive:
        for name in archive.namelist():
            if name.endswith(".cpp"):
                uses_amx |= b"amx" in archive.read(name)
            elif name.endswith(".so"):
                found[LIBRARY] = name
        found[OPERATIONS] = found[LIBRARY].removesuffix(".so") + ".json"
        for wanted, name in found.items():
            with archive.open(name) as source, (target / wanted).open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    return uses_amx


# -- checks


class _NoPages:
    """Stands for the cache: the checks keep nothing."""

    class _Everything:
        def __getitem__(self, layer: int) -> Any:
            return self

        latent = False

    layers = _Everything()

    def keys(self, _layer: int) -> None:
        return None

    values = keys


class _Causal:
    """Attention among the rows of a pass, as if they were one text."""

    name = "causal"
    row_invariant = False

    def attend(self, query: Any, key: Any, value: Any, _keys: Any, _values: Any, _plan: Any, **options: Any) -> Any:
        from torch.nn.functional import scaled_dot_product_attention

        q, k, v = (each.transpose(0, 1)[None] for each in (query, key, value))
        found = scaled_dot_product_attention(q, k, v, is_causal=True, scale=options["scale"], enable_gqa=True)
        return found[0].transpose(0, 1).contiguous()


def _inputs(forward: Forward, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    import torch

    generator = torch.Generator().manual_seed(rows)
    vocabulary = forward.model.config.get_text_config().vocab_size
    ids = torch.randint(0, vocabulary, (1, rows), generator=generator)
    return ids, torch.arange(rows)[None], torch.arange(rows)


def _state() -> StepState:
    nothing: Any = None  # nobody asks for a plan
    cache: Any = _NoPages()
    kernel: Any = _Causal()
    return StepState(nothing, cache, kernel)


def _check(program: Program, forward: Forward, max_rows: int) -> None:
    import torch

    for rows in sorted({1, 2, 3, 7, 16, 33, max_rows} & set(range(1, max_rows + 1))):
        inputs = _inputs(forward, rows)
        with torch.inference_mode(), use_step(_state()):
            found, wanted = program(*inputs), forward.logits(*inputs)
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            raise CompileError(f"the compiled program gives {tuple(found.shape)}, not {tuple(wanted.shape)}")
        error = (found.double() - wanted.double()).norm() / wanted.double().norm()
        limit = _TOLERANCE[str(wanted.dtype).removeprefix("torch.")]
        if not error <= limit:
            raise CompileError(f"the compiled program is off by {float(error):.1e} of {rows} rows' logits")


def _speedup(program: Program, forward: Forward) -> float:
    """Best time of the model itself over that of the program; they take turns, because the machine is busy."""
    import torch

    inputs = _inputs(forward, _TIMED_ROWS)
    runs: list[Any] = [forward.logits, program]
    best = [float("inf"), float("inf")]
    with torch.inference_mode(), use_step(_state()):
        for _ in range(8):
            for which, run in enumerate(runs):
                begin = time.perf_counter()
                run(*inputs)
                best[which] = min(best[which], time.perf_counter() - begin)
    return best[0] / best[1]


def _forget_old(folder: pathlib.Path) -> None:
    programs = [record.parent for record in folder.parent.glob(f"*/{RECORD}")]
    programs.sort(key=lambda each: (each / RECORD).stat().st_mtime, reverse=True)
    for old in programs[_KEPT:]:
        if old != folder:
            shutil.rmtree(old, ignore_errors=True)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
