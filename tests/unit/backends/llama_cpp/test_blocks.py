"""State blobs <-> block payloads, on layouts made up here byte by byte as the module describes them."""

from __future__ import annotations

import dataclasses
import math
import struct
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitelib.abc import BlockPayload
from kitelib.backends.llama_cpp.blocks import StateLayout
from kitelib.errors import FormatError

MAGIC = 0x67677371
F16, F32, BF16, Q8_0 = 1, 0, 30, 8

Segment = tuple[int, ...]  # ggml type, bytes per row; or, transposed: ggml type, bytes per element, channels


class Section(NamedTuple):
    """One KV cache: K of every layer, V of every layer (may be empty)."""

    keys: list[Segment]
    values: list[Segment]
    transposed: bool = False


PLAIN = [Section([(F16, 8)] * 3, [(F16, 8)] * 3)]
UNEQUAL = [Section([(F16, 8), (F16, 16), (F16, 8)], [(F16, 4), (F16, 4), (F16, 12)])]
TWO_CACHES = [Section([(F16, 8)] * 2, [(F16, 8)] * 2), Section([(F16, 6)] * 5, [(F16, 6)] * 5)]
MIXED = [Section([(F16, 8)] * 2, [(F32, 16)] * 2)]
QUANTIZED = [Section([(Q8_0, 34)] * 2, [(Q8_0, 34)] * 2)]
LATENT = [Section([(F16, 10)] * 4, [])]
TRANSPOSED = [Section([(F16, 8)] * 3, [(F16, 2, 4)] * 3, transposed=True)]
TRANSPOSED_UNEQUAL = [Section([(F16, 8), (F16, 16), (F16, 8)], [(F16, 2, 2), (F16, 2, 2), (F16, 2, 6)], True)]
TRANSPOSED_TWO_CACHES = [
    Section([(F16, 8)] * 2, [(F16, 2, 4)] * 2, transposed=True),
    Section([(F16, 6)] * 5, [(F16, 2, 3)] * 5, transposed=True),
]
TRANSPOSED_MIXED = [Section([(Q8_0, 34)] * 2, [(F32, 4, 1)] * 2, transposed=True)]
TRANSPOSED_LATENT = [Section([(F16, 10)] * 4, [], transposed=True)]
LAYOUTS = {
    "plain": PLAIN,
    "unequal": UNEQUAL,
    "two": TWO_CACHES,
    "mixed": MIXED,
    "quantized": QUANTIZED,
    "latent": LATENT,
    "transposed": TRANSPOSED,
    "transposed unequal": TRANSPOSED_UNEQUAL,
    "transposed two": TRANSPOSED_TWO_CACHES,
    "transposed mixed": TRANSPOSED_MIXED,
    "transposed latent": TRANSPOSED_LATENT,
}


def make_blob(sections: list[Section], positions: list[int], seed: int = 0, sequence: int = 0) -> np.ndarray:
    """A blob as `llama_state_seq_get_data` writes it."""
    rng = np.random.default_rng(seed)
    parts = [struct.pack("<Ii", MAGIC, sequence)]
    for section in sections:
        parts.append(struct.pack("<II", 1, len(positions)))
        parts += [struct.pack("<iIi", position, 1, sequence) for position in positions]
        parts.append(struct.pack("<II", section.transposed, len(section.keys)))
        for segment in [*section.keys, *section.values]:
            parts.append(struct.pack("<iQ" if len(segment) == 2 else "<iII", *segment))
            parts.append(rng.bytes(math.prod(segment[1:]) * len(positions)))
    return np.frombuffer(b"".join(parts), np.uint8).copy()


def layout_of(sections: list[Section]) -> StateLayout:
    return StateLayout.probe(make_blob(sections, [0, 1, 2]).tobytes(), [0, 1, 2])


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.lists(st.integers(1, 17), min_size=1, max_size=5), st.integers(0, 2**32))
def test_joining_what_was_split_gives_the_blob_back(name: str, first: int, counts: list[int], seed: int) -> None:
    layout = layout_of(LAYOUTS[name])
    blob = make_blob(LAYOUTS[name], list(range(first, first + sum(counts))), seed)
    payloads = layout.split(blob, first, counts)
    assert [payload.num_tokens for payload in payloads] == counts
    assert np.array_equal(layout.join(first, payloads), blob)
    # Payloads do not depend on what they were cut out with: each alone is the same.
    start = first
    for payload in payloads:
        (alone,) = layout.split(layout.join(start, [payload]), start, [payload.num_tokens])
        assert np.array_equal(alone.data, payload.data)
        start += payload.num_tokens


def test_a_payload_holds_segment_token_row() -> None:
    layout = layout_of(PLAIN)
    blob = make_blob(PLAIN, list(range(7)))
    _, payload, _ = layout.split(blob, 0, [2, 3, 2])
    rows = payload.data.reshape(6, 3, 8)
    for segment in range(6):
        # outer header, section header, cells, data header, whole segments before, own header, two rows
        offset = 8 + 8 + 7 * 12 + 8 + segment * (12 + 7 * 8) + 12 + 2 * 8
        assert np.array_equal(rows[segment].reshape(-1), blob[offset : offset + 24])


