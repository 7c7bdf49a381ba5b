"""The section against the batched server: the same traffic to both, one after the other for each request."""

from __future__ import annotations

from typing import Any

from lite_bench import Bench, ask, ask_together, quiet
from lite_report import median
from lite_server import ServerPeer, scratch_folder

__all__ = ["server"]

_SECTION = "server"


async def server(bench: Bench) -> None:
    """Cold, warm, alternating, full hit, multi-turn, simultaneous and restart, against the server over HTTP."""
    if bench.server is None:
        bench.report.missing(
            _SECTION,
            "all figures",
            "server or its environment not found: give --peer-server and --peer-python, or --set-up-peer",
        )
        return
    script, python = bench.server
    with scratch_folder() as folder:

        def start() -> ServerPeer:
            # Twice KITE's context: the server keeps what it knows there and should not be short of room.
            cells = 2 * bench.num_context_tokens
            return ServerPeer(script, python, bench.model, bench.threads, folder, num_context_tokens=cells)

        peer = start()
        try:
            peer.complete(bench.prompts.prompt(40), 4)
            bench.report.add(_SECTION, "an empty HTTP round trip", [peer.round_trip() for _ in range(9)])
            async with bench.engine() as engine:
                prefixes = await _prefixes(bench, engine, peer)
                await _multi_turn(bench, engine, peer)
                await _simultaneous(bench, engine, peer)
            peer.close()
            peer = start()
            peer.complete(bench.prompts.prompt(40), 4)
            _restart(bench, peer, prefixes)
        finally:
            peer.close()


def _both(bench: Bench, what: str, kite: list[float], rival: list[float], note: str = "") -> None:
    mine = bench.report.add(_SECTION, f"{what}: KITE", kite, note=note)
    theirs = bench.report.add(_SECTION, f"{what}: server", rival)
    bench.report.factor(_SECTION, f"{what}: KITE over the server", theirs / mine)


async def _prefixes(bench: Bench, engine: Any, peer: ServerPeer) -> list[list[int]]:
    """Cold, warm, alternating and full hit; returns prompts that both have seen."""
    sizes = bench.sizes
    prefixes = [bench.prompts.prompt(sizes.prefix_tokens) for _ in range(max(2, sizes.num_prefixes // 2))]

    async def traffic(prompts: list[list[int]]) -> tuple[list[float], list[float]]:
        kite, rival = [], []
        for prompt in prompts:
            kite.append((await ask(engine, prompt)).ttft_s)
            await quiet()
            rival.append(peer.ttft(prompt))
        return kite, rival

    first = [bench.question(prefix) for prefix in prefixes]
    _both(bench, "cold, TTFT", *await traffic(first))
    await quiet(0.5)
    again = [bench.question(prefixes[-1]) for _ in range(sizes.repeats)]
    _both(bench, "same prefix, TTFT", *await traffic(again))
    in_turn = [bench.question(prefix) for prefix in prefixes * 3]
    kite, rival = await traffic(in_turn)
    note = f"slowest: KITE {max(kite) * 1e3:.0f} ms, server {max(rival) * 1e3:.0f} ms"
    _both(bench, f"{len(prefixes)} prefixes in turn, TTFT", kite, rival, note)
    # The server's first repeat of a prompt may still be a miss; only what comes after counts as a known prompt.
    await traffic(first[:1])
    _both(bench, "full-prompt hit, TTFT", *await traffic(first[:1] * sizes.repeats))
    return first


async def _multi_turn(bench: Bench, engine: Any, peer: ServerPeer) -> None:
    """A chat of text in, text out: each turn sends the whole history, answers included."""
    turns, answer_tokens = 5, 16
    text = bench.bare.detokenize
    kite, rival, cached = [], [], []
    opening = text(bench.prompts.prompt(bench.sizes.prefix_tokens))
    mine = theirs = opening
    for turn in range(turns):
        question = text(bench.prompts.question(bench.sizes.question_tokens))
        mine, theirs = mine + question, theirs + question
        answer = await ask(engine, mine, answer_tokens)
        await quiet()
        ttft, _, reply = peer.complete(theirs, answer_tokens)
        mine, theirs = mine + answer.generation.text, theirs + reply
        if turn > 0:
            kite.append(answer.ttft_s)
            rival.append(ttft)
            cached.append(answer.cached_tokens)
    _both(bench, f"turns 2 to {turns} of a chat, TTFT", kite, rival, f"cached {', '.join(map(str, cached))}")


async def _simultaneous(bench: Bench, engine: Any, peer: ServerPeer) -> None:
    sizes = bench.sizes
    kite, rival, kite_rate, rival_rate = [], [], [], []
    for _ in range(sizes.costly_repeats):
        prompts = bench.short_prompts()
        answers, span = await ask_together(engine, prompts, sizes.new_tokens)
        kite.append(median([answer.ttft_s for answer in answers]))
        kite_rate.append(sizes.num_requests * sizes.new_tokens / span.wall_s)
        await quiet(0.5)
        firsts, rate = peer.simultaneous(prompts, sizes.new_tokens)
        rival.append(median(firsts))
        rival_rate.append(rate)
    _both(bench, f"{sizes.num_requests} new requests at once, median TTFT", kite, rival)
    report, label = bench.report, f"{sizes.num_requests} x {sizes.new_tokens} tokens"
    report.add(_SECTION, f"{label}: KITE", kite_rate, "tok/s")
    report.add(_SECTION, f"{label}: server", rival_rate, "tok/s")
    report.factor(_SECTION, f"{label}: KITE over the server", median(kite_rate) / median(rival_rate))


def _restart(bench: Bench, peer: ServerPeer, prompts: list[list[int]]) -> None:
    report, prefix = bench.report, bench.sizes.prefix_tokens
    report.add(_SECTION, "after a restart, a known prompt, TTFT: server", [peer.ttft(prompt) for prompt in prompts])
    new = [bench.question(prompt[:prefix]) for prompt in prompts[: bench.sizes.costly_repeats]]
    report.add(_SECTION, "after a restart, a known prefix, TTFT: server", [peer.ttft(prompt) for prompt in new])
    report.missing(_SECTION, "after a restart: KITE", "measured by tests/benchmarks/pool_engine.py")
