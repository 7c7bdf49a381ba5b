"""`paged_kvcache_v2/entropy`: with the native part and without it, on good data and on bad."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitelib.errors import FormatError
from kitelib.native.library import KvShape, native_library
from kitelib.upcycle import entropy_numpy
from kitelib.upcycle.codec import get_codec
from kitelib.upcycle.entropy import EntropyCodec, kv_shape
from tests.support.kv_data import MANTISSA_BITS, kv_like

NAME = "paged_kvcache_v2/entropy"
CODEC = get_codec("paged_kvcache_v2", "entropy")
WITHOUT = EntropyCodec(NAME, library=lambda: None)
LIBRARY = native_library()
DTYPES = sorted(MANTISSA_BITS)
STORED, PLANES, ENTROPY = 0, 1, 2


def native_or_numpy(shape: KvShape, data: np.ndarray) -> bytes:
    body = entropy_numpy.encode(shape, data)
    assert body is not None
    return bytes([ENTROPY]) + bytes(7) + body


def test_the_native_part_is_built_where_tests_run():
    """Without it most of the tests below would test half of what they say."""
    assert LIBRARY is not None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 7, 15, 16, 33])
def test_units_of_any_length_come_back(dtype, tokens):
    shape = (6, tokens, 128)
    data = kv_like(shape, dtype, tokens)
    blob = CODEC.encode(data, dtype, shape)
    assert blob[0] == ENTROPY
    for codec in (CODEC, WITHOUT):
        decoded = codec.decode(blob, len(data), dtype, shape)
        assert decoded.tobytes() == data.tobytes()
        assert not decoded.flags.writeable


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(DTYPES),
    st.integers(1, 5),
    st.integers(1, 9),
    st.one_of(st.integers(1, 100), st.sampled_from([255, 256, 257, 300])),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 1.0, 3.0, 9.0]),
    st.sampled_from([0.0, 0.0, 0.01, 0.3]),
)
def test_every_kernel_and_numpy_give_the_same_bytes(dtype, segments, tokens, channels, seed, spread, strange):
    shape = (segments, tokens, channels)
    data = kv_like(shape, dtype, seed, spread)
    rng = np.random.default_rng(seed)
    odd = rng.random(len(data) // 2) < strange
    data.view(np.uint16)[odd] = rng.integers(0, 2**16, int(odd.sum()))
    given_shape = KvShape(*shape, MANTISSA_BITS[dtype])
    body = entropy_numpy.encode(given_shape, data)
    if body is not None:
        assert entropy_numpy.decode(given_shape, body).tobytes() == data.tobytes()
    for kernel in LIBRARY.kernels():
        assert LIBRARY.kv_encode(given_shape, data, kernel) == body
        if body is not None:
            assert LIBRARY.kv_decode(given_shape, body, kernel).tobytes() == data.tobytes()


EXTREMES = {
    "zeros": [0],
    "negative zeros": [0x8000],
    "one value": [0x3C17],
    "infinities": [0x7C00, 0xFC00, 0x7F80, 0xFF80],
    "NaN of all kinds": [0x7C01, 0x7FFF, 0xFE00, 0x7F81, 0xFFC1],
    "subnormals": [1, 0x8001, 0x7F, 0x3FF],
    "from smallest to largest": [1, 0x7BFF, 0x7F7F, 0x0400],
    "two zeros and a number": [0, 0x8000, 0x3C00],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", EXTREMES.values(), ids=EXTREMES)
@pytest.mark.parametrize("shape", [(4, 16, 64), (2, 1, 32), (2000,), (1, 1, 1)])
def test_extreme_values_come_back_bit_for_bit(dtype, values, shape):
    data = np.resize(np.array(values, np.uint16), int(np.prod(shape))).view(np.uint8)
    blob = CODEC.encode(data, dtype, shape)
    assert len(blob) <= len(data) + 8
    for codec in (CODEC, WITHOUT):
        assert codec.decode(blob, len(data), dtype, shape).tobytes() == data.tobytes()


def test_numbers_between_many_zeros_come_back():
    for dtype in DTYPES:
        data = kv_like((4, 16, 64), dtype)
        data.view(np.uint16)[::20] = 0
        blob = CODEC.encode(data, dtype, (4, 16, 64))
        assert blob[0] == ENTROPY
        assert WITHOUT.decode(blob, len(data), dtype, (4, 16, 64)).tobytes() == data.tobytes()


def test_nothing_is_stored_of_nothing():
    nothing = np.zeros(0, np.uint8)
    for shape in ((0,), (0, 16, 4), (2, 0, 4)):
        blob = CODEC.encode(nothing, "float16", shape)
        assert len(blob) == 8
        assert len(CODEC.decode(blob, 0, "float16", shape)) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_noise_costs_eight_bytes(dtype):
    data = np.random.default_rng(1).integers(0, 256, 4 * 16 * 64 * 2).astype(np.uint8)
    blob = CODEC.encode(data, dtype, (4, 16, 64))
    assert (blob[0], len(blob)) == (STORED, len(data) + 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_channels_make_it_smaller_than_planes_and_than_flat_data(dtype):
    shape = (8, 16, 192)
    data = kv_like(shape, dtype)
    sizes = [len(CODEC.encode(data, dtype, given)) for given in (shape, (data.size // 2,))]
    planes = len(get_codec("paged_kvcache_v2", "zstd").encode(data, dtype, shape))
    assert sizes[0] < 0.98 * sizes[1]
    assert sizes[1] < 1.01 * planes


def test_without_the_native_part_planes_are_written_and_coded_units_are_read():
    shape = (4, 16, 64)
    data = kv_like(shape, "float16")
    blob = WITHOUT.encode(data, "float16", shape)
    assert blob[0] == PLANES
    assert blob[8:] == get_codec("paged_kvcache_v2", "zstd").encode(data, "float16", shape)
    coded = native_or_numpy(kv_shape(len(data), "float16", shape), data)
    for codec in (CODEC, WITHOUT):
        assert codec.decode(blob, len(data), "float16", shape).tobytes() == data.tobytes()
        assert codec.decode(coded, len(data), "float16", shape).tobytes() == data.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn", "uint8", "int16"])
def test_other_element_types_are_stored_as_planes(dtype):
    data = np.zeros(2400, np.uint8)
    count = 2400 // {"float32": 4, "int16": 2}.get(dtype, 1)
    blob = CODEC.encode(data, dtype, (count,))
    assert blob[0] == PLANES
    assert CODEC.decode(blob, 2400, dtype, (count,)).tobytes() == data.tobytes()


def test_data_at_an_odd_address_is_coded():
    data = kv_like((2, 16, 64), "float16")
    odd = np.empty(len(data) + 1, np.uint8)[1:]
    odd[:] = data
    assert CODEC.encode(odd, "float16", (2, 16, 64)) == CODEC.encode(data, "float16", (2, 16, 64))
    blob = b"x" + CODEC.encode(data, "float16", (2, 16, 64))
    assert CODEC.decode(memoryview(blob)[1:], len(data), "float16", (2, 16, 64)).tobytes() == data.tobytes()


SHAPE = (4, 8, 40)


@pytest.fixture(scope="module", params=DTYPES)
def coded(request):
    """An element type, its data with escapes in it, and a good payload."""
    data = kv_like(SHAPE, request.param, 3)
    data.view(np.uint16)[7::97] = 0
    return request.param, data, native_or_numpy(kv_shape(len(data), request.param, SHAPE), data)


def outcome(codec: EntropyCodec, blob: bytes, num_bytes: int, dtype: str) -> bytes | None:
    try:
        return codec.decode(blob, num_bytes, dtype, SHAPE).tobytes()
    except FormatError:
        return None


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_damaged_payloads_are_refused_or_give_as_many_bytes(coded, data):
    """Both decoders come to the same conclusion about every payload, and raise nothing but FormatError."""
    dtype, plain, good = coded
    blob = bytearray(good)
    where = st.one_of(st.integers(0, len(blob) - 1), st.integers(0, 150))
    for at, value in data.draw(st.lists(st.tuples(where, st.integers(0, 255)), min_size=1, max_size=4)):
        blob[at] = value
    if data.draw(st.integers(0, 3)) == 0:
        blob = blob[: data.draw(st.integers(0, len(blob)))]
    results = [outcome(codec, bytes(blob), len(plain), dtype) for codec in (CODEC, WITHOUT)]
    assert results[0] == results[1]
    assert results[0] is None or len(results[0]) == len(plain)


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=600), st.sampled_from(DTYPES))
def test_noise_is_refused(noise, dtype):
    for codec in (CODEC, WITHOUT):
        with pytest.raises(FormatError):
            codec.decode(bytes([ENTROPY]) + bytes(7) + noise, 4 * 8 * 40 * 2, dtype, SHAPE)


def test_every_cut_is_refused(coded):
    dtype, plain, good = coded
    for end in [*range(200), *range(200, len(good), 37), len(good) - 2, len(good) - 1]:
        for codec in (CODEC, WITHOUT):
            with pytest.raises(FormatError):
                codec.decode(good[:end], len(plain), dtype, SHAPE)
    for codec in (CODEC, WITHOUT):
        with pytest.raises(FormatError):
            codec.decode(good + b"\0\0", len(plain), dtype, SHAPE)


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, 3), (1, 1), (8, 255), (9, 1), (12, 255), (16, 255), (20, 0), (28, 249), (32, 64), (33, 65)],
    ids=["method", "reserved", "low", "head", "escapes", "words", "starts", "prior", "first symbol", "symbols"],
)
def test_fields_out_of_range_are_refused(coded, at, value):
    dtype, plain, good = coded
    bad = good[:at] + bytes([value]) + good[at + 1 :]
    for codec in (CODEC, WITHOUT):
        with pytest.raises(FormatError):
            codec.decode(bad, len(plain), dtype, SHAPE)


def test_another_shape_is_refused(coded):
    dtype, plain, good = coded
    for num_bytes, shape in ((len(plain), (2, 8, 40)), (len(plain) // 2, (2, 8, 40)), (len(plain), (-2, -16, 40))):
        for codec in (CODEC, WITHOUT):
            with pytest.raises(FormatError):
                codec.decode(good, num_bytes, dtype, shape)
    with pytest.raises(FormatError, match="does not take"):
        CODEC.encode(plain, dtype, (3, 8, 40))


def test_a_coded_payload_needs_16_bit_floats(coded):
    _, plain, good = coded
    with pytest.raises(FormatError, match="method 2"):
        CODEC.decode(good, len(plain), "uint16", SHAPE)
