"""Replays a trace of requests through the memory tier, and through what it should be compared with.

A trace names the KV blocks of each request's prompt; equal ids are equal blocks after equal prefixes, as in the traces
published with Mooncake (Qin et al., FAST 2025). Nothing is computed, and time is the trace's own, so hours take seconds.

Everywhere, a hit is a block of the leading run: a prompt's blocks from the first one up to the first that is not there.
A request first looks its blocks up, then uses those of the run and stores the others, in the prompt's order.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import json
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from kitelib.errors import InvalidRequestError
from kitelib.fingerprint import Fingerprint, end_fingerprint, model_key, store_key
from kitelib.stores.memory import MemoryStore, entry_bytes
from kitelib.upcycle.codec import get_codec
from kitelib.upcycle.unit import HEAD_BYTES, MAX_TOKEN_IDS, RecyclableUnit, pack

__all__ = [
    "Request",
    "Trace",
    "hits_of_belady",
    "hits_of_infinite",
    "hits_of_lru",
    "hits_of_store",
    "read_trace",
    "stand_ins",
]

Progress = Callable[[float], None]
"""Called now and then with the done part, 0 to 1."""

_MODEL_STATE: Final = hashlib.sha256(b"kite.replay").digest()
_ROOT: Final = Fingerprint(hashlib.sha256(b"kite.replay.root").digest())
_REPORT_EVERY: Final = 256
_NEVER: Final = math.inf


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace.

    Attributes:
        at_s: when it came, seconds since the trace began.
        blocks: number of each block of its prompt, in order; blocks are numbered from 0 as they first appear.
    """

    at_s: float
    blocks: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """A whole trace.

    Attributes:
        requests: in order of time.
        parents: per block, the block before it, or -1.
        block_tokens: tokens in one block.
    """

    requests: tuple[Request, ...]
    parents: tuple[int, ...]
    block_tokens: int

    @property
    def num_blocks(self) -> int:
        """Blocks of all requests together."""
        return sum(len(request.blocks) for request in self.requests)

    @property
    def num_distinct(self) -> int:
        """The working set: different blocks."""
        return len(self.parents)


def read_trace(
    path: str | os.PathLike[str],
    block_tokens: int,
    *,
    max_requests: int | None = None,
    progress: Progress | None = None,
) -> Trace:
    """Reads a trace: one JSON object a line, with ``timestamp`` (ms), ``input_length`` (tokens) and ``hash_ids``.

    Args:
        block_tokens: tokens in one block of the trace.
        max_requests: stop after so many; None means never.

    Raises:
        InvalidRequestError: the file can't be read, holds no request, or a line is wrong; the message has its number.
    """
    if not 1 <= block_tokens <= MAX_TOKEN_IDS:
        raise InvalidRequestError(f"block_tokens is {block_tokens}; give 1 to {MAX_TOKEN_IDS}")
    numbers: dict[int, int] = {}
    parents: list[int] = []
    requests: list[Request] = []
    try:
        with open(path, "rb") as file:
            size = max(os.fstat(file.fileno()).st_size, 1)
            for line_number, line in enumerate(file, start=1):
                if len(requests) == max_requests:
                    break
                if progress is not None and line_number % _REPORT_EVERY == 0:
                    progress(min(file.tell() / size, 1.0))
                if not line.strip():
                    continue
                try:
                    at_ms, ids = _parse(line, block_tokens)
                    if requests and at_ms / 1000 < requests[-1].at_s:
                        raise ValueError(f"timestamp {at_ms} is earlier than that of the request before")
                    blocks = _number(ids, numbers, parents)
                except (ValueError, RecursionError) as error:
                    raise InvalidRequestError(f"line {line_number} of {os.fspath(path)!r}: {error}") from error
                requests.append(Request(at_ms / 1000, blocks))
    except OSError as error:
        raise InvalidRequestError(f"the trace {os.fspath(path)!r} can't be read: {error.strerror}") from error
    if not parents:
        raise InvalidRequestError(f"the trace {os.fspath(path)!r} holds no block; give a file of JSON lines")
    return Trace(tuple(requests), tuple(parents), block_tokens)


