"""Uses the bundles of the proof on another machine and checks what they give: `use_bundle.py MODEL FOLDER`, see
run_aarch64.sh. Needs nothing but kitelib[lite]; exits with status 1 if anything differs."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from edge_runs import (
    ASKED,
    COMPRESSED,
    EXPECTED,
    KNOWN,
    PLAIN,
    SAME,
    TOLERANCE,
    TOP,
    Run,
    Top,
    ask,
    identity,
    machine,
    opened,
    size_of,
)

from kitelib import Bundle
from kitelib.native.library import native_library


class Checks:
    """Says what was checked, and remembers what failed."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def check(self, what: str, good: bool, detail: str = "") -> None:
        print(f"      {'ok ' if good else 'BAD'} {what}{f': {detail}' if detail else ''}")
        if not good:
            self.failed.append(what)

    def equal(self, what: str, found: Any, wanted: Any) -> None:
        self.check(what, found == wanted, str(found) if found == wanted else f"{found}, not {wanted}")


def difference(found: Top, wanted: Top) -> float:
    """By how much two lists of the most probable ids differ, in natural-log probability.

    That is the largest difference of an id in both lists; an id in only one of them differs by at least what it is above
    the end of the other list.
    """
    values, others = dict(found), dict(wanted)
    assert len(values) == len(others) == TOP
    both = [abs(values[each] - others[each]) for each in values.keys() & others.keys()]
    lost = [others[each] - found[-1][1] for each in others.keys() - values.keys()]
    new = [values[each] - wanted[-1][1] for each in values.keys() - others.keys()]
    return max(both + lost + new) if both else math.inf


def compare(checks: Checks, name: str, found: Run, expected: dict[str, Any], tolerance: float) -> None:
    """The answer: cached tokens, first token, its top ids, and the greedy continuation."""
    wanted = Run.read(expected)
    checks.equal(f"{name}: cached_tokens of {found.prompt_tokens}", found.cached_tokens, wanted.cached_tokens)
    checks.equal(f"{name}: prompt tokens by tier", found.tiers, wanted.tiers)
    checks.equal(f"{name}: first token", found.tokens[0], wanted.tokens[0])
    worst = difference(found.top[0], wanted.top[0])
    ids = [each for each, _ in found.top[0]]
    checks.check(
        f"{name}: top {TOP} of the logits, within {tolerance:g}", worst <= tolerance, f"{ids} within {worst:.2g}"
    )
    at = next((at for at, token in enumerate(wanted.tokens) if found.tokens[at : at + 1] != [token]), None)
    if at is None:
        checks.equal(f"{name}: greedy continuation", found.tokens, wanted.tokens)
    else:  # where two tokens are equally probable but for rounding, either may come, and what follows is another text
        gap = wanted.top[at][0][1] - dict(wanted.top[at]).get(found.tokens[at], -math.inf)
        checks.check(f"{name}: greedy continuation", gap <= TOLERANCE, f"{at} tokens, then two within {gap:.2g}")


async def use(model: str, folder: Path) -> list[str]:
    expected = json.loads((folder / EXPECTED).read_text(encoding="utf-8"))
    checks = Checks()
    checks.check("another architecture", machine() != expected["machine"], f"{expected['machine']} -> {machine()}")
    native = native_library() is not None
    print(f"          KITE's native part: {'built' if native else 'not built, so codecs run in Python'}")
    started = time.monotonic()
    async with opened(model) as engine:
        print(f"          model opened and identified in {time.monotonic() - started:.1f} s; now a cold run, slowly")
        found = await identity(engine)
        for name, value in expected["identity"].items():
            checks.equal(name, found.get(name), value)
        cold = [await ask(engine, messages, cold=True, tokens=1) for messages in (KNOWN, ASKED)]
        started = time.monotonic()
        loaded = await engine.preload(folder / PLAIN)
        preload_ms = 1e3 * (time.monotonic() - started)
        checks.equal("preload", {name: loaded[name] for name in expected["loaded"]}, expected["loaded"])
        known = await ask(engine, KNOWN)
    compare(checks, "known prompt", known, expected["known"], SAME)
    async with opened(model) as engine:  # an engine for each, or else some of it would come from the context
        await engine.preload(folder / PLAIN)
        asked = await ask(engine, ASKED)
    compare(checks, "prompt of the template", asked, expected["asked"], TOLERANCE)
    async with opened(model) as engine:
        await engine.preload(folder / COMPRESSED)
        small = await ask(engine, KNOWN)
    compare(checks, "known prompt, compressed bundle", small, expected["known"], SAME)
    for name in (PLAIN, COMPRESSED):
        with Bundle.open(folder / name) as bundle:
            checks.equal(f"{name}: damaged of {len(bundle.units)} units", len(bundle.check()), 0)
    apart = [difference(run.top[0], Run.read(each).top[0]) for run, each in zip(cold, expected["cold"], strict=True)]
    print(
        f"          without any bundle the top {TOP} differ by up to {max(apart):.2g} from those of {expected['machine']}"
    )
    print(f"          preload of {size_of(folder / PLAIN)}: {preload_ms:.1f} ms")
    for name, before, after in (("known prompt", cold[0], known), ("prompt of the template", cold[1], asked)):
        print(
            f"          {name}: TTFT {after.ttft_s:.2f} s with the bundle, {before.ttft_s:.2f} s without: {after.text!r}"
        )
    print(f"          known prompt, compressed bundle ({size_of(folder / COMPRESSED)}): TTFT {small.ttft_s:.2f} s")
    return checks.failed


if __name__ == "__main__":
    failures = asyncio.run(use(sys.argv[1], Path(sys.argv[2])))
    sys.exit(f"      failed: {'; '.join(failures)}" if failures else 0)
