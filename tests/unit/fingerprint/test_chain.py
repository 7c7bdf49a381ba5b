import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitelib.errors import InvalidRequestError
from kitelib.fingerprint import (
    BlockChain,
    as_token_ids,
    block_fingerprint,
    block_fingerprints,
    encode_fields,
    end_fingerprint,
    model_key,
    root_fingerprint,
    store_key,
)

ROOT = root_fingerprint(bytes(32), {"backend": "test"}, None)
token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=70)
block_sizes = st.sampled_from([1, 8, 16, 32])


def by_definition(tag: str, previous: bytes, ids: list[int]) -> bytes:
    raw = b"".join(token.to_bytes(4, "little") for token in ids)
    return hashlib.sha256(encode_fields(tag, previous, len(ids), raw)).digest()


@settings(deadline=None)
@given(token_lists, block_sizes)
def test_blocks_follow_the_definition(ids, block_tokens):
    previous, expected = ROOT, []
    for start in range(0, len(ids) - block_tokens + 1, block_tokens):
        previous = by_definition("kite.cf.block", previous, ids[start : start + block_tokens])
        expected.append(previous)
    found = block_fingerprints(ROOT, ids, block_tokens)
    assert found == expected
    tail = ids[len(found) * block_tokens :]
    assert end_fingerprint(previous, tail) == by_definition("kite.cf.end", previous, tail)


@settings(deadline=None)
@given(token_lists, block_sizes, st.data())
def test_a_growing_chain_equals_the_whole(ids, block_tokens, data):
    cut = data.draw(st.integers(0, len(ids)))
    chain = BlockChain(ROOT, block_tokens, ids[:cut])
    completed = [chain.append(token) for token in ids[cut:]]
    whole = BlockChain(ROOT, block_tokens, ids)
    assert chain.fingerprints == whole.fingerprints == block_fingerprints(ROOT, ids, block_tokens)
    assert (chain.tail, chain.end(), chain.num_tokens) == (whole.tail, whole.end(), len(ids))
    assert [cf for cf in completed if cf] == whole.fingerprints[cut // block_tokens :]


@settings(deadline=None)
@given(token_lists, token_lists, block_sizes)
def test_chains_agree_exactly_on_their_common_blocks(left, right, block_tokens):
    common = 0
    while common < min(len(left), len(right)) and left[common] == right[common]:
        common += 1
    one, two = (block_fingerprints(ROOT, ids, block_tokens) for ids in (left, right))
    agree = [a == b for a, b in zip(one, two, strict=False)]
    assert agree == [index < common // block_tokens for index in range(len(agree))]


def test_a_chain_can_go_on_from_any_block():
    ids = list(range(64))
    whole = block_fingerprints(ROOT, ids, 16)
    assert block_fingerprints(whole[1], ids[32:], 16) == whole[2:]
    assert block_fingerprint(whole[0], ids[16:32]) == whole[1]


def test_one_changed_token_changes_every_later_block():
    ids = list(range(64))
    whole = block_fingerprints(ROOT, ids, 16)
    ids[20] += 1
    changed = block_fingerprints(ROOT, ids, 16)
    assert [a == b for a, b in zip(whole, changed, strict=True)] == [True, False, False, False]


def test_a_prompt_of_full_blocks_differs_from_its_last_block():
    """A whole prompt and the block it ends with are different computations: one has logits, the other has not."""
    ids = list(range(16))
    (block,) = block_fingerprints(ROOT, ids, 16)
    assert len({block, end_fingerprint(block, []), end_fingerprint(ROOT, ids), ROOT}) == 4


def test_block_size_is_part_of_the_identity():
    assert block_fingerprints(ROOT, range(16), 16)[0] != block_fingerprints(ROOT, range(16), 8)[1]


def test_copies_are_independent():
    chain = BlockChain(ROOT, 4, range(6))
    twin = chain.copy()
    twin.extend([1, 2, 3, 4])
    assert (chain.num_tokens, chain.tail, len(chain.fingerprints)) == (6, [4, 5], 1)
    assert (twin.num_tokens, twin.tail, len(twin.fingerprints)) == (10, [3, 4], 2)
    assert chain.last == twin.fingerprints[0]


@pytest.mark.parametrize(
    "kind", [list, tuple, np.array, lambda ids: np.array(ids, ">u4"), lambda ids: np.array(ids, "u8")]
)
def test_any_form_of_the_same_ids_is_the_same(kind):
    ids = [0, 1, 2**31, 2**32 - 1]
    assert block_fingerprints(ROOT, kind(ids), 2) == block_fingerprints(ROOT, ids, 2)
    assert as_token_ids(kind(ids)).tolist() == ids


@pytest.mark.parametrize(
    "bad", [[-1], [2**32], [1.5], ["1"], [True], [[1, 2]], [2**70], [None], np.array([1.0]), [[1], [2, 3]]]
)
def test_what_is_no_token_id_is_refused(bad):
    with pytest.raises(InvalidRequestError, match="token id"):
        as_token_ids(bad)


def test_a_chain_refuses_a_bad_token_and_stays_as_it_was():
    chain = BlockChain(ROOT, 2, [5])
    for bad in (-1, 2**32):
        with pytest.raises(InvalidRequestError, match="token id"):
            chain.append(bad)
    assert (chain.tail, chain.fingerprints) == ([5], [])


def test_wrong_sizes_are_refused():
    with pytest.raises(InvalidRequestError, match="31 bytes"):
        block_fingerprints(ROOT[:31], [1], 1)
    with pytest.raises(InvalidRequestError, match="block_tokens is 0"):
        block_fingerprints(ROOT, [1], 0)
    with pytest.raises(InvalidRequestError, match="model_state"):
        model_key(b"short")


def test_store_key_form():
    cf = bytes.fromhex("ab12" + "00" * 29 + "ff")
    key = store_key(model_key(bytes(range(32))), "kv", cf)
    assert key == "kite:{ab12}:0001020304050607:kv:ab12" + "00" * 29 + "ff"


@pytest.mark.parametrize("model", ["SmolLM2", "", "0001020304050607ff", "000102030405060G", "0001020304050607\n"])
def test_store_key_refuses_display_names(model):
    """B19: no key is ever made of a name."""
    with pytest.raises(InvalidRequestError, match="model"):
        store_key(model, "kv", ROOT)


def test_store_key_refuses_unknown_kinds_and_cut_fingerprints():
    with pytest.raises(InvalidRequestError, match="kind"):
        store_key("0" * 16, "k:v", ROOT)
    with pytest.raises(InvalidRequestError, match="8 bytes"):
        store_key("0" * 16, "kv", ROOT[:8])