def _parse(line: bytes, block_tokens: int) -> tuple[float, list[int]]:
    try:
        entry: Any = json.loads(line)
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8; give a file of JSON lines") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg}, at column {error.colno}") from None
    if not isinstance(entry, dict):
        raise ValueError(f"is a {type(entry).__name__}, not an object")  # noqa: TRY004 - of the file, not of a caller
    at_ms: Any = entry.get("timestamp")
    num_tokens: Any = entry.get("input_length")
    ids: Any = entry.get("hash_ids")
    if isinstance(at_ms, bool) or not isinstance(at_ms, (int, float)) or not 0 <= at_ms < math.inf:
        raise ValueError(f"timestamp is {at_ms!r}; it must be a number of milliseconds")
    if not isinstance(num_tokens, int) or isinstance(num_tokens, bool) or num_tokens < 0:
        raise ValueError(f"input_length is {num_tokens!r}; it must be a number of tokens")
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise ValueError("hash_ids must be a list of whole numbers")
    if len(set(ids)) < len(ids):
        raise ValueError("hash_ids names a block twice")
    if len(ids) != -(-num_tokens // block_tokens):
        raise ValueError(
            f"hash_ids has {len(ids)} blocks, but {num_tokens} tokens are {-(-num_tokens // block_tokens)} blocks of "
            f"{block_tokens}; was the trace made with another --block-tokens?"
        )
    return at_ms, ids


def _number(ids: Sequence[int], numbers: dict[int, int], parents: list[int]) -> tuple[int, ...]:
    blocks: list[int] = []
    previous = -1
    for one in ids:
        block = numbers.setdefault(one, len(parents))
        if block == len(parents):
            parents.append(previous)
        elif parents[block] != previous:
            raise ValueError(f"hash_ids has block {one} after another block than before; an id must name a prefix")
        blocks.append(block)
        previous = block
    return tuple(blocks)


class _TraceClock:
    """The time of the trace."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


def hits_of_store(
    trace: Trace,
    items: Sequence[tuple[str, bytes]],
    capacity: int,
    *,
    ttl_s: float | None = None,
    progress: Progress | None = None,
) -> int:
    """Hits of this package's `MemoryStore`, with room for `capacity` blocks.

    Args:
        items: `stand_ins` of the trace.
        ttl_s: time to live, as in `MemoryStore`.
    """
    clock = _TraceClock()
    store = MemoryStore(capacity * entry_bytes(*items[0]), ttl_s=ttl_s, clock=clock)
    hits = 0
    for request in _watched(trace, progress):
        clock.now = request.at_s
        run = 0
        for block in request.blocks:
            if store.get(items[block][0]) is None:
                break
            run += 1
        for block in request.blocks[run:]:
            store.put(*items[block])
        hits += run
    return hits


def stand_ins(trace: Trace) -> list[tuple[str, bytes]]:
    """Per block, the key and the head of a real unit, which tells a store what goes on from what; all of one size."""
    ids = np.zeros(trace.block_tokens, np.uint32)
    unit = RecyclableUnit(
        kind="kv",
        cf=end_fingerprint(_ROOT, ids),
        parent=_ROOT,
        token_ids=ids,
        model_state=_MODEL_STATE,
        epoch=0,
        created_at=0.0,
        layout="replay",
        dtype="uint8",
        shape=(0,),
        data=np.zeros(0, np.uint8),
    )
    # The fixed part ends with the fingerprint, that of the parent and the model state: docs/format.md.
    start = pack(unit, get_codec("raw", "none"))[: HEAD_BYTES - 96]
    model = model_key(_MODEL_STATE)
    cfs = [Fingerprint(hashlib.sha256(block.to_bytes(8, "little")).digest()) for block in range(trace.num_distinct)]
    cfs.append(_ROOT)  # found at -1, the parent of first blocks
    return [
        (store_key(model, "kv", cf), start + cf + cfs[parent] + _MODEL_STATE)
        for cf, parent in zip(cfs, trace.parents, strict=False)
    ]


def hits_of_lru(trace: Trace, capacity: int, *, progress: Progress | None = None) -> int:
    """Hits of plain LRU with room for `capacity` blocks."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in _watched(trace, progress):
        hits += _leading_run(request.blocks, held)
        for block in request.blocks:
            if block in held:
                held.move_to_end(block)
                continue
            if len(held) >= capacity:
                held.popitem(last=False)
            held[block] = None
    return hits


def hits_of_infinite(trace: Trace) -> int:
    """Hits if nothing was ever evicted."""
    held: set[int] = set()
    hits = 0
    for request in trace.requests:
        hits += _leading_run(request.blocks, held)
        held.update(request.blocks)
    return hits


def hits_of_belady(trace: Trace, capacity: int, *, progress: Progress | None = None) -> int:
    """Hits of the optimum that knows the future, with room for `capacity` blocks; O(n log n).

    What is used again last goes first (Belady, "A study of replacement algorithms for a virtual-storage computer", IBM
    Systems Journal 5(2), 1966), the deeper block first among equals; a block that would be the next to go isn't stored.
    A block is used whenever one after it is, so what is held are always whole prefixes, and the rule stays optimal
    although only leading runs count.
    """
    if capacity < 1:
        return 0
    next_uses = _next_uses(trace)
    held: dict[int, tuple[float, int]] = {}
    farthest: list[tuple[float, int, int]] = []
    hits = 0
    for request, uses in zip(_watched(trace, progress), next_uses, strict=True):
        hits += _leading_run(request.blocks, held)
        for depth, (block, use) in enumerate(zip(request.blocks, uses, strict=True)):
            rank = (use, depth)
            if use is _NEVER:
                held.pop(block, None)
                continue
            if block not in held and len(held) >= capacity:
                while held.get(farthest[0][2]) != (-farthest[0][0], -farthest[0][1]):
                    heapq.heappop(farthest)  # used since, or gone
                if (-farthest[0][0], -farthest[0][1]) <= rank:
                    continue
                del held[heapq.heappop(farthest)[2]]
            held[block] = rank
            heapq.heappush(farthest, (-use, -depth, block))
    return hits


def _next_uses(trace: Trace) -> list[list[float]]:
    """Per request and block, the index of the next request that uses the block."""
    following: list[float] = [_NEVER] * trace.num_distinct
    found: list[list[float]] = []
    for index in range(len(trace.requests) - 1, -1, -1):
        blocks = trace.requests[index].blocks
        found.append([following[block] for block in blocks])
        for block in blocks:
            following[block] = index
    found.reverse()
    return found


def _leading_run(blocks: Sequence[int], held: Any) -> int:
    for count, block in enumerate(blocks):
        if block not in held:
            return count
    return len(blocks)


def _watched(trace: Trace, progress: Progress | None) -> Iterator[Request]:
    for index, request in enumerate(trace.requests):
        if progress is not None and index % _REPORT_EVERY == 0:
            progress(index / len(trace.requests))
        yield request
