"""Makes the bundles of the proof and writes down what they must give: `make_bundle.py MODEL FOLDER`, see run_aarch64.sh."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from pathlib import Path

from edge_runs import ASKED, COMPRESSED, EXPECTED, KNOWN, PLAIN, TEMPLATE, ask, identity, machine, opened, size_of

from kitelib.engine.bundle_prompts import BundlePrompt


async def make(model: str, folder: Path) -> None:
    prompts = [BundlePrompt(messages=KNOWN), BundlePrompt(messages=TEMPLATE, varying=True)]
    async with opened(model) as engine:
        for name, compression in ((PLAIN, "none"), (COMPRESSED, "entropy")):
            made = await engine.build_bundle(prompts, folder / name, compression=compression)
            units = ", ".join(f"{count} {kind}" for kind, count in made.units.items())
            print(f"      {name}: {size_of(folder / name)}, {units}, {made.tokens} tokens ({compression})")
        system = await engine.tokenize_chat(KNOWN[:1])
    async with opened(model) as engine:  # another one, with nothing in its memory
        cold = [await ask(engine, messages, cold=True) for messages in (KNOWN, ASKED)]
        loaded = await engine.preload(folder / PLAIN)
        known = await ask(engine, KNOWN)
        who = await identity(engine)
    async with opened(model) as engine:
        await engine.preload(folder / PLAIN)
        asked = await ask(engine, ASKED)
    # What this machine says is only worth comparing with if it is right.
    assert known.zero_prefill
    assert known.cached_tokens == known.prompt_tokens
    assert asked.tiers == {"bundle": asked.cached_tokens}
    # The stable prefix ends behind the system's message and before the question.
    assert len(system) - 8 < asked.cached_tokens < asked.prompt_tokens - 8, (len(system), asked)
    expected = {
        "machine": machine(),
        "identity": who,
        "loaded": {name: loaded[name] for name in ("units", "tokens", "digest")},
        "cold": [dataclasses.asdict(run) for run in cold],
        "known": dataclasses.asdict(known),
        "asked": dataclasses.asdict(asked),
    }
    (folder / EXPECTED).write_text(json.dumps(expected, indent=1), encoding="utf-8")
    for name, before, after in (("known", cold[0], known), ("asked", cold[1], asked)):
        print(
            f"      {name}: {after.cached_tokens} of {after.prompt_tokens} tokens from the bundle, TTFT "
            f"{after.ttft_s * 1e3:.1f} ms instead of {before.ttft_s * 1e3:.1f} ms: {after.text!r}"
        )


if __name__ == "__main__":
    asyncio.run(make(sys.argv[1], Path(sys.argv[2])))
