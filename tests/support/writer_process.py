"""Another process that fills a tier: ``python -m tests.support.writer_process MODEL CACHE_DIR`` with the pool's options
and the prompts as JSON on standard input. Ends as soon as everything is in the tier."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from kitelib import KiteEngine, PoolConfig

__all__ = ["write_in_another_process"]


async def write_in_another_process(
    model: Path, cache_dir: Path, pool: dict[str, Any], prompts: list[list[int]], **options: Any
) -> None:
    """Has another process compute prompts with that pool, and waits for it. Options of the pool that are bytes get there
    as such.

    Raises:
        AssertionError: it failed; the message has what it printed.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.support.writer_process",
        str(model),
        str(cache_dir),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    request = json.dumps({"pool": pool, "prompts": prompts, "options": options}, default=_hex).encode()
    output, _ = await process.communicate(request)
    assert process.returncode == 0, output.decode(errors="replace")


def _hex(value: bytes) -> dict[str, str]:
    return {"hex": value.hex()}


def _plain(value: Any) -> Any:
    return bytes.fromhex(value["hex"]) if isinstance(value, dict) and list(value) == ["hex"] else value


async def _write(model: str, cache_dir: str, request: dict[str, Any]) -> None:
    given = {name: _plain(value) for name, value in request["pool"].items()}
    pool = PoolConfig(**{"memory_bytes": 10**8, "drain_seconds": 60, **given})
    opening = KiteEngine.open(model, threads=1, cache_dir=cache_dir, pool=pool, **request["options"])
    async with opening as engine:
        for prompt in request["prompts"]:
            await engine.generate(prompt, max_tokens=4, ignore_eos=True)


if __name__ == "__main__":
    asyncio.run(_write(sys.argv[1], sys.argv[2], json.load(sys.stdin)))
