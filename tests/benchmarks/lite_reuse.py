"""Sections about one request at a time: warm TTFT, full-prompt hit, miss path, restore from the pool."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from lite_bench import Bench, ask, ask_together, quiet
from lite_clock import median_span
from lite_llama import LlamaPeer
from lite_report import median

from kitelib import ReusePolicy
from kitelib.abc import BlockPayload, StepWork
from kitelib.fingerprint import Fingerprint, as_token_ids, block_fingerprint
from kitelib.upcycle.codec import get_codec
from kitelib.upcycle.unit import Expectation, RecyclableUnit, pack, unpack

__all__ = ["full_hit", "miss_path", "restore", "warm_ttft"]


async def warm_ttft(bench: Bench) -> None:
    """A known prefix and a new question, against evaluating exactly the question's tokens with llama_decode."""
    name, sizes, report = "warm TTFT", bench.sizes, bench.report
    prefixes = [bench.prompts.prompt(sizes.prefix_tokens) for _ in range(sizes.num_prefixes)]
    # The yardstick holds one prefix only, in both cases: that is the least that any engine could compute.
    bare = bench.bare_context()
    bare.extend(0, prefixes[0])
    plain = LlamaPeer(bench.model, bench.threads)
    cached = LlamaPeer(bench.model, bench.threads, ram_cache=True)
    async with bench.engine() as engine:
        cold, cold_llama = [], []
        for prefix in prefixes:
            cold.append((await ask(engine, bench.question(prefix))).ttft_s)
            await quiet(0.5)
            cold_llama.append(cached.ttft(bench.question(prefix)))
        report.add(name, "KITE, cold", cold)
        report.add(name, "llama_cpp.Llama, cold", cold_llama)
        report.factor(name, "KITE over Llama, cold", median(cold_llama) / median(cold))

        plain.ttft(bench.question(prefixes[-1]))
        await ask(engine, bench.question(prefixes[-1]))
        await _compare(
            bench, engine, "same prefix", bare, plain, [prefixes[-1]] * sizes.repeats, "Llama, prefix used last"
        )
        unfused = bench.bare_context(as_engine=False)
        unfused.extend(0, prefixes[-1])
        questions = [bench.prompts.question(sizes.question_tokens) for _ in range(sizes.repeats)]
        spans = [unfused.time_extend(0, question, sizes.prefix_tokens) for question in questions]
        unfused.close()
        label = "same prefix: bare llama_decode, no flash attention, n_ubatch 512"
        report.add(name, label, [span.wall_s for span in spans], note="what Llama computes with")
        rounds = max(1, round(sizes.repeats / sizes.num_prefixes))
        label = f"{sizes.num_prefixes} prefixes in turn"
        await _compare(bench, engine, label, bare, cached, prefixes * rounds, "Llama, LlamaRAMCache")
        without = [plain.ttft(bench.question(prefix)) for prefix in prefixes[: sizes.costly_repeats]]
        report.add(name, f"{label}: Llama, no cache", without)
        await _several_at_once(bench, engine, name, prefixes)
    for peer in (plain, cached, bare):
        peer.close()


async def _compare(
    bench: Bench, engine: Any, label: str, bare: Any, llama: LlamaPeer, prefixes: Sequence[list[int]], peer: str
) -> None:
    """One question per prefix, put to the bare loop, to KITE and to the peer in turn."""
    name, raw, kite, inside, other, reused = "warm TTFT", [], [], [], [], []
    for prefix in prefixes:
        prompt = bench.question(prefix)
        raw.append(bare.time_extend(0, prompt[len(prefix) :], len(prefix)))
        answer = await ask(engine, prompt)
        kite.append(answer.first)
        inside.append(answer.generation.timing.ttft_s)
        reused.append(answer.cached_tokens)
        await quiet()
        other.append(llama.ttft(prompt))
    report = bench.report
    base = report.add(name, f"{label}: bare llama_decode of the question", [span.wall_s for span in raw])
    note = f"{min(reused)} to {max(reused)} of {len(prefixes[0]) + bench.sizes.question_tokens} tokens cached"
    mine = report.add(
        name,
        f"{label}: KITE",
        [span.wall_s for span in kite],
        note=f"{note}; timing.ttft_s {median(inside) * 1e3:.1f} ms",
    )
    theirs = report.add(name, f"{label}: {peer}", other)
    cpu = median_span(kite).cpu_s / median_span(raw).cpu_s
    report.judge(name, f"{label}: KITE to bare llama_decode", mine / base, 1.15, note=f"in CPU time {cpu:.3f}")
    report.factor(name, f"{label}: KITE over {peer}", theirs / mine)


