"""What the pool has for a prompt.

A prompt is looked up from its first block that is not in the engine's context on: full blocks up to the first miss,
then what continues them in part, then the logits after the whole prompt. Process memory is asked first; the outer tiers
only for what it does not have, and only as long as that pays (`kitelib.yoco.search`). Nothing is attached here;
the scheduler decides what of it still helps when the request is admitted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Awaitable, Callable, Sequence

import anyio
import numpy as np
import numpy.typing as npt

from kitelib.abc import BlockPayload, ModelInfo
from kitelib.fingerprint import BlockChain, Fingerprint, TokenIds, end_fingerprint
from kitelib.stores.pool import RUPool
from kitelib.stores.wanted import Wanted
from kitelib.upcycle.unit import Expectation, RecyclableUnit
from kitelib.yoco.decision import patience
from kitelib.yoco.held import Found, HeldBytes
from kitelib.yoco.search import Late, Search

__all__ = ["EMPTY_PREFIX", "Planner", "PooledPrefix", "Spawn", "late_prefix"]

LOGITS_LAYOUT = "kite.logits"
_LEAST_HELD_BYTES = 256 * 2**20

Spawn = Callable[[str, Callable[[], Awaitable[None]]], None]


@dataclasses.dataclass(frozen=True, slots=True)
class PooledPrefix:
    """Verified units for one prompt.

    Attributes:
        first: block index of the first payload.
        payloads: consecutive full blocks from `first` on.
        tail: KV that follows the last payload (or block `first - 1`); None if none is stored.
        tail_tokens: how many of its first tokens are the prompt's.
        logits: float32 (vocab_size,), after the last token of the whole prompt; read-only. None if not stored.
        sources: the tier of each payload.
        tail_source, logits_source: the tiers of those; "" if there are none.
        skipped: tiers, and how many blocks each has that are slower to load than to compute.
        late: what is still on its way; None if nothing is.
        deferred: nothing was looked up, since requests hold too much already; ask again when it is its turn.
    """

    first: int = 0
    payloads: tuple[BlockPayload, ...] = ()
    tail: BlockPayload | None = None
    tail_tokens: int = 0
    logits: npt.NDArray[np.float32] | None = None
    sources: tuple[str, ...] = ()
    tail_source: str = ""
    logits_source: str = ""
    skipped: tuple[tuple[str, int], ...] = ()
    late: Late | None = None
    deferred: bool = False


EMPTY_PREFIX = PooledPrefix()
DEFERRED = PooledPrefix(deferred=True)


def late_prefix(first: int, units: Sequence[tuple[RecyclableUnit, str]]) -> PooledPrefix:
    """Blocks that came later, as a prefix."""
    return PooledPrefix(first, tuple(_payload(unit) for unit, _ in units), sources=tuple(name for _, name in units))


class Planner:
    """Looks prompts up in the pool. Used on the event loop; checks and copies run in threads.

    Args:
        pool: the tiers.
        info: the model.
        layout: id of the layout that its blocks have.
        speed: tokens per second that the model computes in a prompt, as far as is known.
        spawn: runs a supervised task.

    Attributes:
        held: what was found and is not attached or given up yet.
    """

    def __init__(
        self,
        pool: RUPool,
        info: ModelInfo,
        layout: str,
        speed: Callable[[], float] | None = None,
        spawn: Spawn | None = None,
    ) -> None:
        self._pool = pool
        self._info = info
        self._layout = layout
        self._speed = speed
        self._spawn = spawn
        # The requests of a moment can't use more than the context holds.
        capacity_bytes = info.capacity_tokens * info.block_bytes // info.block_tokens
        self.held = HeldBytes(max(_LEAST_HELD_BYTES, capacity_bytes))

    def expect_block(self, chain: BlockChain, index: int, token_ids: Sequence[int]) -> Expectation:
        """What the stored unit of full block `index` has to be."""
        size = self._info.block_tokens
        ids = token_ids[index * size : (index + 1) * size]
        return self._kv(chain.fingerprints[index], ids)

    def expect_tail(self, chain: BlockChain, start_block: int, tail_ids: TokenIds) -> Expectation:
        """What the stored unit of the tokens after block `start_block - 1` has to be."""
        return self._kv(end_fingerprint(self.before(chain, start_block), tail_ids), tail_ids)

    def expect_logits(self, chain: BlockChain) -> Expectation:
        """What the stored logits after all tokens of `chain` have to be."""
        return Expectation(
            "logits", chain.end(), list(chain.tail), self._info.model_state, LOGITS_LAYOUT, self._info.vocab_size * 4
        )

    @staticmethod
    def before(chain: BlockChain, block: int) -> Fingerprint:
        """Fingerprint that block `block` goes on from."""
        return chain.fingerprints[block - 1] if block else chain.root

    def _kv(self, cf: Fingerprint, token_ids: TokenIds) -> Expectation:
        num_bytes = self._info.block_bytes // self._info.block_tokens * len(token_ids)
        return Expectation("kv", cf, token_ids, self._info.model_state, self._layout, num_bytes)

    async def find(
        self, chain: BlockChain, token_ids: Sequence[int], first: int, *, logits: bool, defer: bool = True
    ) -> PooledPrefix:
        """Looks a prompt up from block `first` on. Never raises for what a store did: that is a miss. `defer` says that
        it may be put off while requests hold too much."""
        if not self._pool.searchable or not self._info.reuse_blocks:
            return EMPTY_PREFIX
        if defer and not self.held.has_room(self._info.block_bytes):
            return DEFERRED
        blocks = [
            Wanted.of(self.expect_block(chain, index, token_ids), chain.root)
            for index in range(first, len(chain.fingerprints))
        ]
        run = await self._pool.leading_run(blocks)
        units = await self.held.read(blocks[:run], self._pool.fetch_run, bounded=defer)
        if defer and run and not units and not self.held.has_room(self._info.block_bytes):
            return DEFERRED  # others took the room meanwhile
        tail, tail_tokens = await self._find_tail(chain, token_ids, first + len(units))
        found: list[Found] = []
        if logits:
            wanted = Wanted.of(self.expect_logits(chain), chain.root)
            read = await self._fetch([wanted][: await self._pool.leading_run([wanted])])
            found = [each for each in read if _can_be_sampled(each[0])]
        prefix = PooledPrefix(
            first,
            tuple(_payload(unit) for unit, _ in units),
            _payload(tail[0]) if tail else None,
            tail_tokens,
            found[0][0].data.view(np.float32) if found else None,
            tuple(name for _, name in units),
            tail[1] if tail else "",
            found[0][1] if found else "",
        )
        if not self._pool.tiers.tiers or self._spawn is None:
            return prefix
        return await self._find_outside(chain, token_ids, prefix, blocks[len(units) :], logits=logits)

    async def _find_outside(
        self,
        chain: BlockChain,
        token_ids: Sequence[int],
        prefix: PooledPrefix,
        blocks: Sequence[Wanted],
        *,
        logits: bool,
    ) -> PooledPrefix:
        """Adds what the outer tiers have beyond `prefix`, of which `blocks` are the missing full blocks."""
        size = self._info.block_tokens
        start = prefix.first + len(prefix.payloads)
        remaining = len(token_ids) - start * size - prefix.tail_tokens
        wants_logits = logits and prefix.logits is None
        if remaining <= 0 and not wants_logits:
            return prefix
        assert self._spawn is not None
        assert self._speed is not None
        compute_s = max(remaining, 1) / self._speed()
        measured = all(tier.tried for tier in self._pool.tiers.tiers)
        extras = _Extras(self, chain, token_ids, start, wants_logits)
        search = Search(
            pool=self._pool,
            held=self.held,
            blocks=blocks,
            first=start,
            block_bytes=self._info.block_bytes,
            compute_block_s=size / self._speed(),
            patience_s=patience(compute_s, measured=measured),
            logits=extras.find_logits,
            tail=extras.find_tail,
        )
        self._spawn("lookup", search.run)
        try:
            with anyio.move_on_after(search.patience_s):
                await search.settled.wait()
        except BaseException:
            search.abandon()
            raise
        return extras.added_to(prefix, search, search.leave())

    async def _find_tail(self, chain: BlockChain, token_ids: Sequence[int], block: int) -> tuple[Found | None, int]:
        """A unit in memory or a bundle that goes on from `block` at least in part, and how many of its tokens are the prompt's.

        That is the tail of an earlier prompt or answer, or the block in which an earlier prompt took another way.
        """
        size = self._info.block_tokens
        ids = token_ids[block * size : (block + 1) * size]
        parent = self.before(chain, block)
        exact = await self._longest_tail(chain, block, ids)
        sibling = self._pool.siblings.best(parent, ids, size)
        if sibling is not None and sibling[2] > exact:
            cf, tokens, common = sibling
            units = await self._fetch([Wanted.of(self._kv(cf, tokens), chain.root)])
            if units:
                return units[0], common
            if not self._pool.tiers.tiers:
                self._pool.siblings.discard(parent, cf)
        if exact:
            units = await self._fetch([Wanted.of(self.expect_tail(chain, block, ids[:exact]), chain.root)])
            if units:
                return units[0], exact
        return None, 0

    async def _longest_tail(self, chain: BlockChain, block: int, ids: Sequence[int]) -> int:
        """Tokens of the longest tail in memory that `ids` starts with."""
        for count in range(min(self._info.block_tokens - 1, len(ids)), 0, -1):
            if await self._pool.leading_run([Wanted.of(self.expect_tail(chain, block, ids[:count]))]):
                return count
        return 0

    async def _fetch(self, wanted: Sequence[Wanted]) -> list[Found]:
        return await self.held.read(wanted, self._pool.fetch_run)

    async def fetch_any(self, wanted: Sequence[Wanted]) -> list[tuple[RecyclableUnit, str] | None]:
        """Single units from any outer tier, with its name."""
        found = await self._pool.fetch_any(wanted)
        self.held.watch([each[0] for each in found if each is not None])
        return found

    async def tail_outside(
        self, chain: BlockChain, token_ids: Sequence[int], block: int
    ) -> tuple[RecyclableUnit, int, str] | None:
        """As `_find_tail`, in the outer tiers, with the tier's name: one round trip for all that may be there."""
        size = self._info.block_tokens
        ids = token_ids[block * size : (block + 1) * size]
        lengths = list(range(min(size - 1, len(ids)), 0, -1))
        wanted = [Wanted.of(self.expect_tail(chain, block, ids[:count]), chain.root) for count in lengths]
        parent = self.before(chain, block)
        sibling = self._pool.siblings.best(parent, ids, size)
        if sibling is not None:
            wanted.append(Wanted.of(self._kv(sibling[0], sibling[1]), chain.root))
            lengths.append(sibling[2])
        units = await self.fetch_any(wanted)
        if sibling is not None and units[-1] is None:
            self._pool.siblings.discard(parent, sibling[0])
        found = [(each[0], count, each[1]) for count, each in zip(lengths, units, strict=True) if each is not None]
        return max(found, key=lambda entry: entry[1], default=None)


