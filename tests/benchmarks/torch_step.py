"""One decode step: KITE's backend beside the bare model call, and the floor under both."""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from torch_rig import Rig

from kitelib.abc import StepWork

__all__ = ["decode_steps", "weight_floor"]

_CONTEXT, _CHUNK = 64, 16


def decode_steps(rig: Rig) -> None:
    """The same number of sequences with the same context on both sides, measured in turn."""
    import torch

    from kitelib.backends.torch_engine.backend import TorchBackend, TorchOptions

    floor = weight_floor(rig)
    for numerics in ("standard", "bitwise"):
        backend = TorchBackend.load(
            rig.folder, TorchOptions(threads=rig.threads, numerics=numerics, device="cpu", max_sequences=16)
        )
        try:
            for batch in (1, 16):
                bare, kite = _in_turn(_bare_step(rig.model, batch), _kite_step(backend, batch), rig.sizes.steps)
                name = f"{numerics}, batch {batch}"
                base = rig.report.add("decode step", f"{name}: bare model call", bare)
                mine = rig.report.add(
                    "decode step", f"{name}: KITE", kite, note=f"{floor / min(kite):.2f} of the floor"
                )
                rig.report.judge("decode step", f"{name}: KITE to bare model call", mine / base, 1.10)
        finally:
            backend.close()
    torch.set_num_threads(rig.threads)


def weight_floor(rig: Rig) -> float:
    """Adds and returns the seconds that reading as many bytes as the weights have takes at the measured bandwidth."""
    import torch

    size = sum(each.numel() * each.element_size() for each in rig.model.parameters())
    buffer = torch.ones(size // 4, dtype=torch.float32)
    times = []
    for _ in range(rig.sizes.steps):
        begin = time.perf_counter()
        buffer.sum()
        times.append(time.perf_counter() - begin)
    best = min(times)
    note = f"{size / 1e6:.0f} MB at {size / best / 1e9:.1f} GB/s, best of {len(times)}"
    rig.report.add("decode step", "floor: reading all weights once", [best], note=note)
    return best


def _in_turn(first: Callable[[], float], second: Callable[[], float], count: int) -> tuple[list[float], list[float]]:
    for _ in range(3):
        first(), second()
    pairs = [(first(), second()) for _ in range(count)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def _tokens(batch: int, length: int) -> list[list[int]]:
    rng = np.random.Generator(np.random.PCG64(5))
    return [[int(token) for token in row] for row in rng.integers(3000, 40000, (batch, length))]


def _bare_step(model: Any, batch: int) -> Callable[[], float]:
    """A call of the model itself with transformers' own cache, one new token per sequence."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.inference_mode():
        model(torch.tensor(_tokens(batch, _CONTEXT)), use_cache=True, **{name: cache})
    token = torch.full((batch, 1), 4321)
    positions = torch.full((batch, 1), _CONTEXT)

    def step() -> float:
        with torch.inference_mode():
            begin = time.perf_counter()
            found = model(token, position_ids=positions, use_cache=True, **{name: cache})
            rows = list(found.logits[:, -1].float().numpy())
            seconds = time.perf_counter() - begin
        assert len(rows) == batch
        cache.crop(-1)
        return seconds

    return step


def _kite_step(backend: Any, batch: int) -> Callable[[], float]:
    """A step of the backend, from token ids to logits on the host."""
    sequences = [backend.create() for _ in range(batch)]
    for sequence, tokens in zip(sequences, _tokens(batch, _CONTEXT), strict=True):
        for start in range(0, _CONTEXT, _CHUNK):
            backend.step([StepWork(sequence, tokens[start : start + _CHUNK], start, False)])
    starts = itertools.count(_CONTEXT)  # the context grows by a token per step: some tens, which is nothing

    def step() -> float:
        start = next(starts)
        work = [StepWork(sequence, [4321], start, True) for sequence in sequences]
        begin = time.perf_counter()
        found = backend.step(work)
        seconds = time.perf_counter() - begin
        assert len(found.logits) == batch
        return seconds

    return step
