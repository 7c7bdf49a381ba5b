"""Sections about many requests at a time: throughput, a burst of new requests, the event loop."""

from __future__ import annotations

import asyncio
import time

from lite_bench import Bench, ask_together, quiet
from lite_llama import LlamaPeer
from lite_report import median

__all__ = ["burst", "event_loop", "throughput"]


async def throughput(bench: Bench) -> None:
    """Simultaneous requests to their end, against a bare loop over the same batch and Llama one by one."""
    name, sizes, report = "throughput", bench.sizes, bench.report
    total = sizes.num_requests * sizes.new_tokens
    same, plain = bench.bare_context(), bench.bare_context(as_engine=False)
    cached = LlamaPeer(bench.model, bench.threads, ram_cache=True)
    kite, raw, raw_plain, llama, cores = [], [], [], [], []
    async with bench.engine() as engine:
        for repeat in range(sizes.costly_repeats):
            prompts = bench.short_prompts()
            used, begin = time.process_time(), time.perf_counter()
            kite.append((await ask_together(engine, prompts, sizes.new_tokens))[1])
            cores.append((time.process_time() - used) / (time.perf_counter() - begin))
            await quiet(0.5)
            raw.append(total / same.time_batch(prompts, sizes.new_tokens)[1])
            raw_plain.append(total / plain.time_batch(prompts, sizes.new_tokens)[1])
            if repeat == 0:
                llama.append(cached.one_after_the_other(prompts, sizes.new_tokens))
    for peer in (same, plain, cached):
        peer.close()
    label = f"{sizes.num_requests} x {sizes.new_tokens} tokens"
    report.add(name, f"{label}: KITE", kite, "tok/s", note=f"{median(cores):.2f} cores busy")
    report.add(name, f"{label}: bare llama_decode, the engine's parameters", raw, "tok/s")
    report.add(name, f"{label}: bare llama_decode, no flash attention, n_ubatch 512", raw_plain, "tok/s")
    report.add(name, f"{label}: Llama one after the other, LlamaRAMCache", llama, "tok/s")
    report.judge(name, "KITE to the bare loop", median(kite) / median(raw), 0.95, at_least=True)
    report.add(name, "KITE to the plain bare loop", [median(kite) / median(raw_plain)], "x")
    report.factor(name, "KITE over Llama one after the other", median(kite) / median(llama))


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
            kite.append(median([answer.ttft_s for answer in answers]))
            worst.append(max(answer.ttft_s for answer in answers))
            await quiet(0.3)
    bare.close()
    plain.close()
    label = f"{sizes.num_requests} x {sizes.question_tokens} prompt tokens"
    base = report.add(name, f"{label}: one llama_decode, the engine's parameters", raw)
    report.add(name, f"{label}: one llama_decode, no flash attention, n_ubatch 512", raw_plain)
    mine = report.add(
        name, f"{label}: KITE, median TTFT", kite, note=f"the slowest of each burst: {median(worst) * 1e3:.0f} ms"
    )
    report.judge(name, "KITE to one batched prefill", mine / base, 1.3)


async def event_loop(bench: Bench) -> None:
    """The longest time that the loop did not run a ready task, while requests stream."""
    name, sizes, report = "event loop", bench.sizes, bench.report
    async with bench.engine() as engine:
        idle = await _longest_gaps(asyncio.sleep(3.0))
        gaps = []
        for _ in range(sizes.costly_repeats):
            gaps.append(max(await _longest_gaps(ask_together(engine, bench.short_prompts(), sizes.new_tokens))))
            await quiet(0.3)
    report.add(name, "longest gap, nothing running", [max(idle)], "ms", note="what this machine does by itself")
    report.judge(
        name,
        f"longest gap while {sizes.num_requests} requests stream",
        median(gaps),
        10.0,
        "ms",
        note="runs: " + ", ".join(f"{gap:.1f}" for gap in gaps),
    )


async def _longest_gaps(work: object) -> list[float]:
    """Runs `work` beside a task that wakes every millisecond; how late it woke, in ms, all wake-ups."""
    late: list[float] = []
    done = asyncio.ensure_future(work)  # type: ignore[call-overload]
    last = time.perf_counter()
    while not done.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        late.append((now - last - 0.001) * 1e3)
        last = now
    await done
    return late