class _Extras:
    """What the outer tiers have beside full blocks: the logits, and the KV that follows the last block."""

    def __init__(
        self, planner: Planner, chain: BlockChain, token_ids: Sequence[int], start: int, wants_logits: bool
    ) -> None:
        self._planner = planner
        self._chain = chain
        self._token_ids = token_ids
        self._start = start
        self._wants_logits = wants_logits
        self._logits: tuple[RecyclableUnit, str] | None = None
        self._tail: tuple[int, RecyclableUnit, int, str] | None = None  # block it follows, unit, tokens, tier

    async def find_logits(self) -> None:
        """Looks for the logits after the whole prompt."""
        if self._wants_logits:
            wanted = Wanted.of(self._planner.expect_logits(self._chain), self._chain.root)
            (found,) = await self._planner.fetch_any([wanted])
            if found is not None and _can_be_sampled(found[0]):
                self._logits = found

    async def find_tail(self, num_blocks: int) -> None:
        """Looks for what follows the `num_blocks` blocks that were found."""
        block = self._start + num_blocks
        found = await self._planner.tail_outside(self._chain, self._token_ids, block)
        if found is not None:
            self._tail = (block, *found)

    def added_to(self, prefix: PooledPrefix, search: Search, late: Late | None) -> PooledPrefix:
        """The prefix with everything that is there by now."""
        units = [unit for unit, _ in search.front]
        changes: dict[str, object] = {"skipped": tuple(search.skipped.items()), "late": late}
        if units:
            changes["payloads"] = (*prefix.payloads, *map(_payload, units))
            changes["sources"] = (*prefix.sources, *(name for _, name in search.front))
            changes.update(tail=None, tail_tokens=0, tail_source="")
        if self._tail is not None and self._tail[0] == self._start + len(units):
            _, unit, count, source = self._tail
            if units or count > prefix.tail_tokens:
                changes.update(tail=_payload(unit), tail_tokens=count, tail_source=source)
        if self._logits is not None:
            unit, source = self._logits
            changes.update(logits=unit.data.view(np.float32), logits_source=source)
        return dataclasses.replace(prefix, **changes)  # type: ignore[arg-type]


def _can_be_sampled(unit: RecyclableUnit) -> bool:
    """Whether stored logits are numbers that a token can be chosen by: a file from elsewhere may hold anything."""
    return math.isfinite(float(unit.data.view(np.float32).max()))  # NaN if one is; tokens at minus infinity are fine


def _payload(unit: RecyclableUnit) -> BlockPayload:
    return BlockPayload(len(unit.token_ids), unit.data, unit.dtype, unit.shape, unit.layout)
