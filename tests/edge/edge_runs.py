"""The requests of the proof on another architecture, and what each of them gave: see run_aarch64.sh."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from kitelib import Generation, KiteEngine, ReusePolicy
from kitelib.yoco import compute_computation_fingerprint

PLAIN = "cockpit.kite"
COMPRESSED = "cockpit-small.kite"
EXPECTED = "expected.json"

_SYSTEM = {
    "role": "system",
    "content": (
        "You are the voice assistant of a small electric car. Answer in one short sentence. The car has heated seats, "
        "a glass roof that tilts, four electric windows, a rear camera and a charging port on the left side. The "
        "windows are opened with the switches in the doors, the roof with the slider above the mirror. Never give "
        "directions while the car moves faster than ten kilometres per hour."
    ),
}


def _chat(question: str) -> list[dict[str, str]]:
    return [_SYSTEM, {"role": "user", "content": question}]


KNOWN = _chat("How do I open the windows?")
"""A prompt that the bundle has as a whole."""

TEMPLATE = _chat("{{question}}")
"""Of this the bundle has what comes before the question."""

ASKED = _chat("On which side is the charging port?")
"""A prompt of the template that was never computed before."""

TOKENS = 6
TOP = 5

TOLERANCE = 0.4
"""Log-probabilities of two architectures may differ by this much where one of them computes: with 4-bit weights, kernels
round the 8-bit activations that they multiply with at different places. Cold runs differ by 0.21 (AVX-512, NEON)."""

SAME = 1e-5
"""And by this much where all comes out of the bundle: only the softmax over its logits is computed."""

Top = list[tuple[int, float]]
"""Token ids and their natural-log probabilities, the most probable first."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What a request gave.

    Attributes:
        tokens: the greedy answer, `TOKENS` token ids or fewer.
        top: for each of them the `TOP` most probable.
        ttft_s: seconds to the first token.
    """

    prompt_tokens: int
    cached_tokens: int
    zero_prefill: bool
    tiers: dict[str, int]
    text: str
    tokens: list[int]
    top: list[Top]
    ttft_s: float

    @classmethod
    def of(cls, gen: Generation) -> Run:
        assert gen.logprobs is not None
        return cls(
            prompt_tokens=gen.usage.prompt_tokens,
            cached_tokens=gen.usage.cached_tokens,
            zero_prefill=gen.reuse.zero_prefill,
            tiers=dict(gen.reuse.tiers),
            text=gen.text,
            tokens=list(gen.token_ids),
            top=[sorted(each.items(), key=lambda item: -item[1])[:TOP] for each in gen.logprobs],
            ttft_s=gen.timing.ttft_s,
        )

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Run:
        """From what `dataclasses.asdict` gave, by way of JSON."""
        return cls(**{**fields, "top": [[(int(token), value) for token, value in top] for top in fields["top"]]})


@contextlib.asynccontextmanager
async def opened(model: str) -> AsyncIterator[KiteEngine]:
    """An engine for portable bundles that remembers nothing of earlier runs, digests included."""
    cache = tempfile.mkdtemp()
    try:
        policy = ReusePolicy(numerics="standard")
        async with KiteEngine.open(
            model, threads=1, n_ctx=512, max_sequences=2, reuse=policy, cache_dir=cache
        ) as engine:
            yield engine
    finally:
        shutil.rmtree(cache)


async def ask(
    engine: KiteEngine, messages: Sequence[dict[str, str]], *, cold: bool = False, tokens: int = TOKENS
) -> Run:
    """Answers greedily; `cold` neither takes nor leaves anything."""
    policy = ReusePolicy(mode="off") if cold else None
    return Run.of(await engine.chat(messages, max_tokens=tokens, temperature=0.0, logprobs=TOP, reuse=policy))


async def identity(engine: KiteEngine) -> dict[str, Any]:
    """What fingerprints are made of, and those of the two prompts."""
    model, runtime = engine.fingerprint_configs()
    found = {
        "model state": model["model_state"].hex(),
        **{f"execution path: {name}": str(value) for name, value in runtime.items()},
    }
    for name, messages in (("known", KNOWN), ("asked", ASKED)):
        ids = await engine.tokenize_chat(messages)
        found[f"fingerprint of the {name} prompt"] = compute_computation_fingerprint(ids, model, runtime)
    return found


def machine() -> str:
    return platform.machine()


def size_of(path: Path) -> str:
    return f"{path.stat().st_size / 2**20:.2f} MiB"