def test_a_payload_holds_segment_channel_token_element_if_transposed() -> None:
    layout = layout_of(TRANSPOSED)
    blob = make_blob(TRANSPOSED, list(range(7)))
    _, payload, _ = layout.split(blob, 0, [2, 3, 2])
    keys, values = payload.data[:72].reshape(3, 3, 8), payload.data[72:].reshape(3, 4, 3, 2)
    for segment in range(3):
        # outer header, section header, cells, data header, whole segments before, own header
        offset = 8 + 8 + 7 * 12 + 8 + segment * (12 + 7 * 8) + 12
        assert np.array_equal(keys[segment].reshape(-1), blob[offset + 2 * 8 :][:24])
        offset += 3 * (12 + 7 * 8)
        for channel in range(4):
            row = blob[offset + channel * 7 * 2 :][: 7 * 2]
            assert np.array_equal(values[segment, channel].reshape(-1), row[2 * 2 : 5 * 2])


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 20), st.data(), st.integers(0, 2**32))
def test_what_is_cut_is_what_a_shorter_range_gives(name: str, count: int, data: st.DataObject, seed: int) -> None:
    kept = data.draw(st.integers(1, count))
    layout = layout_of(LAYOUTS[name])
    blob = make_blob(LAYOUTS[name], list(range(3, 3 + count)), seed)
    (whole,) = layout.split(blob, 3, [count])
    first, *_ = layout.split(blob, 3, [kept, count - kept] if kept < count else [kept])
    before = whole.data.copy()
    cut = layout.cut(whole, kept)
    assert (cut.num_tokens, cut.dtype, cut.shape, cut.layout) == (kept, first.dtype, first.shape, first.layout)
    assert np.array_equal(cut.data, first.data)
    cut.data[:] = 0
    assert np.array_equal(whole.data, before)


