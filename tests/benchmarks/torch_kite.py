"""KITE as a process that answers lines, like torch_vllm.py: an engine shares no OpenMP workers with its rivals.

Reads one JSON object per line, {"prompts": [[token, ...], ...], "max_tokens": n}, and answers with a line that begins
with the marker: {"seconds": s, "tokens": n, "cached": prompt tokens that were not computed}.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from kitelib import KiteEngine, ReusePolicy


async def main() -> None:
    options = json.loads(sys.argv[1])
    marker, numerics = options.pop("marker"), options.pop("numerics")
    policy = ReusePolicy(numerics=numerics)
    async with KiteEngine.open(options.pop("model"), backend="torch", device="cpu", reuse=policy, **options) as engine:
        print(marker, json.dumps({"ready": True, "numerics": engine.stats()["numerics"]}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(marker, json.dumps(await answer(engine, json.loads(line))), flush=True)


async def answer(engine: KiteEngine, job: dict[str, Any]) -> dict[str, Any]:
    begin = time.perf_counter()
    found = await asyncio.gather(
        *(
            engine.generate(prompt, max_tokens=job["max_tokens"], ignore_eos=True, temperature=0)
            for prompt in job["prompts"]
        )
    )
    seconds = time.perf_counter() - begin
    return {
        "seconds": seconds,
        "tokens": sum(len(each.token_ids) for each in found),
        "cached": sum(each.usage.cached_tokens for each in found),
    }


if __name__ == "__main__":
    asyncio.run(main())
