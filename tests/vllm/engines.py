"""Engines in processes of their own, and prompts for them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.vllm.models import BLOCK

__all__ = ["Engine", "EngineError", "open_engine", "prompt", "transfer_config"]

_ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 20.0


class EngineError(Exception):
    """The engine did not start, or died; holds the end of what it said."""


def transfer_config(pool: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """The configuration that attaches the connector."""
    return {
        "kv_connector": "KiteConnector",
        "kv_connector_module_path": "kitelib.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        # Machines that run tests may be busy: what is stored is to be found however long that takes.
        "kv_connector_extra_config": {"pool": dict(pool), "patience_seconds": PATIENCE_S, **options},
    }


class Engine:
    """One engine; its methods are those of `tests.vllm.engine_process.Server`."""

    def __init__(self, options: Mapping[str, Any], log: Path) -> None:
        self._marker = uuid.uuid4().hex
        self._log = log
        code = json.dumps({**options, "marker": self._marker})
        paths = [str(_ROOT), str(_ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.engine_process", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=_ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            )
        try:
            self._answer()
        except EngineError:
            self.close()
            raise

    def __getattr__(self, name: str) -> Any:
        return lambda **job: self._ask({"do": name, **job})

    def _ask(self, job: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(self._marker):
                answer = json.loads(line.removeprefix(self._marker))
                if "error" in answer:
                    self._process.wait()
                    raise EngineError(answer["error"])
                return answer["answer"]
        self._process.wait()
        raise EngineError(self._log.read_text(errors="replace")[-4000:])

    def close(self) -> None:
        """Ends the process as vLLM ends, so that what is on its way is written."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()


@contextlib.contextmanager
def open_engine(model: Path, log: Path, transfer: Mapping[str, Any] | None = None, **options: Any) -> Iterator[Engine]:
    """An engine in float32, in which no two ways to compute differ enough to change a greedy answer."""
    settings: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "block_size": BLOCK,
        "num_gpu_blocks_override": 256,
        "max_num_batched_tokens": 1024,
        "disable_log_stats": False,
        **options,
    }
    if transfer is not None:
        settings["kv_transfer_config"] = dict(transfer)
    engine = Engine(settings, log)
    try:
        yield engine
    finally:
        engine.close()


def prompt(seed: int, num_tokens: int, prefix: Sequence[int] = ()) -> list[int]:
    """Random tokens after a prefix."""
    rng = random.Random(seed)
    return [*prefix, *(rng.randrange(2, 512) for _ in range(num_tokens - len(prefix)))]
