"""Who takes part: transformers in two modes, KITE in two modes and vLLM, each of these in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

__all__ = [
    "VLLM",
    "Contestant",
    "Served",
    "TransformersBatch",
    "TransformersContinuous",
    "default_vllm_python",
    "kite",
    "vllm",
]

VLLM = "vLLM on CPU"

Prompts = Sequence[Sequence[int]]
_MARKER = "@kite-bench@"


class Contestant(Protocol):
    """Answers prompts greedily, as fast as it can."""

    name: str

    async def answer(self, prompts: Prompts, max_tokens: int) -> float:
        """Seconds until all prompts, put at once, have their `max_tokens` tokens."""
        ...


class TransformersBatch:
    """`generate` of one padded batch (all prompts have the same length here, so there is no padding to pay for)."""

    name = "transformers generate"

    def __init__(self, model: Any) -> None:
        self._model = model

    async def answer(self, prompts: Prompts, max_tokens: int) -> float:
        import torch

        ids = torch.tensor([list(each) for each in prompts])
        begin = time.perf_counter()
        with torch.inference_mode():
            found = self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - begin
        assert found.shape[1] == ids.shape[1] + max_tokens
        return seconds


class TransformersContinuous:
    """`generate_batch`: transformers' paged cache and continuous batching."""

    name = "transformers continuous batching"

    def __init__(self, model: Any) -> None:
        self._model = model

    async def answer(self, prompts: Prompts, max_tokens: int) -> float:
        from transformers import GenerationConfig

        config = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        begin = time.perf_counter()
        found = self._model.generate_batch(
            inputs=[list(each) for each in prompts], generation_config=config, progress_bar=False
        )
        seconds = time.perf_counter() - begin
        lengths = [len(each.generated_tokens) for each in found.values()]
        assert lengths == [max_tokens] * len(prompts), f"tokens made: {lengths}"
        return seconds


def default_vllm_python() -> Path:
    """``$VLLM_PYTHON``, else that of the environment in the cache folder."""
    named = os.environ.get("VLLM_PYTHON")
    return Path(named) if named else Path("~/.cache/kite/vllm-venv/bin/python").expanduser()


class Served:
    """A contestant in a process of its own, which runs one of the scripts beside this file.

    Args:
        name: as the table calls it.
        python: its Python.
        script: the file.
        options: for the script.
        environment: variables on top of this process's; its OpenMP settings are not handed on.
        log: file for what it prints.

    Raises:
        RuntimeError: it does not start; says why.
    """

    def __init__(
        self, name: str, python: Path, script: str, options: dict[str, Any], environment: dict[str, str], log: Path
    ) -> None:
        self.name = name
        self.cached = 0
        hidden = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")  # it runs with its own settings
        inherited = {name: value for name, value in os.environ.items() if name not in hidden}
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [str(python), str(Path(__file__).with_name(script)), json.dumps({"marker": _MARKER, **options})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=inherited | environment,
        )
        self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARKER):
                found: dict[str, Any] = json.loads(line.removeprefix(_MARKER))
                return found
            self._log.write(line)
        raise RuntimeError(f"{self.name} ended with status {self._process.wait()}; see {self._log.name}")

    async def answer(self, prompts: Prompts, max_tokens: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": [list(p) for p in prompts], "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()
        found = self._read()
        assert found["tokens"] == max_tokens * len(prompts)
        self.cached = found.get("cached", 0)
        return float(found["seconds"])

    def close(self) -> None:
        """Ends the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()


def kite(folder: str, threads: int, numerics: str, log: Path) -> Served:
    """KITE with its defaults but for threads and numerics."""
    options = {"model": folder, "threads": threads, "numerics": numerics}
    return Served(f"KITE, {numerics}", Path(sys.executable), "torch_kite.py", options, {}, log)


def vllm(python: Path, folder: str, threads: int, max_sequences: int, log: Path) -> Served:
    """vLLM on the CPU, in its own environment, with prefix caching. Needs no network."""
    options = {
        "model": folder,
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "max_num_seqs": max_sequences,
        "enable_prefix_caching": True,
    }
    environment = {
        "PYTHONPATH": "",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # Its Python's folder first: the C++ compiler aside, it asks for tools of its environment.
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    return Served(VLLM, python, "torch_vllm.py", options, environment, log)
