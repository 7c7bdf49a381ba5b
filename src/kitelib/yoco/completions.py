"""Completions as recyclable units: what followed a prompt.

Two kinds of use, told apart by what the unit's fingerprint is derived from. Under the prompt's own fingerprint lies the
last thing that anybody was told after this prompt, however it was chosen: a guess, which the model verifies. Under a
fingerprint that also covers the sampling options lies what exactly these options give: an answer, where they are
deterministic.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import anyio
import numpy as np

from kitelib.abc import ModelInfo
from kitelib.config import SamplingParams
from kitelib.errors import InvalidRequestError
from kitelib.fingerprint import BlockChain, Fingerprint, derived_fingerprint, encode_fields, end_fingerprint
from kitelib.stores.pool import RUPool
from kitelib.stores.wanted import Wanted
from kitelib.upcycle.unit import Expectation, RecyclableUnit

__all__ = ["Completion", "Completions", "sampling_key"]

LAYOUT: Final = "kite.completion"
# They decide how much of the text is wanted, not which text it is; a seed is added where something is drawn.
_NO_PART: Final = frozenset({"max_tokens", "n", "logprobs", "seed"})


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """What followed a prompt.

    Attributes:
        token_ids: the tokens, without the one that ended the text.
        ended: the text was over after them; False if it was cut by length.
        source: the tier it came from.
    """

    token_ids: tuple[int, ...]
    ended: bool
    source: str = "memory"


def sampling_key(params: SamplingParams) -> bytes | None:
    """Canonical bytes of the options that decide which text follows a prompt; None if chance or logprobs are asked for.

    None, too, for options that can't be written down, such as a schema that is no JSON.
    """
    if params.logprobs is not None or not (params.greedy or (params.seed is not None and params.n == 1)):
        return None
    names = [each.name for each in dataclasses.fields(params) if each.name not in _NO_PART]
    plain: dict[str, Any] = {name: getattr(params, name) for name in names}
    plain["logit_bias"] = {str(token): float(bias) for token, bias in params.logit_bias.items()}
    try:
        if isinstance(params.json_schema, Mapping):  # as text: the order of its keys is that of the answer's
            plain["json_schema"] = json.dumps(dict(params.json_schema))
        return encode_fields("kite.sampling", plain, None if params.greedy else params.seed)
    except (InvalidRequestError, TypeError, ValueError):
        return None


class Completions:
    """Completions in the pool. `unit` may be called from any thread, `find` belongs to the event loop."""

    def __init__(self, pool: RUPool, info: ModelInfo) -> None:
        self._pool = pool
        self._info = info

    def unit(
        self, chain: BlockChain, sampling: bytes | None, token_ids: Sequence[int], *, ended: bool, epoch: int
    ) -> RecyclableUnit:
        """The unit of what followed the prompt of `chain`; `sampling` as of `sampling_key`, None for a mere guess."""
        data = np.array([int(ended), *token_ids], np.uint32)
        return RecyclableUnit(
            kind="completion",
            cf=self._key(chain, sampling),
            parent=_parent(chain, sampling),
            token_ids=np.array(chain.tail, np.uint32),
            model_state=self._info.model_state,
            epoch=epoch,
            created_at=time.time(),
            layout=LAYOUT,
            dtype="uint32",
            shape=(len(data),),
            data=data.view(np.uint8),
        )

    def wanted(self, chain: BlockChain, sampling: bytes | None) -> Wanted:
        """What such a unit must be."""
        cf = self._key(chain, sampling)
        expected = Expectation(
            "completion",
            cf,
            list(chain.tail),
            self._info.model_state,
            LAYOUT,
            max_bytes=4 * (self._info.context_tokens + 1),
        )
        return Wanted.of(expected, chain.root)

    @staticmethod
    def _key(chain: BlockChain, sampling: bytes | None) -> Fingerprint:
        return end_fingerprint(_parent(chain, sampling), chain.tail)

    async def find(self, chain: BlockChain, sampling: bytes | None, *, patience_s: float = 0.0) -> Completion | None:
        """What is known to follow a prompt. Whatever a store does wrong is a miss; outer tiers are asked for as long as
        `patience_s` seconds."""
        wanted = self.wanted(chain, sampling)
        units = await self._pool.fetch_run([wanted])
        if units:
            return self._read(*units[0])
        if patience_s and self._pool.tiers.tiers:
            with anyio.move_on_after(patience_s):
                (found,) = await self._pool.fetch_any([wanted])
                if found is not None:
                    return self._read(*found)
        return None

    def _read(self, unit: RecyclableUnit, source: str) -> Completion | None:
        """None if its content makes no sense for this model."""
        if unit.dtype != "uint32" or len(unit.data) < 8 or len(unit.data) % 4:
            return None
        first, *token_ids = unit.data.view(np.uint32).tolist()
        if first > 1 or len(token_ids) > self._info.context_tokens or max(token_ids) >= self._info.vocab_size:
            return None
        return Completion(tuple(token_ids), bool(first), source)


def _parent(chain: BlockChain, sampling: bytes | None) -> Fingerprint:
    return chain.last if sampling is None else _sampled(chain.last, sampling)


@functools.lru_cache(maxsize=256)
def _sampled(last: Fingerprint, sampling: bytes) -> Fingerprint:
    return derived_fingerprint(last, "sampling", sampling)
