"""The units of one prompt, computed by an engine and taken out of its pool."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Final

from kitelib.config import ReusePolicy
from kitelib.engine.results import Generation
from kitelib.errors import BackendError
from kitelib.fingerprint import BlockChain, short
from kitelib.stores.wanted import Wanted
from kitelib.upcycle.unit import RecyclableUnit

if TYPE_CHECKING:
    from kitelib.engine.engine import KiteEngine
    from kitelib.engine.serving import Serving

__all__ = ["ComputedPrompt", "compute", "units_of"]

_MOST_AT_ONCE: Final = 32  # blocks
_TRIES: Final = 2  # computing again, where a unit is gone
_PRIORITY: Final = -1  # requests that somebody waits for go first


@dataclasses.dataclass(frozen=True, slots=True)
class ComputedPrompt:
    """A prompt that an engine has computed.

    Attributes:
        tokens: its token ids.
        chain: their fingerprints.
        policy: it was computed with.
        adapter: it was computed with; None without one.
    """

    tokens: list[int]
    chain: BlockChain
    policy: ReusePolicy
    adapter: str | None


async def compute(engine: KiteEngine, prompt: ComputedPrompt, max_tokens: int = 1) -> Generation:
    """Computes a prompt, greedily goes on for `max_tokens`, and waits until the pool has what that left.

    Raises:
        KiteError: as `KiteEngine.generate`.
    """
    generation = await engine.generate(
        prompt.tokens,
        max_tokens=max_tokens,
        temperature=0.0,
        reuse=prompt.policy,
        adapter=prompt.adapter,
        priority=_PRIORITY,
    )
    await _keep_all(engine)
    return generation


async def _keep_all(engine: KiteEngine) -> None:
    """Waits until the pool has what was computed: process memory, or the outer tiers if there is none. Tiers that nothing
    is read from are not waited for."""
    if not engine.pool.memory.max_bytes:
        await engine.flush()
        return
    serving = engine._current
    await serving.on_model_thread(serving.memory.save_all)
    await engine._recycler.drain()


async def units_of(engine: KiteEngine, prompt: ComputedPrompt, *, logits: bool) -> AsyncIterator[list[RecyclableUnit]]:
    """The units of a computed prompt, a few at a time and in order: full blocks, the tail's KV, and the logits after its
    last token if wanted.

    They come from the pool; what it has evicted is taken from the context again, or else computed again.

    Raises:
        BackendError: a unit can't be had.
        KiteError: as `KiteEngine.generate`.
    """
    serving, chain = engine._current, prompt.chain
    planner, num_blocks = serving.planner, len(chain.fingerprints)
    wanted = [planner.expect_block(chain, index, prompt.tokens) for index in range(num_blocks)]
    if chain.tail:
        wanted.append(planner.expect_tail(chain, num_blocks, chain.tail))
    step = _blocks_at_once(serving)
    for first in range(0, len(wanted), step):
        batch = [Wanted.of(each, chain.root) for each in wanted[first : first + step]]
        yield await _fetch_all(engine, prompt, batch, first)
    if logits:
        yield await _fetch_all(engine, prompt, [Wanted.of(planner.expect_logits(chain), chain.root)], None)


def _blocks_at_once(serving: Serving) -> int:
    """Blocks that are sure to be in the memory tier together."""
    memory: int = serving.pool.memory.max_bytes
    block: int = serving.backend.info.block_bytes
    return max(1, min(_MOST_AT_ONCE, memory // (4 * block))) if memory else _MOST_AT_ONCE


async def _fetch_all(
    engine: KiteEngine, prompt: ComputedPrompt, wanted: Sequence[Wanted], first: int | None
) -> list[RecyclableUnit]:
    """All of `wanted`, of which the first is block `first` of the prompt; None if they are no KV."""
    found: list[RecyclableUnit | None] = []
    for attempt in range(_TRIES + 1):
        if attempt:
            await compute(engine, prompt)
        found = await _from_pool(engine, wanted)
        missing = [index for index, unit in enumerate(found) if unit is None]
        if missing and first is not None and await _save_again(engine, prompt, first, first + len(wanted) - 1):
            found = await _from_pool(engine, wanted)
        units = [unit for unit in found if unit is not None]
        if len(units) == len(wanted):
            return units
    lost = next(each for each, unit in zip(wanted, found, strict=True) if unit is None).expected
    raise BackendError(
        f"the {lost.kind} unit {short(lost.cf)} of a prompt of {len(prompt.tokens)} tokens was computed, but the pool did "
        "not keep it; open the engine with more memory_bytes"
    )


async def _from_pool(engine: KiteEngine, wanted: Sequence[Wanted]) -> list[RecyclableUnit | None]:
    pool = engine.pool
    found: list[RecyclableUnit | None] = []
    while len(found) < len(wanted):
        run = await pool.fetch_run(wanted[len(found) :])
        found += [unit for unit, _ in run]
        if len(found) < len(wanted):
            found.append(None)  # where the run broke
    missing = [index for index, unit in enumerate(found) if unit is None]
    others = await pool.fetch_any([wanted[index] for index in missing])
    for index, other in zip(missing, others, strict=True):
        found[index] = None if other is None else other[0]
    return found


async def _save_again(engine: KiteEngine, prompt: ComputedPrompt, first: int, last: int) -> bool:
    """Lets the context hand blocks `first` to `last` to the pool once more, of which the last may be the tail; False if
    it does not have them any more."""
    serving = engine._current
    memory, size = serving.memory, serving.backend.info.block_tokens
    # A memory tier that is full of this prompt's first blocks leaves out what goes on from them. They are not needed any
    # more: what comes before `first` has been taken.
    for index in range(min(first, len(prompt.chain.fingerprints))):
        expected = serving.planner.expect_block(prompt.chain, index, prompt.tokens)
        engine.pool.memory.delete(Wanted.of(expected).key)
    end = len(prompt.tokens)
    stop = min(end, (last + 1) * size)

    def save() -> int:
        for run, length in memory.residency.candidates(prompt.chain, prompt.tokens, end):
            if length < stop or run.sequence is None or run.epoch != memory.epoch():
                continue
            memory.saver.save(run)  # what it has not saved at all yet
            saved, run.saved = run.saved, first * size
            memory.saver.save(run, min(last + 1, end // size) - first)
            run.saved = saved
            if stop % size:
                run.tail_ends.append(end)
                memory.saver.save(run)
            return 1
        return 0

    if not await serving.on_model_thread(save):
        return False
    await _keep_all(engine)
    return True
