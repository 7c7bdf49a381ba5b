"""A program that is restarted: the second engine starts from what the first one left on the disk, bit for bit.

Run: python examples/restart.py [model.gguf] [folder]      (default: the small model of the extra `demo`, a new folder)

Give a folder to see it across two runs of this program: then the first engine of the second run is warm too.
"""

import asyncio
import sys
import tempfile

from kitelib import KiteEngine, PoolConfig
from kitelib.cli.options import resolve_model

PROMPT = """The ferry leaves Pier 2 at 9:15, 11:40, 14:05 and 17:30, and comes back an hour later. A ticket costs 12 euros,
for children 5 euros, and bicycles travel free. In winter there is no ferry on Mondays. Dogs wear a muzzle on board.
Question: When does the last ferry leave? Answer: The last ferry leaves at"""


async def visit(model: str, folder: str) -> list[int]:
    async with KiteEngine.open(model, pool=PoolConfig(disk=folder, disk_bytes=2**30)) as engine:
        gen = await engine.generate(PROMPT, max_tokens=8)
        used = gen.usage
        print(f"{gen.text.strip()}\n[{used.cached_tokens} of {used.prompt_tokens} prompt tokens reused, ", end="")
        print(f"first token after {gen.timing.ttft_s * 1000:.0f} ms]")
    # Closing waits until what was computed is on the disk.
    return gen.token_ids


async def main(model: str, folder: str) -> None:
    first = await visit(model, folder)
    second = await visit(model, folder)
    assert first == second


with tempfile.TemporaryDirectory() as new:
    model = resolve_model(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
    asyncio.run(main(model, sys.argv[2] if len(sys.argv) > 2 else new))
