"""Ten thousand lookups with near-identical prompts: whatever comes back holds exactly the wanted token ids.

The model does not run here. A unit's data says, row by row, which tokens from the first on it was computed from, so
that a row in the wrong place is seen whatever its key, header and checksums say.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kitelib import PoolConfig
from kitelib.abc import ModelInfo, SequenceId
from kitelib.engine.request import Run
from kitelib.engine.residency import Residency
from kitelib.fingerprint import BlockChain, root_fingerprint
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.pool import RUPool
from kitelib.stores.wanted import Wanted
from kitelib.upcycle.codec import get_codec
from kitelib.upcycle.unit import Expectation, RecyclableUnit, pack
from kitelib.yoco.planner import Planner

LOOKUPS = 10_000
BLOCK = 4
VOCAB = 50
ROW_BYTES = 32
LAYOUT = "test.layout"
STATE, OTHER_STATE = (hashlib.sha256(name).digest() for name in (b"model", b"other model"))
INFO = ModelInfo(
    name="none",
    architecture="none",
    context_tokens=1024,
    capacity_tokens=1024,
    max_sequences=4,
    max_step_tokens=64,
    vocab_size=VOCAB,
    end_token_ids=frozenset(),
    block_tokens=BLOCK,
    block_bytes=BLOCK * ROW_BYTES,
    model_state=STATE,
    execution_path={"layout": LAYOUT},
    numerics="bitwise",
    reuse_blocks=True,
    resident_idle_tokens=1024,
)
ROOT = root_fingerprint(STATE, INFO.execution_path, None)


def rows(tokens: Sequence[int], first: int, stop: int) -> bytes:
    """KV of the tokens at positions first..stop: each row depends on its own token and all before it."""
    return b"".join(hashlib.sha256(repr(list(tokens[: end + 1])).encode()).digest() for end in range(first, stop))


def logits_of(tokens: Sequence[int]) -> bytes:
    return (rows(tokens, len(tokens) - 1, len(tokens)) * VOCAB)[: VOCAB * 4]


def data_of(expected: Expectation, tokens: Sequence[int]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The data of the unit that ends where `tokens` end."""
    kv = rows(tokens, len(tokens) - len(expected.token_ids), len(tokens))
    return np.frombuffer(kv if expected.kind == "kv" else logits_of(tokens), np.uint8)


def unit_of(expected: Expectation, before: bytes, tokens: Sequence[int], **changes: Any) -> RecyclableUnit:
    assert expected.num_bytes is not None
    dtype = "uint8" if expected.kind == "kv" else "float32"
    fields: dict[str, Any] = {
        "kind": expected.kind,
        "cf": expected.cf,
        "parent": before,
        "token_ids": np.array(expected.token_ids, np.uint32),
        "model_state": expected.model_state,
        "epoch": 0,
        "created_at": 1.0,
        "layout": expected.layout,
        "dtype": dtype,
        "shape": (expected.num_bytes // (1 if dtype == "uint8" else 4),),
        "data": data_of(expected, tokens),
    }
    unit = RecyclableUnit(**fields)
    for name, value in changes.items():  # past the constructor's own checks, as a forger would
        object.__setattr__(unit, name, value)
    return unit


@dataclasses.dataclass
class Cache:
    """A pool, its planner, and everything that was stored: key -> (expectation, parent, tokens up to its end)."""

    pool: RUPool
    planner: Planner
    stored: dict[str, tuple[Expectation, bytes, list[int]]]

    @classmethod
    def create(cls, **config: Any) -> Cache:
        pool = RUPool(PoolConfig(memory_bytes=64 * 2**20, **config), ThreadDoor())
        return cls(pool, Planner(pool, INFO, LAYOUT), {})

    async def store(self, tokens: list[int]) -> None:
        """All units that a request with this prompt leaves behind."""
        chain = BlockChain(ROOT, BLOCK, tokens)
        full = len(chain.fingerprints)
        for index in range(full):
            expected = self.planner.expect_block(chain, index, tokens)
            await self.put(expected, self.planner.before(chain, index), tokens[: (index + 1) * BLOCK])
        if chain.tail:
            await self.put(self.planner.expect_tail(chain, full, chain.tail), chain.last, tokens)
        await self.put(self.planner.expect_logits(chain), chain.last, tokens)

    async def put(self, expected: Expectation, parent: bytes, tokens: list[int]) -> None:
        await self.pool.put_units([unit_of(expected, parent, tokens)], self.pool.epoch)
        self.stored[Wanted.of(expected).key] = (expected, parent, tokens)

    async def check_lookup(self, tokens: list[int], first: int) -> int:
        """Looks a prompt up and compares every byte that came back with the truth; how many tokens were found."""
        found = await self.planner.find(BlockChain(ROOT, BLOCK, tokens), tokens, first, logits=True)
        assert found.first == first
        start = first * BLOCK
        for payload in found.payloads:
            assert payload.num_tokens == BLOCK
            assert payload.data.tobytes() == rows(tokens, start, start + BLOCK), (
                f"other tokens from {start} in {tokens}"
            )
            start += BLOCK
        if found.tail is not None:
            # The tail may be the block of a prompt that went another way; only its first rows are this prompt's.
            assert 0 < found.tail_tokens <= found.tail.num_tokens
            stop = start + found.tail_tokens
            assert stop <= len(tokens)
            kept = found.tail.data[: found.tail_tokens * ROW_BYTES].tobytes()
            assert kept == rows(tokens, start, stop), f"other tokens from {start} to {stop} in {tokens}"
            start = stop
        if found.logits is not None:
            assert found.logits.tobytes() == logits_of(tokens)
        return start - first * BLOCK


def near(rng: random.Random, tokens: list[int]) -> list[int]:
    """A prompt that is almost the same: one token changed, lost, doubled, two swapped, a piece moved, or as it is."""
    found = tokens.copy()
    at = rng.randrange(len(found))
    kind = rng.randrange(8)
    if kind == 0:
        found[at] = rng.randrange(VOCAB)
    elif kind == 1 and len(found) > 1:
        del found[at]
    elif kind == 2:
        found.insert(at, found[at])
    elif kind == 3:
        other = rng.randrange(len(found))
        found[at], found[other] = found[other], found[at]
    elif kind == 4:
        found = found[at:] + found[:at]  # whole blocks move to other places
    elif kind == 5:
        del found[at + 1 :]
    elif kind == 6:
        found += [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 6))]
    return found


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """A family of prompts, each near-identical to some others."""
    family = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 30))] for _ in range(6)]
    while len(family) < count:
        family.append(near(rng, rng.choice(family)))
    return family


