"""Many customers at the same moment, all behind the same instructions, which are computed once.

`preheat` reads the instructions before the first customer comes. Shows also what a server needs: a deadline per
request, and an answer when the engine is overloaded. With `pool=PoolConfig(disk="folder")` the instructions would
outlive the program: see restart.py.

Run: python examples/support_bot.py [model.gguf]      (default: the small model of the extra `demo`)
"""

import asyncio
import sys

from kitelib import EngineOverloadedError, KiteEngine
from kitelib.cli.options import resolve_model

INSTRUCTIONS = """You answer customers of the bicycle shop Spoke & Chain in one short sentence.
Open Tuesday to Saturday, 10:00 to 18:30. A puncture is repaired while you wait for 12 euros. A yearly service costs
69 euros and takes two days. Rental bicycles cost 15 euros a day, children's bicycles 8 euros, helmets are free.
Used bicycles are bought on Thursdays. Spare parts can be ordered by phone."""

QUESTIONS = [
    "Are you open on Mondays?",
    "What does it cost to fix a flat tyre?",
    "Can I rent a bicycle for my son?",
    "How long does a service take?",
    "Do I have to bring a helmet?",
    "When can I sell you my old bicycle?",
]


async def answer(engine: KiteEngine, question: str) -> str:
    messages = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": question}]
    try:
        gen = await engine.chat(messages, max_tokens=32, deadline=60)
    except EngineOverloadedError:
        return f"{question}\n    Many people are asking right now, please try again in a minute."
    used = gen.usage
    return f"{question}\n    {gen.text}\n    [{used.cached_tokens} of {used.prompt_tokens} prompt tokens reused]"


async def main(model: str) -> None:
    async with KiteEngine.open(model) as engine:
        await engine.preheat([[{"role": "system", "content": INSTRUCTIONS}]])
        for line in await asyncio.gather(*(answer(engine, question) for question in QUESTIONS)):
            print(line)


asyncio.run(main(resolve_model(sys.argv[1] if len(sys.argv) > 1 else "smollm2")))