async def _several_at_once(bench: Bench, engine: Any, name: str, prefixes: Sequence[list[int]]) -> None:
    """For information: a question to every known prefix at the same time."""
    answers, _ = await ask_together(engine, [bench.question(prefix) for prefix in prefixes], 1)
    samples = [answer.ttft_s for answer in answers]
    bench.report.add(name, f"{len(prefixes)} prefixes at once: KITE, median TTFT", samples)


async def full_hit(bench: Bench) -> None:
    """The whole prompt is known: no backend step may happen before the first token. Counted, not timed."""
    name, report = "full-prompt hit", bench.report
    async with bench.engine() as engine:
        for length in (1, 16, 100, bench.sizes.prefix_tokens):
            prompt = bench.prompts.prompt(length)
            await ask(engine, prompt)
            await quiet(0.5)
            steps, times = [], []
            for _ in range(bench.sizes.costly_repeats):
                # With one token to generate the whole request is "before the first token", so nothing that
                # runs ahead of the caller can blur the count.
                before = engine.stats()["steps"]
                answer = await ask(engine, prompt)
                steps.append(engine.stats()["steps"] - before)
                times.append(answer.ttft_s)
            report.judge(name, f"{length} tokens: steps before the first token", max(steps), 0, "steps")
            report.add(name, f"{length} tokens: TTFT", times)


async def miss_path(bench: Bench) -> None:
    """Reuse on with nothing to reuse, against reuse off: bursts of new prompts, the two ways in turn."""
    name, report = "miss path", bench.report
    prompt_tokens, new_tokens, burst = 200, 8, 2
    async with bench.engine() as engine:
        base = ReusePolicy(numerics=bench.numerics)
        policies = {"on": base, "off": dataclasses.replace(base, mode="off")}
        wall: dict[str, list[float]] = {"on": [], "off": []}
        busy: dict[str, list[float]] = {"on": [], "off": []}
        for repeat in range(bench.sizes.repeats):
            for arm in ("on", "off") if repeat % 2 else ("off", "on"):
                prompts = [bench.prompts.prompt(prompt_tokens) for _ in range(burst)]
                begin, used = time.perf_counter(), time.process_time()
                for prompt in prompts:
                    await ask(engine, prompt, new_tokens, reuse=policies[arm])
                wall[arm].append(time.perf_counter() - begin)
                await quiet(0.3)
                busy[arm].append(time.process_time() - used)
        for arm in ("off", "on"):
            report.add(
                name, f"reuse {arm}: {burst} new prompts of {prompt_tokens} tokens, {new_tokens} new each", wall[arm]
            )
        paired = statistics.median(on / off for on, off in zip(wall["on"], wall["off"], strict=True))
        note = f"median of pairs {paired:.3f}, fastest to fastest {min(wall['on']) / min(wall['off']):.3f}"
        report.judge(name, "reuse on to reuse off", median(wall["on"]) / median(wall["off"]), 1.01, note=note)
        ratio = median(busy["on"]) / median(busy["off"])
        report.add(name, "the same in CPU time of the whole process", [ratio], "x", note="write-behind included")