async def test_sound_units_are_found_in_their_place_only() -> None:
    rng = random.Random(1)
    cache = Cache.create()
    family = prompts(rng, 400)
    for tokens in family:
        await cache.store(tokens)
    tokens_found = 0
    for _ in range(LOOKUPS):
        tokens = near(rng, rng.choice(family))
        tokens_found += await cache.check_lookup(tokens, rng.choice((0, 0, 0, rng.randrange(len(tokens) // BLOCK + 1))))
    assert tokens_found > LOOKUPS  # near-identical prompts do share much: the check had something to look at
    assert cache.pool.refused == 0
    for tokens in family:
        assert await cache.check_lookup(tokens, 0) == len(tokens)


def flipped(rng: random.Random, value: bytes) -> bytes:
    bit = rng.randrange(8 * len(value))
    spoilt = bytearray(value)
    spoilt[bit // 8] ^= 1 << bit % 8
    return bytes(spoilt)


def wrong_tokens(ids: Sequence[int], rng: random.Random) -> np.ndarray[Any, np.dtype[np.uint32]]:
    found = np.array(ids, np.uint32)
    if len(found):
        found[rng.randrange(len(found))] += 1
        return found
    return np.array([7], np.uint32)


Entry = tuple[Expectation, bytes, list[int]]
Forge = Callable[[random.Random, bytes, Entry, list[bytes]], bytes]


def forged(entry: Entry, **changes: Any) -> bytes:
    """A unit with sound checksums and the right key in its header, whose data belongs to no tokens at all."""
    expected, parent, tokens = entry
    data = np.full(expected.num_bytes or 0, 0xAB, np.uint8)
    unit = unit_of(expected, parent, tokens, **{"data": data, **changes})
    return pack(unit, get_codec("raw", "none"))


# A forged unit holds other data as well, so that accepting it is seen.
FORGERIES: dict[str, Forge] = {
    "swapped values": lambda rng, value, entry, values: rng.choice(values),
    "flipped bit": lambda rng, value, entry, values: flipped(rng, value),
    "truncated": lambda rng, value, entry, values: value[: rng.randrange(len(value))],
    "extended": lambda rng, value, entry, values: value + b"\0",
    "empty": lambda rng, value, entry, values: b"",
    "wrong token ids": lambda rng, value, entry, values: forged(entry, token_ids=wrong_tokens(entry[0].token_ids, rng)),
    "other model state": lambda rng, value, entry, values: forged(entry, model_state=OTHER_STATE),
    "other layout": lambda rng, value, entry, values: forged(entry, layout="test.other"),
    "other kind": lambda rng, value, entry, values: forged(entry, kind="logits" if entry[0].kind == "kv" else "kv"),
    "other fingerprint": lambda rng, value, entry, values: forged(entry, cf=bytes(32)),
    "other parent": lambda rng, value, entry, values: forged(entry, parent=bytes(32)),
}


@pytest.mark.parametrize("forgery", FORGERIES)
async def test_planted_units_are_misses(forgery: str, caplog: pytest.LogCaptureFixture) -> None:
    """A tenth of all values is replaced under its right key, again and again; the rest keeps being served."""
    rng = random.Random(forgery)
    cache = Cache.create()
    family = prompts(rng, 120)
    for tokens in family:
        await cache.store(tokens)
    keys = list(cache.stored)
    sound = {key: cache.pool.memory.get(key) for key in keys}
    values = [value for value in sound.values() if value is not None]
    assert len(values) == len(keys)
    caplog.set_level("CRITICAL", "kitelib.pool")
    tokens_found, planted = 0, 0
    for turn in range(LOOKUPS // len(FORGERIES)):
        if turn % 50 == 0:
            for key in keys:
                cache.pool.memory.put(key, sound[key] or b"")
            for key in rng.sample(keys, len(keys) // 10):
                value = sound[key]
                assert value is not None
                spoilt = FORGERIES[forgery](rng, value, cache.stored[key], values)
                planted += spoilt != value
                cache.pool.memory.put(key, spoilt)
        tokens_found += await cache.check_lookup(near(rng, rng.choice(family)), 0)
    assert cache.pool.refused > planted // 20
    assert tokens_found > LOOKUPS // len(FORGERIES)


async def test_a_planted_unit_ends_the_run_and_is_not_offered_again() -> None:
    cache = Cache.create()
    tokens = list(range(1, 4 * BLOCK + 3))
    await cache.store(tokens)
    chain = BlockChain(ROOT, BLOCK, tokens)
    wanted = Wanted.of(cache.planner.expect_block(chain, 2, tokens))
    entry = cache.stored[wanted.key]
    cache.pool.memory.put(wanted.key, forged(entry, token_ids=np.array([9, 9, 9, 9], np.uint32)))
    found = await cache.planner.find(chain, tokens, 0, logits=False)
    assert (len(found.payloads), found.tail) == (2, None)
    assert not cache.pool.contains(wanted)
    assert await cache.check_lookup(tokens, 0) == 2 * BLOCK


async def test_units_of_an_earlier_epoch_are_misses() -> None:
    cache = Cache.create()
    tokens = list(range(1, 12))
    await cache.store(tokens)
    kept = [(key, cache.pool.memory.get(key)) for key in cache.stored]
    await cache.pool.clear()
    for key, value in kept:  # a slow writer puts back what was cleared
        assert value is not None
        cache.pool.memory.put(key, value)
    assert await cache.check_lookup(tokens, 0) == 0
    assert cache.pool.refused == 0  # nothing is wrong with them; they are only old


def shared_length(first: Sequence[int], second: Sequence[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def test_the_context_shares_exactly_what_is_the_same() -> None:
    """The index over the context against comparing with every run, while runs come, grow, and go."""
    rng = random.Random(2)
    family = prompts(rng, 200)
    roots = [ROOT, root_fingerprint(STATE, INFO.execution_path, "tenant")]
    residency = Residency(BLOCK)
    runs: list[Run] = []
    found_tokens = 0
    for turn in range(LOOKUPS):
        if rng.random() < 0.2 or not runs:
            tokens = near(rng, rng.choice(family))
            chain = BlockChain(rng.choice(roots), BLOCK, tokens)
            run = Run(tokens, chain, rng.random() < 0.9, 0, sequence=SequenceId(turn))
            runs.append(run)
        run = rng.choice(runs)
        if run.remaining and rng.random() < 0.5:
            run.computed += rng.randrange(1, run.remaining + 1)
        elif not run.remaining and rng.random() < 0.3:
            run.tokens.append(rng.randrange(VOCAB))
            run.chain.append(run.tokens[-1])
        residency.update(run)
        while len(runs) > 24:
            gone = runs.pop(rng.randrange(len(runs)))
            residency.forget(gone)
            gone.sequence, gone.computed = None, 0
        wanted = near(rng, rng.choice(runs).tokens)
        root = rng.choice(roots)
        limit = len(wanted) - 1
        candidates = list(residency.candidates(BlockChain(root, BLOCK, wanted), wanted, limit))
        for other, length in candidates:
            assert other in runs
            assert other.shared
            assert other.chain.root == root
            assert 0 < length <= min(limit, other.computed)
            assert other.tokens[:length] == wanted[:length]
        lengths = [length for _, length in candidates]
        assert lengths == sorted(lengths, reverse=True)
        best = max(
            (
                min(shared_length(other.tokens, wanted), other.computed, limit)
                for other in runs
                if other.shared and other.chain.root == root
            ),
            default=0,
        )
        assert max(lengths, default=0) == best
        found_tokens += best
    assert found_tokens > LOOKUPS
    for run in runs:
        residency.forget(run)
    assert not residency._holders
    assert not residency._roots
