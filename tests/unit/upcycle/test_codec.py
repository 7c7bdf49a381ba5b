import struct
import threading

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kitelib.abc import Codec
from kitelib.errors import ConfigError, FormatError
from kitelib.upcycle.codec import ITEM_BYTES, codec_named, get_codec, is_lossless

NAMES = ["raw/none", "raw/zstd", "paged_kvcache_v2/none", "paged_kvcache_v2/zstd", "paged_kvcache_v2/entropy"]
LOSSY = ["int8_kv/none", "int8_kv/zstd", "fp16_quant/none", "fp16_quant/zstd"]
SPLIT = codec_named("paged_kvcache_v2/zstd")


def encode(codec: Codec, data: np.ndarray, dtype: str) -> bytes:
    """What the codec stores of flat data."""
    return bytes(codec.encode(data, dtype, (len(data) // ITEM_BYTES[dtype],)))


def decode(codec: Codec, blob: bytes, num_bytes: int, dtype: str) -> np.ndarray:
    """The flat data that it gives back."""
    return codec.decode(blob, num_bytes, dtype, (num_bytes // ITEM_BYTES.get(dtype, 1),))


def normal(num_elements: int, dtype: str = "float16") -> np.ndarray:
    """Random-normal elements as bytes; bfloat16 by cutting float32."""
    values = np.random.default_rng(7).standard_normal(num_elements).astype(np.float32)
    if dtype == "bfloat16":
        return np.ascontiguousarray(values.view(np.uint16)[1::2]).view(np.uint8)
    return values.astype(dtype).view(np.uint8)


@settings(deadline=None)
@given(st.sampled_from(NAMES), st.sampled_from(sorted(ITEM_BYTES)), st.binary(max_size=800), st.booleans())
def test_round_trip(name, dtype, raw, repeat):
    raw = raw[: len(raw) // ITEM_BYTES[dtype] * ITEM_BYTES[dtype]] * (20 if repeat else 1)
    data = np.frombuffer(raw, np.uint8)
    codec = codec_named(name)
    decoded = decode(codec, encode(codec, data, dtype), len(data), dtype)
    assert decoded.tobytes() == raw
    assert not decoded.flags.writeable


def test_codecs_keep_the_contract():
    for name in NAMES + LOSSY:
        codec = codec_named(name)
        assert is_lossless(name) == (name in NAMES)
        assert isinstance(codec.name, str)
        assert codec.name == name
        typed: Codec = codec
        assert typed is get_codec(*name.split("/"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_splitting_makes_floats_smaller(dtype):
    data = normal(20_000, dtype)
    split = len(encode(SPLIT, data, dtype))
    whole = len(encode(codec_named("raw/zstd"), data, dtype))
    assert split < 0.9 * len(data)
    assert split < whole


def test_mantissa_plane_is_stored_as_it_is():
    data = normal(5000)
    blob = encode(SPLIT, data, "float16")
    methods = [method for method, _ in struct.iter_unpack("<B7xQ", blob[8:40])]
    assert blob[0] == 2
    assert methods == [0, 1]
    assert blob[40:5040] == data[0::2].tobytes()


def test_quantized_blocks_are_not_split():
    assert encode(SPLIT, np.zeros(64, np.uint8), "uint8")[0] == 1


def test_uncompressed_decoding_copies_nothing():
    data = normal(1000)
    for name in ("raw/none", "paged_kvcache_v2/none"):
        codec = codec_named(name)
        blob = encode(codec, data, "float16")
        assert np.shares_memory(decode(codec, blob, len(data), "float16"), np.frombuffer(blob, np.uint8))
        assert np.shares_memory(np.frombuffer(codec.encode(data, "float16", (1000,)), np.uint8), data)


@pytest.mark.parametrize("name", NAMES)
def test_another_size_is_refused(name):
    blob = encode(codec_named(name), normal(500), "float16")
    for size in (0, 2, 998, 1002, 2000):
        with pytest.raises(FormatError):
            decode(codec_named(name), blob, size, "float16")


def split_blob(*planes: tuple[int, bytes]) -> bytes:
    heads = b"".join(struct.pack("<B7xQ", method, len(body)) for method, body in planes)
    return struct.pack("<B7x", len(planes)) + heads + b"".join(body for _, body in planes)


def frame(data: bytes, **options: object) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


HALF = bytes(100)
HUGE = frame(bytes(64 * 2**20))
NEEDS_DICTIONARY = b"\x28\xb5\x2f\xfd\x21\x07\x64" + frame(HALF)[6:]  # single segment, dictionary 7, 100 bytes
NO_SIZE = frame(HALF, write_content_size=False)


@pytest.mark.parametrize(
    ("blob", "reason"),
    [
        (b"", "too few"),
        (split_blob((0, HALF))[:20], "too few"),
        (split_blob((0, HALF), (0, HALF), (0, HALF)), "plane table"),
        (split_blob((0, HALF + HALF)), "plane table"),
        (split_blob((0, HALF), (0, HALF))[:-1], "do not fill"),
        (split_blob((0, HALF), (0, HALF)) + b"x", "do not fill"),
        (split_blob((0, HALF), (0, HALF[:-1])), "where 100 are needed"),
        (split_blob((0, HALF), (7, HALF)), "unknown method 7"),
        (split_blob((0, HALF), (1, b"no zstd frame")), "damaged"),
        (split_blob((0, HALF), (1, frame(HALF)[:-3])), "damaged"),
        (split_blob((0, HALF), (1, frame(HALF) + b"tail")), "damaged"),
        (split_blob((0, HALF), (1, frame(HALF) + frame(HALF))), "damaged"),
        (split_blob((0, HALF), (1, frame(bytes(99)))), "does not hold"),
        (split_blob((0, HALF), (1, HUGE)), "does not hold"),
        (split_blob((0, HALF), (1, NO_SIZE)), "does not hold"),
        (split_blob((0, HALF), (1, NEEDS_DICTIONARY)), "does not hold"),
        (split_blob((0, HALF), (1, b"")), "damaged"),
        (split_blob((0, HALF), (1, b"\x50\x2a\x4d\x18" + (100).to_bytes(4, "little") + HALF)), "compressed plane"),
        (split_blob((0, HALF), (0, HALF))[:15] + b"\x01" + split_blob((0, HALF), (0, HALF))[16:], "plane table"),
        (b"\x02" + b"\x01" + bytes(6) + split_blob((0, HALF), (0, HALF))[8:], "plane table"),
    ],
)
def test_damaged_planes_are_refused(blob, reason):
    with pytest.raises(FormatError, match=reason):
        decode(SPLIT, blob, 200, "float16")


def test_a_wide_window_is_refused_before_it_is_allocated():
    """A frame may promise few bytes and still ask for a window of gigabytes; nothing that we write does."""
    # Magic, no single segment, 8 bytes of content size, window 2**31, content size 100; there is no block to read.
    header = b"\x28\xb5\x2f\xfd" + bytes([0b1100_0000, (31 - 10) << 3]) + (100).to_bytes(8, "little")
    with pytest.raises(FormatError, match="window"):
        decode(SPLIT, split_blob((0, HALF), (1, header)), 200, "float16")


def test_unknown_names_are_refused():
    with pytest.raises(ConfigError, match="paged_kvcache_v2/zstd"):
        get_codec("paged_kvcache_v2", "lz4")
    with pytest.raises(FormatError, match="codec 'pickle/none' is unknown"):
        codec_named("pickle/none")
    with pytest.raises(FormatError, match="float17"):
        SPLIT.encode(np.zeros(4, np.uint8), "float17", (2,))
    with pytest.raises(FormatError, match="whole number"):
        SPLIT.decode(b"", 3, "float16", (1,))


def test_threads_share_a_codec():
    data = [normal(4000 + 16 * index) for index in range(8)]
    wrong: list[int] = []

    def use(index: int) -> None:
        for _ in range(20):
            for codec in (SPLIT, codec_named("paged_kvcache_v2/entropy")):
                blob = encode(codec, data[index], "float16")
                if not np.array_equal(decode(codec, blob, len(data[index]), "float16"), data[index]):
                    wrong.append(index)

    threads = [threading.Thread(target=use, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