async def restore(bench: Bench) -> None:
    """The KV of 600 tokens from stored units into a sequence, against a plain memcpy of the same bytes."""
    name, report = "restore", bench.report
    with bench.backend() as backend:
        ids, size = bench.prompts.prompt(bench.sizes.prefix_tokens), backend.info.block_tokens
        num_blocks = len(ids) // size
        payloads = _computed(backend, ids, num_blocks)
        units = _as_units(payloads, ids, Fingerprint(bytes(32)), backend.info.model_state)
        num_bytes = sum(len(payload.data) for payload in payloads)
        targets = [np.empty_like(payload.data) for payload in payloads]
        samples: dict[str, list[float]] = {way: [] for way in ("memcpy", "restore", "none", "zstd")}
        blobs = {
            codec: [pack(unit, get_codec("paged_kvcache_v2", codec)) for unit in units] for codec in ("none", "zstd")
        }
        for _ in range(bench.sizes.repeats):
            begin = time.perf_counter()
            for target, payload in zip(targets, payloads, strict=True):
                np.copyto(target, payload.data)
            samples["memcpy"].append(time.perf_counter() - begin)
            samples["restore"].append(_time_restore(backend, partial(list, payloads)))
            for codec, stored in blobs.items():
                samples[codec].append(_time_restore(backend, partial(_from_stored, stored, units)))
    label = f"{num_blocks} blocks of {size} tokens, {num_bytes / 1e6:.1f} MB"
    rates = {way: [num_bytes / seconds / 1e9 for seconds in times] for way, times in samples.items()}
    shown = {
        "memcpy": "memcpy",
        "restore": "restore of payloads",
        "none": "checked units, not compressed, and restore",
        "zstd": "checked units, zstd, and restore",
    }
    for way, text in shown.items():
        note = f"{median(samples[way]) * 1e3:.1f} ms"
        if way in blobs:
            note += f", {sum(map(len, blobs[way])) / 1e6:.1f} MB stored"
        report.add(name, f"{label}: {text}", rates[way], "GB/s", note=note)
    for way in ("restore", "none", "zstd"):
        report.add(name, f"{shown[way]}, to memcpy", [median(rates[way]) / median(rates["memcpy"])], "x")


def _computed(backend: Any, ids: Sequence[int], num_blocks: int) -> list[BlockPayload]:
    sequence, step = backend.create(), backend.info.max_step_tokens
    for start in range(0, len(ids), step):
        backend.step([StepWork(sequence, ids[start : start + step], start, logits=False)])
    payloads = list(backend.export_blocks(sequence, 0, num_blocks))
    backend.release(sequence)
    return payloads


def _as_units(
    payloads: Sequence[BlockPayload], ids: Sequence[int], root: Fingerprint, model_state: bytes
) -> list[RecyclableUnit]:
    units, parent, start = [], root, 0
    for payload in payloads:
        tokens = as_token_ids(ids[start : start + payload.num_tokens])
        cf = block_fingerprint(parent, tokens)
        units.append(
            RecyclableUnit(
                "kv",
                cf,
                parent,
                tokens,
                model_state,
                0,
                time.time(),
                payload.layout,
                payload.dtype,
                payload.shape,
                payload.data,
            )
        )
        parent, start = cf, start + payload.num_tokens
    return units


def _from_stored(stored: Sequence[bytes], units: Sequence[RecyclableUnit]) -> list[BlockPayload]:
    payloads = []
    for blob, unit in zip(stored, units, strict=True):
        expected = Expectation("kv", unit.cf, unit.token_ids, unit.model_state, unit.layout, len(unit.data))
        found = unpack(blob, expected=expected)
        payloads.append(BlockPayload(len(found.token_ids), found.data, found.dtype, found.shape, found.layout))
    return payloads


def _time_restore(backend: Any, payloads: Callable[[], Sequence[BlockPayload]]) -> float:
    sequence = backend.create()
    begin = time.perf_counter()
    backend.restore_blocks(sequence, 0, payloads())
    seconds = time.perf_counter() - begin
    backend.release(sequence)
    return seconds
