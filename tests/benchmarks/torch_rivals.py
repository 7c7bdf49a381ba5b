"""Who takes part: KITE in two modes, transformers in two modes, and vLLM in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from kitelib import KiteEngine, ReusePolicy

__all__ = ["Contestant", "Kite", "TransformersBatch", "TransformersContinuous", "Vllm", "default_vllm_python"]

Prompts = Sequence[Sequence[int]]
_MARKER = "@kite-bench@"


class Contestant(Protocol):
    """Answers prompts greedily, as fast as it can."""

    name: str

    async def answer(self, prompts: Prompts, max_tokens: int) -> float:
        """Seconds until all prompts, put at once, have their `max_tokens` tokens."""
        ...


class Kite:
    """An open engine."""

    def __init__(self, engine: Any, numerics: str) -> None:
        self.engine = engine
        self.name = f"KITE, {numerics}"

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, folder: str, threads: int, numerics: Any) -> AsyncIterator[Kite]:
        """KITE with its defaults but for threads and numerics."""
        policy = ReusePolicy(numerics=numerics)
        async with KiteEngine.open(folder, backend="torch", device="cpu", threads=threads, reuse=policy) as engine:
            yield cls(engine, numerics)

    async def answer(self, prompts: Prompts, max_tokens: int) -> float:
        begin = time.perf_counter()
        found = await asyncio.gather(
            *(
                self.engine.generate(list(each), max_tokens=max_tokens, ignore_eos=True, temperature=0)
                for each in prompts
            )
        )
        seconds = time.perf_counter() - begin
        assert all(len(each.token_ids) == max_tokens for each in found)
        return seconds

    async def first_token(self, prompt: Sequence[int]) -> tuple[float, int]:
        """Seconds to the first token, and the prompt tokens that were not computed."""
        begin, first, cached = time.perf_counter(), 0.0, 0
        async for chunk in self.engine.stream(list(prompt), max_tokens=1, ignore_eos=True, temperature=0):
            if chunk.token_ids and not first:
                first = time.perf_counter() - begin
            if chunk.generation is not None:
                cached = int(chunk.generation.usage.cached_tokens)
        return first, cached


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


class Vllm:
    """vLLM on the CPU, in its own environment and process, with prefix caching. Needs no network.

    Raises:
        RuntimeError: it does not start; says why.
    """

    name = "vLLM on CPU"

    def __init__(self, python: Path, folder: str, threads: int, max_sequences: int, log: Path) -> None:
        options = {
            "marker": _MARKER,
            "model": folder,
            "dtype": "bfloat16",
            "max_model_len": 2048,
            "max_num_seqs": max_sequences,
            "enable_prefix_caching": True,
        }
        hidden = ("GOMP_SPINCOUNT", "PYTHONPATH", "OMP_NUM_THREADS")  # it runs with its own settings
        environment = {name: value for name, value in os.environ.items() if name not in hidden} | {
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            # Its Python's folder first: the C++ compiler aside, it asks for tools of its environment.
            "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [str(python), str(Path(__file__).with_name("torch_vllm.py")), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_MARKER):
                found: dict[str, Any] = json.loads(line.removeprefix(_MARKER))
                return found
            self._log.write(line)
        raise RuntimeError(f"vLLM ended with status {self._process.wait()}; see {self._log.name}")

    async def answer(self, prompts: Prompts, max_tokens: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": [list(p) for p in prompts], "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()
        found = self._read()
        assert found["tokens"] == max_tokens * len(prompts)
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
