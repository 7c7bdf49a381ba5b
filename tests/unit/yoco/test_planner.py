"""What the pool has for a prompt: blocks up to the first miss, the longest tail after them, the logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitelib.abc import ModelInfo
from kitelib.config import PoolConfig
from kitelib.fingerprint import block_fingerprint
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.pool import RUPool
from kitelib.stores.wanted import Wanted
from kitelib.upcycle.unit import RecyclableUnit
from kitelib.yoco.planner import EMPTY_PREFIX, Planner, PooledPrefix
from tests.support.units import (
    BLOCK_TOKENS,
    INFO,
    LAYOUT,
    TOKEN_BYTES,
    chain_of,
    kv_unit,
    logits_unit,
    units_of,
)

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]  # two blocks and a tail of three


async def pool_with(units: Sequence[RecyclableUnit], memory_bytes: int = 10**7) -> RUPool:
    pool = RUPool(PoolConfig(memory_bytes=memory_bytes), ThreadDoor())
    await pool.put_many([pool.encode(unit) for unit in units], pool.epoch)
    return pool


async def find(
    units: Sequence[RecyclableUnit],
    prompt: Sequence[int],
    first: int = 0,
    *,
    logits: bool = True,
    info: ModelInfo = INFO,
) -> PooledPrefix:
    planner = Planner(await pool_with(units), info, LAYOUT)
    return await planner.find(chain_of(prompt), prompt, first, logits=logits)


def tokens_in(prefix: PooledPrefix) -> list[int]:
    payloads = [*prefix.payloads, *([prefix.tail] if prefix.tail else [])]
    return [int(token) for payload in payloads for token in payload.data[::TOKEN_BYTES]]


async def test_a_whole_prompt_is_found() -> None:
    prefix = await find(units_of(PROMPT), PROMPT)
    assert (prefix.first, len(prefix.payloads)) == (0, 2)
    assert prefix.tail is not None
    assert [payload.num_tokens for payload in [*prefix.payloads, prefix.tail]] == [4, 4, 3]
    assert tokens_in(prefix) == PROMPT
    assert all(payload.layout == LAYOUT and payload.dtype == "float16" for payload in prefix.payloads)
    assert prefix.logits is not None
    assert prefix.logits.dtype == np.float32
    assert prefix.logits.tolist() == [sum(PROMPT) + i for i in range(INFO.vocab_size)]


async def test_an_empty_pool_has_nothing() -> None:
    assert await find([], PROMPT) == EMPTY_PREFIX


async def test_a_miss_in_the_middle_ends_the_run() -> None:
    units = units_of(PROMPT)
    assert tokens_in(await find(units[1:], PROMPT)) == []
    prefix = await find([units[0], *units[2:]], PROMPT)
    assert tokens_in(prefix) == PROMPT[:4]  # and the tail, which follows block 1, is not looked for
    assert prefix.logits is not None  # logits stand for themselves


async def test_the_search_starts_at_the_first_block_that_is_not_in_the_context() -> None:
    prefix = await find(units_of(PROMPT), PROMPT, 1)
    assert (prefix.first, tokens_in(prefix)) == (1, PROMPT[4:])
    prefix = await find(units_of(PROMPT), PROMPT, 2)
    assert (prefix.first, prefix.payloads, tokens_in(prefix)) == (2, (), PROMPT[8:])


@pytest.mark.parametrize("known", [1, 2, 3])
async def test_the_longest_tail_that_is_stored_is_taken(known: int) -> None:
    units = [kv_unit(PROMPT, 0, 4), *(kv_unit(PROMPT, 4, 4 + count) for count in range(1, known + 1))]
    assert tokens_in(await find(units, PROMPT)) == PROMPT[: 4 + known]


async def test_a_tail_of_other_tokens_is_not_taken() -> None:
    other = [*PROMPT[:8], 9, 9, 9]
    assert tokens_in(await find(units_of(other), PROMPT)) == PROMPT[:8]
    assert tokens_in(await find([*units_of(other), kv_unit(PROMPT, 8, 9)], PROMPT)) == PROMPT[:9]


async def test_logits_are_only_looked_for_when_wanted_and_only_of_the_whole_prompt() -> None:
    assert (await find(units_of(PROMPT), PROMPT, logits=False)).logits is None
    assert (await find([logits_unit(PROMPT[:-1])], PROMPT)).logits is None
    assert (await find([logits_unit([*PROMPT, 3])], PROMPT)).logits is None


async def test_a_prompt_of_whole_blocks_has_no_tail() -> None:
    prompt = PROMPT[:8]
    prefix = await find(units_of(prompt), prompt)
    assert (tokens_in(prefix), prefix.tail) == (prompt, None)
    assert prefix.logits is not None


async def test_a_model_without_blocks_and_a_pool_without_memory_are_never_asked() -> None:
    assert await find(units_of(PROMPT), PROMPT, info=dataclasses.replace(INFO, reuse_blocks=False)) == EMPTY_PREFIX
    pool = await pool_with([], 0)
    assert await Planner(pool, INFO, LAYOUT).find(chain_of(PROMPT), PROMPT, 0, logits=True) == EMPTY_PREFIX
    assert pool.memory.counters().misses == 0


async def test_units_of_another_model_layout_or_size_are_no_hit() -> None:
    """B1: the layout is part of what a unit must be."""
    pool = await pool_with(units_of(PROMPT))
    for planner in (
        Planner(pool, dataclasses.replace(INFO, model_state=b"x" * 32), LAYOUT),
        Planner(pool, INFO, "other.layout"),
        Planner(pool, dataclasses.replace(INFO, block_bytes=INFO.block_bytes * 2, vocab_size=20), LAYOUT),
    ):
        prefix = await planner.find(chain_of(PROMPT), PROMPT, 0, logits=True)
        assert prefix.payloads == ()
        assert prefix.tail is None


async def test_what_another_prompt_stored_under_the_same_key_is_refused() -> None:
    # As if two prompts had the same fingerprint: the value is there, but it is of other tokens.
    pool = await pool_with([])
    planner = Planner(pool, INFO, LAYOUT)
    chain = chain_of(PROMPT)
    wanted = Wanted.of(planner.expect_block(chain, 0, PROMPT))
    _, value = pool.encode(kv_unit([4, 3, 2, 1], 0, 4))
    await pool.memory.put_many([(wanted.key, value)])
    prefix = await planner.find(chain, PROMPT, 0, logits=False)
    assert prefix.payloads == ()
    assert pool.refused == 1
    assert not pool.contains(wanted)


def test_expectations_are_the_keys_of_the_units() -> None:
    planner = Planner(RUPool(PoolConfig(memory_bytes=1), ThreadDoor()), INFO, LAYOUT)
    chain = chain_of(PROMPT)
    expected = [
        planner.expect_block(chain, 0, PROMPT),
        planner.expect_block(chain, 1, PROMPT),
        planner.expect_tail(chain, 2, PROMPT[8:]),
        planner.expect_logits(chain),
    ]
    for each, unit in zip(expected, units_of(PROMPT), strict=True):
        assert each.cf == unit.cf
        assert each.num_bytes == len(unit.data)
        assert list(each.token_ids) == unit.token_ids.tolist()
    assert planner.before(chain, 0) == chain.root
    assert planner.before(chain, 2) == block_fingerprint(chain.fingerprints[0], PROMPT[4:8])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), max_size=5),
    st.lists(st.integers(0, 2), min_size=1, max_size=14),
)
async def test_only_tokens_of_the_prompt_are_ever_given(stored: list[list[int]], prompt: list[int]) -> None:
    """B8: a key covers exactly the tokens of its unit, so a whole block never answers for a part of it."""
    prefix = await find([unit for tokens in stored for unit in units_of(tokens)], prompt)
    found = tokens_in(prefix)
    assert found == prompt[: len(found)]
    # The best of what is stored: whole blocks first, then a tail that some stored prompt ended with.
    common = [
        next((i for i, (a, b) in enumerate(zip(s, prompt, strict=False)) if a != b), min(len(s), len(prompt)))
        for s in stored
    ]
    blocks = max((length // BLOCK_TOKENS for length in common), default=0)
    ends = [len(s) for s, length in zip(stored, common, strict=True) if length == len(s)]
    best = max([blocks * BLOCK_TOKENS, *(end for end in ends if end // BLOCK_TOKENS == blocks)])
    assert len(found) == best
    assert (prefix.logits is not None) == (prompt in stored)