@pytest.mark.parametrize(
    ("name", "dtype", "token_bytes"),
    [
        ("plain", "float16", 48),
        ("unequal", "float16", 52),
        ("two", "float16", 92),
        ("mixed", "uint8", 48),
        ("quantized", "uint8", 136),
        ("latent", "float16", 40),
        ("transposed", "float16", 48),
        ("transposed unequal", "float16", 52),
        ("transposed two", "float16", 92),
        ("transposed mixed", "uint8", 76),
        ("transposed latent", "float16", 40),
    ],
)
def test_type_and_size_are_read_off_the_blob(name: str, dtype: str, token_bytes: int) -> None:
    layout = layout_of(LAYOUTS[name])
    assert (layout.dtype, layout.token_bytes, layout.magic) == (dtype, token_bytes, MAGIC)
    (payload,) = layout.split(make_blob(LAYOUTS[name], [4, 5]), 4, [2])
    item = {"float16": 2, "uint8": 1}[dtype]
    # K of three layers, then V of them, four channels each: only then a codec may know what is what.
    shape = (6, 2, 4) if name == "plain" else (2 * token_bytes // item,)
    assert (payload.dtype, payload.shape, len(payload.data)) == (dtype, shape, 2 * token_bytes)
    assert payload.data.flags.c_contiguous
    assert layout.transposed == name.startswith("transposed")
    assert payload.layout == layout.layout_id


def test_all_types_that_codecs_know_are_named() -> None:
    assert layout_of([Section([(F32, 16)], [(F32, 16)])]).dtype == "float32"
    assert layout_of([Section([(BF16, 8)], [(BF16, 8)])]).dtype == "bfloat16"


def test_equal_ids_mean_equal_layouts() -> None:
    ids = {name: layout_of(sections).layout_id for name, sections in LAYOUTS.items()}
    assert len(set(ids.values())) == len(ids)
    again = StateLayout.probe(make_blob(PLAIN, [5], seed=9, sequence=3).tobytes(), [5])
    assert again.layout_id == ids["plain"]


def test_a_payload_owns_its_bytes() -> None:
    blob = make_blob(PLAIN, [0, 1])
    layout = layout_of(PLAIN)
    payloads = layout.split(blob, 0, [1, 1])
    expected = [payload.data.copy() for payload in payloads]
    blob[:] = 0
    assert all(np.array_equal(a.data, b) for a, b in zip(payloads, expected, strict=True))


# Refusals


@pytest.mark.parametrize("positions", [[1, 2, 3], [0, 2, 1], [0, 1, 3], [0, 0, 1]])
def test_other_positions_are_refused(positions: list[int]) -> None:
    with pytest.raises(FormatError, match="positions 0 to 2"):
        layout_of(PLAIN).split(make_blob(PLAIN, positions), 0, [3])


def test_other_positions_in_the_second_cache_only_are_refused() -> None:
    blob = make_blob(TWO_CACHES, [0, 1])
    layout = layout_of(TWO_CACHES)
    second = 8 + layout.sections[0].num_bytes(2) + 8
    blob[second : second + 4] = [9, 0, 0, 0]
    with pytest.raises(FormatError, match="positions"):
        layout.split(blob, 0, [2])


@pytest.mark.parametrize("change", [-1, 1, 12])
def test_a_blob_of_another_size_is_refused(change: int) -> None:
    blob = make_blob(PLAIN, [0, 1, 2])
    blob = blob[:change] if change < 0 else np.concatenate([blob, np.zeros(change, np.uint8)])
    with pytest.raises(FormatError, match="bytes"):
        layout_of(PLAIN).split(blob, 0, [3])


def test_a_window_that_dropped_positions_is_refused() -> None:
    with pytest.raises(FormatError, match="bytes"):
        layout_of(TWO_CACHES).split(make_blob(TWO_CACHES, [1, 2]), 0, [3])


def test_payloads_of_another_layout_or_size_are_refused() -> None:
    layout = layout_of(PLAIN)
    (good,) = layout.split(make_blob(PLAIN, [0, 1]), 0, [2])
    (foreign,) = layout_of(UNEQUAL).split(make_blob(UNEQUAL, [0, 1]), 0, [2])
    short = dataclasses.replace(good, data=good.data[:-1].copy())
    long = dataclasses.replace(good, num_tokens=1)
    for bad in (foreign, short, long):
        with pytest.raises(FormatError, match="this model needs"):
            layout.join(0, [good, bad])


@pytest.mark.parametrize("name", ["plain", "transposed"])
def test_more_tokens_than_there_are_and_foreign_payloads_are_not_cut(name: str) -> None:
    layout = layout_of(LAYOUTS[name])
    (good,) = layout.split(make_blob(LAYOUTS[name], [0, 1]), 0, [2])
    for num_tokens in (-1, 0, 3):
        with pytest.raises(FormatError, match="give 1 to 2"):
            layout.cut(good, num_tokens)
    other = PLAIN if name != "plain" else TRANSPOSED  # as many bytes, in another order
    (foreign,) = layout_of(other).split(make_blob(other, [0, 1]), 0, [2])
    for bad in (foreign, dataclasses.replace(good, data=good.data[:-1].copy())):
        with pytest.raises(FormatError, match="this model needs"):
            layout.cut(bad, 1)


@pytest.mark.parametrize(
    ("offset", "value", "match"),
    [
        (0, -1, "type"),
        (4, 0, "0 bytes a row"),
        (4, 2**30, "after the blob"),
        (8, 0, "of 0 channels"),
        (8, 2**30, "channels"),
        (8, 2**20, "after the blob"),
    ],
)
def test_a_transposed_segment_that_can_not_be_is_refused(offset: int, value: int, match: str) -> None:
    blob = make_blob(TRANSPOSED, [0, 1, 2, 3])
    offset += 8 + 8 + 4 * 12 + 8 + 3 * (12 + 4 * 8)  # headers, cells, headers, K segments
    blob[offset : offset + 4] = np.frombuffer(struct.pack("<i", value), np.uint8)
    with pytest.raises(FormatError, match=match):
        StateLayout.probe(blob.tobytes(), [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("offset", "value", "match"),
    [
        (8, 2, "streams"),
        (12, 2, "cells"),
        (16, 7, "position 7"),
        (20, 2, "of 2 sequences"),
        (52, 1, "of 0 channels"),
        (52, 2, "transposed"),
        (56, 0, "number of layers 0"),
        (56, 5000, "number of layers 5000"),
        (60, 2**20, "type"),
        (64, 0, "0 bytes a row"),
        (64, 2**30, "bytes a row"),
    ],
)
def test_a_blob_laid_out_in_another_way_is_not_taken_for_this_one(offset: int, value: int, match: str) -> None:
    blob = make_blob(PLAIN, [0, 1, 2])
    blob[offset : offset + 4] = np.frombuffer(struct.pack("<I", value), np.uint8)
    with pytest.raises(FormatError, match=match):
        StateLayout.probe(blob.tobytes(), [0, 1, 2])


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_cut_blob_is_never_probed_as_a_whole_one(name: str) -> None:
    blob = make_blob(LAYOUTS[name], [0, 1]).tobytes()
    whole = StateLayout.probe(blob, [0, 1])
    for size in range(len(blob)):
        try:
            layout = StateLayout.probe(blob[:size], [0, 1])
        except FormatError:
            continue
        # A prefix can be a complete blob of fewer caches, or of one without V, but never pass for this model's.
        assert layout.layout_id != whole.layout_id


def test_joining_nothing_gives_an_empty_blob() -> None:
    layout = layout_of(PLAIN)
    assert len(layout.join(3, [])) == layout.num_bytes(0)
    assert layout.split(layout.join(3, []), 3, []) == []
    assert isinstance(layout.split(make_blob(PLAIN, [3]), 3, [1])[0], BlockPayload)
