"""The same prompt twice: first computed and streamed, then answered from what the first left behind.

Run: python examples/generate_and_stream.py [model.gguf]      (default: the small model of the extra `demo`)
"""

import asyncio
import sys

from kitelib import KiteEngine
from kitelib.cli.options import resolve_model

PROMPT = "The old lighthouse at the end of the pier was"


async def main(model: str) -> None:
    async with KiteEngine.open(model) as engine:
        async for chunk in engine.stream(PROMPT, max_tokens=24):
            print(chunk.text, end="", flush=True)
        print()

        gen = await engine.generate(PROMPT, max_tokens=24)
        print(gen.text)
        print(f"{gen.usage.cached_tokens} of {gen.usage.prompt_tokens} prompt tokens reused. {gen.reuse.note}")


asyncio.run(main(resolve_model(sys.argv[1] if len(sys.argv) > 1 else "smollm2")))
