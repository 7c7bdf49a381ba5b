"""A conversation in which each turn computes only the new message, whatever the chat template does to history.

Run: python examples/conversation.py [model.gguf]      (default: the small model of the extra `demo`)
"""

import asyncio
import sys

from kitelib import KiteEngine
from kitelib.cli.options import resolve_model

TURNS = ["Hello, my name is Ada.", "What is the capital of Portugal?", "What is it famous for?"]


async def main(model: str) -> None:
    async with KiteEngine.open(model) as engine:
        conversation = engine.conversation(system="You are a friendly travel guide. Answer in one sentence.")
        for text in TURNS:
            gen = await conversation.send(text, max_tokens=40)
            computed = gen.usage.prompt_tokens - gen.usage.cached_tokens
            print(f"> {text}\n{gen.text}\n[{computed} of {gen.usage.prompt_tokens} prompt tokens computed]\n")


asyncio.run(main(resolve_model(sys.argv[1] if len(sys.argv) > 1 else "smollm2")))
