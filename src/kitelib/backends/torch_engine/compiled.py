"""Has the model's forward pass compiled in the background, and hands out the program once it is there.

Compiling takes a minute or more of one core, so another process does it (`compile_worker`), at the lowest priority;
steps run on the model itself meanwhile, and the result is kept for the next time. It pays because the compiler
rearranges the weights for its own matrix kernels and fuses what lies between them: a decode step of a small model takes
less than half the time.

Bits differ from those of the model itself, and between passes of different sizes, so this is for
``numerics="standard"`` only; and the program knows no adapters.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from kitelib.backends.torch_engine.program import (
    Program,
    ProgramRecord,
    failure_file,
    private_folder,
    program_folder,
)
from kitelib.errors import BackendError
from kitelib.runtime.limits import available_memory_bytes

if TYPE_CHECKING:
    import torch

    from kitelib.backends.torch_engine.packing import PackedStep

__all__ = ["CompiledDecode", "decode_step"]

_log = logging.getLogger(__name__)
_MIN_PARAMETERS = 20_000_000
"""Smaller models are over in a moment anyway."""
_WORKER_BYTES, _WORKER_COPIES = 3 * 2**30, 5
"""Memory of the compiling process: torch, transformers and the C++ compiler, and so many copies of the weights."""
_LIVE_BYTES = 512 * 2**20
"""Loading holds the GIL while weights are copied: a larger program waits for the next opening of the engine."""


_PAYING_ROWS = 128
"""Past it the model itself is as fast: 256 rows of SmolLM2 take 100 ms compiled, 88 not; 128 rows 39 and 72."""


class CompiledDecode:
    """The compiled program of one model, or the wait for it. Thread-safe.

    Args:
        opened: the `OpenedModel`; what the worker loads is opened again from the same files.
        cache_dir: the engine's cache folder; None means the user's.
        threads: that the program computes with.
        max_rows: most rows of a pass.
        experts: as of `open_model`.
        min_parameters: smaller models are left alone.
        niceness: by how much the compiling process steps back; 19 is the most.
    """

    def __init__(
        self,
        opened: Any,
        cache_dir: pathlib.Path | None,
        *,
        threads: int,
        max_rows: int = 256,
        experts: str | None = None,
        min_parameters: int = _MIN_PARAMETERS,
        niceness: int = 19,
    ) -> None:
        self._opened_path = pathlib.Path(opened.facts.path)
        self._job: dict[str, Any] = {
            "path": str(self._opened_path.resolve()),
            "model_state": opened.model_state.hex(),
            "dtype": str(opened.dtype).removeprefix("torch."),
            "kv_dtype": str(opened.kv_dtype).removeprefix("torch."),
            "experts": experts,
            "threads": threads,
            "max_rows": max_rows,
            "niceness": niceness,
        }
        self._max_rows = max_rows
        self._folder = program_folder(cache_dir, opened.model_state, threads, max_rows, experts)
        self._weight_bytes = sum(file.stat().st_size for file in opened.facts.files)
        self._too_small = self._weight_bytes < min_parameters * opened.dtype.itemsize
        self._program: Program | None = None
        self._state = "off"
        self._since = time.monotonic()
        self._worker: subprocess.Popen[bytes] | None = None
        self._watcher: threading.Thread | None = None
        self._closed = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Loads the program if it is in the cache, else has it made. Blocks only for the first (see `Program`)."""
        reason = self._refusal()
        if reason is None:
            if ProgramRecord.read(self._folder) is not None:
                self._load()
                return
            reason = self._worker_refusal()
        if reason is not None:
            self._note(reason)
            return
        try:
            private_folder(self._folder.parent)
            self._start_worker()
        except (OSError, BackendError) as error:
            self._note(f"not compiled: {error}")

    def ready(self, rows: int) -> Program | None:
        """The program, if it is there and takes so many rows; else None. Costs nothing."""
        program = self._program
        return program if program is not None and rows <= self._max_rows else None

    def wait(self, timeout_s: float) -> bool:
        """Blocks until the worker is done, at most `timeout_s` seconds; whether the program is there."""
        end = time.monotonic() + timeout_s
        while self._state == "compiling" and time.monotonic() < end:
            time.sleep(0.05)
        return self._program is not None

    def give_up(self, error: Exception) -> None:
        """The program failed in a step: it is not used again in this process."""
        self._program = None
        self._note(f"the compiled program failed and is not used any more: {error}")

    def stats(self) -> dict[str, Any]:
        """`state` ("off", "compiling", "ready", or a sentence that says why not), and what is known of the program."""
        program = self._program
        found: dict[str, Any] = {"state": self._state, "seconds_in_state": time.monotonic() - self._since}
        if program is not None:
            found |= {
                "compiled_bytes": program.record.library_bytes,
                "compile_s": program.record.compile_s,
                "speedup": program.record.speedup,
            }
        return found

    def close(self) -> None:
        """Ends the worker, if there is one, and forgets the program. Idempotent."""
        with self._lock:
            self._closed, worker = True, self._worker
        self._program = None
        if worker is not None and worker.poll() is None:
            # The end of its input is what it stops at, with all that it has started; see `compile_worker`.
            with contextlib.suppress(OSError):
                if worker.stdin is not None:
                    worker.stdin.close()
            try:
                worker.wait(5.0)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
        if self._watcher is not None:
            self._watcher.join(5.0)

    # -- inside

    def _refusal(self) -> str | None:
        if sys.platform != "linux":
            return "not compiled: only done on Linux"
        if self._too_small:
            return "not compiled: the model is so small that it would not pay"
        needed = int(1.2 * self._weight_bytes)
        if available_memory_bytes() < needed:
            return f"not compiled: a second copy of the weights ({needed / 2**30:.1f} GiB) does not fit into memory"
        return None

    def _worker_refusal(self) -> str | None:
        with contextlib.suppress(OSError):
            return f"not compiled: {failure_file(self._folder).read_text(encoding='utf-8')}"
        if not sys.executable:
            return "not compiled: this program does not tell where its Python is"
        compiler = os.environ.get("CXX", "g++").split()
        if not compiler or shutil.which(compiler[0]) is None:
            return "not compiled: there is no C++ compiler (Debian, Ubuntu: apt-get install g++)"
        needed = _WORKER_BYTES + _WORKER_COPIES * self._weight_bytes
        if available_memory_bytes() < needed:
            return f"not compiled: compiling takes {needed / 2**30:.0f} GiB of memory, and there is less"
        with contextlib.suppress(OSError):
            parent = next(place for place in self._folder.parents if place.exists())
            if shutil.disk_usage(parent).free < 2**30 + 3 * self._weight_bytes:
                return f"not compiled: there is too little space in {str(parent)!r}"
        return None

    def _start_worker(self) -> None:
        package = pathlib.Path(__file__).resolve().parents[3]
        environment = dict(os.environ)
        # Whoever measures kernels beside a working engine must not wait for spinning threads.
        environment |= {
            "GOMP_SPINCOUNT": "0",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(package), *filter(None, [environment.get("PYTHONPATH")])]),
            "HF_HUB_OFFLINE": "1",
        }
        job = json.dumps({**self._job, "folder": str(self._folder)})
        with self._lock:
            if self._closed:
                return
            self._worker = subprocess.Popen(  # noqa: S603 - this Python, our own module
                [sys.executable, "-m", "kitelib.backends.torch_engine.compile_worker", job],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                # Python looks for modules in the working directory first: here is nothing but our own.
                cwd=self._folder.parent,
                env=environment,
                start_new_session=True,  # a Ctrl-C at the terminal is for the application
            )
        self._set("compiling")
        self._watcher = threading.Thread(
            target=self._watch, args=(self._worker,), name="kite-compile-watch", daemon=True
        )
        self._watcher.start()

    def _watch(self, worker: subprocess.Popen[bytes]) -> None:
        assert worker.stderr is not None
        assert worker.stdin is not None
        with worker.stderr:
            said = worker.stderr.read()
        code = worker.wait()
        if self._closed:
            return
        worker.stdin.close()
        if code == 0 and (record := ProgramRecord.read(self._folder)) is not None:
            if record.library_bytes > _LIVE_BYTES:
                self._note("compiled; the program is used from the next opening of the engine on")
            else:
                self._load()
            return
        lines = said.decode("utf-8", "replace").strip().splitlines()
        self._note(f"not compiled: {lines[-1] if lines else f'the compiling process ended with status {code}'}")

    def _load(self) -> None:
        try:
            program = Program(self._folder)
        except BackendError as error:
            self._note(f"not compiled: {error}")
            return
        with self._lock:
            if self._closed:
                return
            self._program = program
        self._set("ready")
        _log.info("decode steps run compiled from now on (%.1f times as fast)", program.record.speedup)

    def _note(self, sentence: str) -> None:
        self._set(sentence)
        _log.info("%s: %s", self._opened_path.name, sentence)

    def _set(self, state: str) -> None:
        self._state, self._since = state, time.monotonic()


def decode_step(compiled: CompiledDecode, packed: PackedStep) -> torch.Tensor | None:
    """Logits (outputs, vocabulary) of a step without an adapter, inside of `use_step`; None if it can't be done. A step
    that wants none gets those of its first row."""
    import torch

    program = compiled.ready(packed.num_rows)
    if program is None or not len(packed.select):
        return None
    try:
        return program(
            torch.from_numpy(packed.ids)[None],
            torch.from_numpy(packed.positions)[None],
            torch.from_numpy(packed.select),
        )
    except RuntimeError as error:
        compiled.give_up(error)  # the KV that it wrote is written again
        return None
