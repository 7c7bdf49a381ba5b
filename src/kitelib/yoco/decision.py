"""Load or recompute: how long bringing blocks from the outer tiers takes, beside computing them again.

With `c` seconds to compute a block, `l` to load one, and `L` before the first byte, k blocks take

* L + k l if the request waits for all of them,
* k c if all are computed,
* and, when the front is computed while the back is loaded, about (L + k l) c / (c + l): both ends meet there.

The last is never slower than computing, because computing never waits: what arrives too late is not used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from kitelib.stores.pool import RUPool
from kitelib.stores.tiered import Span

__all__ = ["Costs", "Verdict", "decide", "load_costs", "patience"]

_PATIENCE = 0.03  # of the time that computing would take: the most that a request waits for tiers in vain
_MIN_PATIENCE_S = 0.004
_FIRST_PATIENCE = 0.15  # the same before a tier was read for the first time, when its connections may have to open
_MIN_FIRST_PATIENCE_S = 0.05
_MIN_GAIN = 0.1  # overlapping has to save this share of the time, or it is not worth the traffic
_MIN_BLOCKS = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Costs:
    """Seconds to the first byte, and per block after it."""

    latency_s: float
    block_s: float

    def seconds(self, num_blocks: int) -> float:
        """Seconds to load that many blocks."""
        return self.latency_s + num_blocks * self.block_s if num_blocks else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What to do with the blocks that outer tiers have.

    Attributes:
        wait: spans to wait for, from the front.
        overlap: spans to load from the back while the request computes from the front.
        skip: spans that are slower to load than to compute.
    """

    wait: tuple[Span, ...] = ()
    overlap: tuple[Span, ...] = ()
    skip: tuple[Span, ...] = ()


def patience(compute_s: float, *, measured: bool) -> float:
    """Seconds that a request may wait for the outer tiers, given what computing everything would take."""
    if measured:
        return max(_MIN_PATIENCE_S, compute_s * _PATIENCE)
    return max(_MIN_FIRST_PATIENCE_S, compute_s * _FIRST_PATIENCE)


def load_costs(span: Span, pool: RUPool, block_bytes: int) -> Costs:
    """What loading blocks of a span is expected to take, with checking and decoding them."""
    cost = span.tier.cost
    latency = cost.read_seconds(0)
    transfer = cost.read_seconds(block_bytes) - latency
    return Costs(latency, transfer + block_bytes * pool.decode_s_per_byte)


def decide(spans: Sequence[Span], costs: Sequence[Costs], compute_block_s: float, patience_s: float) -> Verdict:
    """Waits for the spans that fit into the patience, overlaps what follows if that gains, and skips the rest.

    Args:
        spans: what the tiers have, in order.
        costs: one per span.
        compute_block_s: seconds to compute one block.
        patience_s: seconds that are left to wait.
    """
    waited, count = 0.0, 0
    for span, cost in zip(spans, costs, strict=True):
        seconds = cost.seconds(span.count)
        if waited + seconds > patience_s or seconds >= span.count * compute_block_s:
            break
        waited += seconds
        count += 1
    rest, rest_costs = tuple(spans[count:]), costs[count:]
    # From the end: a slow last tier must not spoil what a faster one before it can give.
    stop = len(rest)
    while stop:
        load = sum(cost.seconds(span.count) for span, cost in zip(rest[:stop], rest_costs, strict=False))
        blocks = sum(span.count for span in rest[:stop])
        compute = blocks * compute_block_s
        loaded = blocks * compute / (compute + load) if compute + load else 0.0
        if loaded >= _MIN_BLOCKS and loaded >= _MIN_GAIN * blocks:
            break
        stop -= 1
    return Verdict(tuple(spans[:count]), rest[:stop], rest[stop:])
