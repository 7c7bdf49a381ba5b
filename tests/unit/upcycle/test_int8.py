"""`int8_kv`, and the drift that every lossy codec has to report."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitelib.errors import FormatError
from kitelib.upcycle.codec import get_codec, is_lossless
from kitelib.upcycle.drift import drift
from kitelib.upcycle.int8 import from_float32, to_float32
from tests.support.kv_data import MANTISSA_BITS, as_bfloat16, kv_like

PLAIN = get_codec("int8_kv", "none")
ZSTD = get_codec("int8_kv", "zstd")
DTYPES = sorted(MANTISSA_BITS)


def restored(codec, data: np.ndarray, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    decoded = codec.decode(codec.encode(data, dtype, shape), len(data), dtype, shape)
    assert not decoded.flags.writeable
    return to_float32(decoded, dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_of_16_tokens_takes_54_percent(dtype):
    shape = (8, 16, 192)
    data = kv_like(shape, dtype)
    # K: 16 bytes and a scale of 2 for 32; V: 64 and a scale of 2 for 128.
    assert len(PLAIN.encode(data, dtype, shape)) == 8 + len(data) // 2 * (18 / 32 + 66 / 128)
    assert len(ZSTD.encode(data, dtype, shape)) <= len(PLAIN.encode(data, dtype, shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 1, 64), (6, 7, 65), (6, 8, 65), (3, 16, 200), (1, 20, 3), (2, 9, 1)])
def test_no_value_moves_by_more_than_half_a_step_of_its_group(dtype, shape):
    """B13: quantised KV must not be kept with other scales than its own; each unit holds the scales of its groups."""
    data = kv_like(shape, dtype, 5, spread=3.0)
    exact = to_float32(data, dtype).reshape(shape)
    error = np.abs(restored(PLAIN, data, dtype, shape) - exact)
    half = shape[0] // 2
    highest = np.zeros(shape, np.float32)
    per_channel = np.abs(exact[:half]).max(axis=1, keepdims=True, initial=0)
    for start in range(0, shape[2], 64):
        group = slice(start, start + 64)
        highest[:, :, group] = np.abs(exact[:, :, group]).max(axis=2, keepdims=True)
    if shape[1] >= 8:
        highest[:half] = per_channel
    rounding = np.abs(exact) * 2.0 ** -(MANTISSA_BITS[dtype] + 1)
    assert (error <= highest / 254 * 1.001 + rounding + 6e-8).all()


@settings(deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 4), st.integers(1, 12), st.integers(1, 140), st.integers(0, 2**32 - 1))
def test_storing_twice_changes_nothing_more_and_gives_the_same_bytes(dtype, segments, tokens, channels, seed):
    shape = (segments, tokens, channels)
    data = kv_like(shape, dtype, seed)
    blob = bytes(PLAIN.encode(data, dtype, shape))
    assert bytes(PLAIN.encode(data.copy(), dtype, shape)) == blob
    decoded = PLAIN.decode(blob, len(data), dtype, shape)
    assert ZSTD.decode(ZSTD.encode(data, dtype, shape), len(data), dtype, shape).tobytes() == decoded.tobytes()
    if dtype == "float16":  # a bfloat16 has fewer steps than the integers, so that rounding it can move one
        assert bytes(PLAIN.encode(decoded, dtype, shape)) == blob


def test_zeros_stay_zeros_and_the_largest_values_stay_finite():
    for dtype, largest in (("float16", 0x7BFF), ("bfloat16", 0x7F7F)):
        elements = np.zeros((2, 16, 8), np.uint16)
        elements[:, :, 1:3] = largest, 0x8000 | largest
        data = elements.reshape(-1).view(np.uint8)
        values = restored(PLAIN, data, dtype, (2, 16, 8))
        assert np.array_equal(values, to_float32(data, dtype).reshape(2, 16, 8))


@pytest.mark.parametrize("bits", [0x7C00, 0x7E01])
def test_values_that_are_not_finite_are_refused(bits):
    data = kv_like((2, 16, 8), "float16").copy()
    data.view(np.uint16)[3] = bits
    with pytest.raises(FormatError, match="store this unit exactly"):
        PLAIN.encode(data, "float16", (2, 16, 8))


def test_only_blocks_of_16_bit_floats_can_be_quantised():
    data = kv_like((2, 16, 8), "float16")
    for codec in (PLAIN, ZSTD):
        for dtype, shape in (
            ("float16", (256,)),
            ("float16", (2, 8, 8)),
            ("float32", (2, 8, 8)),
            ("float16", (2, 256)),
        ):
            with pytest.raises(FormatError, match="int8_kv"):
                codec.encode(data, dtype, shape)
            with pytest.raises(FormatError, match="int8_kv"):
                codec.decode(b"", len(data), dtype, shape)


def test_damaged_payloads_are_refused():
    shape = (2, 16, 8)
    data = kv_like(shape, "float16")
    good = bytes(PLAIN.encode(data, "float16", shape))
    bad_integer = good[:-1] + b"\x80"
    negative_scale = good[:9] + bytes([good[9] | 0x80]) + good[10:]
    endless_scale = good[:8] + b"\x00\x7c" + good[10:]
    reserved = good[:1] + b"\1" + good[2:]
    for blob in (
        good[:-1],
        good + b"\0",
        good[:7],
        b"",
        b"\1" + good[1:],
        reserved,
        bad_integer,
        negative_scale,
        endless_scale,
    ):
        for codec in (PLAIN, ZSTD):
            with pytest.raises(FormatError):
                codec.decode(blob, len(data), "float16", shape)


def test_bfloat16_is_rounded_to_the_nearest():
    values = np.array([1.0, 1.00390625, 1.01171875, -3e38, np.inf, np.nan], np.float32)
    bits = from_float32(values, "bfloat16").view(np.uint16)
    assert np.array_equal(bits[:5], as_bfloat16(values[:5]))
    assert np.isnan(to_float32(bits.view(np.uint8), "bfloat16")[5])


def test_drift_tells_lossless_codecs_from_lossy_ones():
    """B13: there is a drift figure for every codec; zero means that every byte comes back."""
    shape = (4, 16, 64)
    data = kv_like(shape, "float16")
    for name in (
        "paged_kvcache_v2/none",
        "paged_kvcache_v2/zstd",
        "paged_kvcache_v2/entropy",
        "int8_kv/none",
        "int8_kv/zstd",
    ):
        measured = drift(get_codec(*name.split("/")), data, "float16", shape)
        assert (measured == 0.0) == is_lossless(name)
        assert measured < 0.01


def test_drift_is_the_relative_error():
    class Halving:
        name = "halving"

        def encode(self, data, dtype, shape):
            return (data.view(np.float16) / 2).tobytes()

        def decode(self, blob, num_bytes, dtype, shape):
            return np.frombuffer(blob, np.uint8)

    data = np.array([1.0, -2.0, 4.0], np.float16).view(np.uint8)
    assert drift(Halving(), data, "float16", (3,)) == pytest.approx(0.5)
