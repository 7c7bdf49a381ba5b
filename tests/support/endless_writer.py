"""Another process that fills tiers until it is killed: ``python -m tests.support.endless_writer`` with what it needs as
JSON on standard input. It prints the number of each prompt that it has computed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kitelib import KiteEngine, PoolConfig

__all__ = ["endless_writer"]


@contextlib.contextmanager
def endless_writer(
    model: Path, cache_dir: Path, pool: dict[str, Any], prompts: list[list[int]], **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Computes prompts in another process, at the end from the first one on, after forgetting them all. Whatever happens
    inside, the process is killed."""
    command = [sys.executable, "-m", "tests.support.endless_writer"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    request = {"model": str(model), "cache_dir": str(cache_dir), "pool": pool, "prompts": prompts, "options": options}
    process.stdin.write(json.dumps(request).encode())
    process.stdin.close()
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


async def _write(request: dict[str, Any]) -> None:
    pool = PoolConfig(**request["pool"])
    opening = KiteEngine.open(
        request["model"], threads=1, cache_dir=request["cache_dir"], pool=pool, **request["options"]
    )
    async with opening as engine:
        while True:
            for number, prompt in enumerate(request["prompts"]):
                await engine.generate(prompt, max_tokens=2, ignore_eos=True)
                print(number, flush=True)
            await engine.invalidate()


if __name__ == "__main__":
    asyncio.run(_write(json.load(sys.stdin)))
