"""What the pool has for a prompt.

A prompt is looked up from its first block that is not in the engine's context on: full blocks up to the first miss,
then what continues them in part, then the logits after the whole prompt. Nothing is attached here;
the scheduler decides what of it still helps when the request is admitted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kitelib.abc import BlockPayload, ModelInfo
from kitelib.fingerprint import BlockChain, Fingerprint, TokenIds, end_fingerprint
from kitelib.stores.pool import RUPool, Wanted
from kitelib.upcycle.unit import Expectation, RecyclableUnit

__all__ = ["EMPTY_PREFIX", "Planner", "PooledPrefix"]

LOGITS_LAYOUT = "kite.logits"


@dataclasses.dataclass(frozen=True, slots=True)
class PooledPrefix:
    """Verified units for one prompt.

    Attributes:
        first: block index of the first payload.
        payloads: consecutive full blocks from `first` on.
        tail: KV that follows the last payload (or block `first - 1`); None if none is stored.
        tail_tokens: how many of its first tokens are the prompt's.
        logits: float32 (vocab_size,), after the last token of the whole prompt; read-only. None if not stored.
    """

    first: int = 0
    payloads: tuple[BlockPayload, ...] = ()
    tail: BlockPayload | None = None
    tail_tokens: int = 0
    logits: npt.NDArray[np.float32] | None = None


EMPTY_PREFIX = PooledPrefix()


class Planner:
    """Looks prompts up in the pool. Used on the event loop; checks and copies run in threads."""

    def __init__(self, pool: RUPool, info: ModelInfo, layout: str) -> None:
        self._pool = pool
        self._info = info
        self._layout = layout

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

    async def find(self, chain: BlockChain, token_ids: Sequence[int], first: int, *, logits: bool) -> PooledPrefix:
        """Looks a prompt up from block `first` on. Never raises for what a store did: that is a miss."""
        if not self._pool.enabled or not self._info.reuse_blocks:
            return EMPTY_PREFIX
        blocks = [
            Wanted.of(self.expect_block(chain, index, token_ids)) for index in range(first, len(chain.fingerprints))
        ]
        run = await self._pool.leading_run(blocks)
        units = await self._pool.fetch_run(blocks[:run])
        tail, tail_tokens = await self._find_tail(chain, token_ids, first + len(units))
        found: list[RecyclableUnit] = []
        if logits:
            wanted = Wanted.of(self.expect_logits(chain))
            found = await self._pool.fetch_run([wanted][: await self._pool.leading_run([wanted])])
        return PooledPrefix(
            first,
            tuple(_payload(unit) for unit in units),
            _payload(tail) if tail else None,
            tail_tokens,
            found[0].data.view(np.float32) if found else None,
        )

    async def _find_tail(
        self, chain: BlockChain, token_ids: Sequence[int], block: int
    ) -> tuple[RecyclableUnit | None, int]:
        """A stored unit that goes on from `block` at least in part, and how many of its tokens are the prompt's.

        That is the tail of an earlier prompt or answer, or the block in which an earlier prompt took another way.
        """
        size = self._info.block_tokens
        ids = token_ids[block * size : (block + 1) * size]
        parent = self.before(chain, block)
        exact = await self._longest_tail(chain, block, ids)
        sibling = self._pool.siblings.best(parent, ids)
        if sibling is not None and sibling[2] > exact:
            cf, tokens, common = sibling
            units = await self._pool.fetch_run([Wanted.of(self._kv(cf, tokens))])
            if units:
                return units[0], common
            self._pool.siblings.discard(parent, cf)
        if exact:
            units = await self._pool.fetch_run([Wanted.of(self.expect_tail(chain, block, ids[:exact]))])
            if units:
                return units[0], exact
        return None, 0

    async def _longest_tail(self, chain: BlockChain, block: int, ids: Sequence[int]) -> int:
        """Tokens of the longest stored tail that `ids` starts with."""
        for count in range(min(self._info.block_tokens - 1, len(ids)), 0, -1):
            if await self._pool.leading_run([Wanted.of(self.expect_tail(chain, block, ids[:count]))]):
                return count
        return 0


def _payload(unit: RecyclableUnit) -> BlockPayload:
    return BlockPayload(len(unit.token_ids), unit.data, unit.dtype, unit.shape, unit.layout)
