"""Sections about many requests at a time: throughput, a burst of new requests, the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable

from lite_bench import Bench, ask_together, quiet
from lite_clock import Span, median_span
from lite_llama import LlamaPeer
from lite_report import median

__all__ = ["burst", "event_loop", "throughput"]


async def throughput(bench: Bench) -> None:
    """Simultaneous requests to their end, against a bare loop over the same batch and Llama one by one."""
    name, sizes, report = "throughput", bench.sizes, bench.report
    total = sizes.num_requests * sizes.new_tokens
    same, plain = bench.bare_context(), bench.bare_context(as_engine=False)
    cached = LlamaPeer(bench.model, bench.threads, ram_cache=True)
    kite, raw, raw_plain, llama = [], [], [], []
    async with bench.engine() as engine:
        for repeat in range(sizes.costly_repeats):
            prompts = bench.short_prompts()
            answers, span = await ask_together(engine, prompts, sizes.new_tokens)
            if (made := sum(len(answer.generation.token_ids) for answer in answers)) != total:
                raise RuntimeError(f"KITE generated {made} tokens instead of {total}")
            kite.append(span)
            await quiet(0.5)
            raw.append(same.time_batch(prompts, sizes.new_tokens)[1])
            raw_plain.append(plain.time_batch(prompts, sizes.new_tokens)[1])
            if repeat == 0:
                llama.append(cached.one_after_the_other(prompts, sizes.new_tokens))
    for peer in (same, plain, cached):
        peer.close()
    label = f"{sizes.num_requests} x {sizes.new_tokens} tokens"

    def add(what: str, spans: list[Span]) -> float:
        cores = median([span.cpu_s / span.wall_s for span in spans])
        rates = [total / span.wall_s for span in spans]
        return report.add(name, f"{label}: {what}", rates, "tok/s", note=f"{cores:.2f} cores used")

    mine = add("KITE", kite)
    base = add("bare llama_decode, the engine's parameters", raw)
    other = add("bare llama_decode, no flash attention, n_ubatch 512", raw_plain)
    report.add(name, f"{label}: Llama one after the other, LlamaRAMCache", llama, "tok/s")
    cpu = median_span(raw).cpu_s / median_span(kite).cpu_s
    report.judge(name, "KITE to the bare loop", mine / base, 0.95, at_least=True, note=f"in CPU time {cpu:.3f}")
    report.add(name, "KITE to the plain bare loop", [mine / other], "x")
    report.factor(name, "KITE over Llama one after the other", mine / median(llama))


async def burst(bench: Bench) -> None:
    """New requests at the same instant: median TTFT against one batched prefill of all of them."""
    name, sizes, report = "burst", bench.sizes, bench.report
    bare, plain = bench.bare_context(), bench.bare_context(as_engine=False)
    kite, worst, raw, raw_plain = [], [], [], []
    async with bench.engine() as engine:
        for _ in range(sizes.repeats):
            prompts = bench.short_prompts()
            raw.append(bare.time_batch(prompts, 1)[0])
            raw_plain.append(plain.time_batch(prompts, 1)[0])
            answers, _ = await ask_together(engine, prompts, 4)
            kite.append(median_span([answer.first for answer in answers]))
            worst.append(max(answer.ttft_s for answer in answers))
            await quiet(0.3)
    bare.close()
    plain.close()
    label = f"{sizes.num_requests} x {sizes.question_tokens} prompt tokens"
    base = report.add(name, f"{label}: one llama_decode, the engine's parameters", [span.wall_s for span in raw])
    report.add(
        name, f"{label}: one llama_decode, no flash attention, n_ubatch 512", [span.wall_s for span in raw_plain]
    )
    note = f"the slowest of each burst: {median(worst) * 1e3:.0f} ms"
    mine = report.add(name, f"{label}: KITE, median TTFT", [span.wall_s for span in kite], note=note)
    cpu = median_span(kite).cpu_s / median_span(raw).cpu_s
    report.judge(name, "KITE to one batched prefill", mine / base, 1.3, note=f"in CPU time {cpu:.3f}")


async def event_loop(bench: Bench) -> None:
    """The longest time that the loop did not run a ready task, while requests stream."""
    name, sizes, report = "event loop", bench.sizes, bench.report
    bare = bench.bare_context()
    idle, beside, gaps = [], [], []
    async with bench.engine() as engine:
        for _ in range(sizes.costly_repeats):
            idle.append(max(await _lateness(asyncio.sleep(2.0))))
            beside.append(
                max(await _lateness(asyncio.to_thread(bare.time_batch, bench.short_prompts(), sizes.new_tokens)))
            )
            gaps.append(max(await _lateness(ask_together(engine, bench.short_prompts(), sizes.new_tokens))))
            await quiet(0.3)
    bare.close()
    report.add(name, "longest gap, nothing running", idle, "ms")
    report.add(name, "longest gap, the bare loop in a thread", beside, "ms", note="what this machine does by itself")
    note = "runs: " + ", ".join(f"{gap:.1f}" for gap in gaps)
    report.judge(name, f"longest gap while {sizes.num_requests} requests stream", median(gaps), 10.0, "ms", note=note)


async def _lateness(work: Awaitable[object]) -> list[float]:
    """Runs `work` beside a task that wakes every millisecond; how late it woke, in ms, all wake-ups."""
    late: list[float] = []
    done = asyncio.ensure_future(work)
    last = time.perf_counter()
    while not done.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        late.append((now - last - 0.001) * 1e3)
        last = now
    await done
    return late
