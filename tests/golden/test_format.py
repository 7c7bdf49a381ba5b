"""The stored form, held fast by files: what one release wrote, every later one must read. docs/format.md is the spec.

``python tests/golden/test_format.py`` writes the files that are missing: new ones, or all of a new format version.
"""

import hashlib
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from kitelib.fingerprint import block_fingerprint, block_fingerprints, end_fingerprint, root_fingerprint
from kitelib.native.library import KvShape, native_library
from kitelib.upcycle import entropy_numpy
from kitelib.upcycle.codec import get_codec
from kitelib.upcycle.unit import Expectation, RecyclableUnit, inspect, pack, unpack

HERE = Path(__file__).parent
HMAC_KEY = b"golden key, not secret"
MODEL = bytes(range(32))
ROOT = root_fingerprint(MODEL, {"backend": "golden", "chunk": 64}, "tenant")
PROMPT = [7 * index + 1 for index in range(37)]
BLOCKS = block_fingerprints(ROOT, PROMPT, 16)


def kv_data() -> np.ndarray:
    """float16 whose high bytes repeat and whose low bytes are noise, without a random source that may change."""
    count = 2 * 16 * 32
    noise = b"".join(hashlib.sha256(bytes([index])).digest() for index in range(count // 32))
    elements = np.empty((count, 2), np.uint8)
    elements[:, 0] = np.frombuffer(noise, np.uint8)
    elements[:, 1] = 0x30 + np.arange(count) % 12 + (np.arange(count) % 2) * 0x80
    return elements.reshape(-1)


def kv_block() -> RecyclableUnit:
    return _kv_block("float16", (2, 16, 32), kv_data())


def wide_block() -> RecyclableUnit:
    """float16: channels of several sizes, some of one sign, rows that fill no group of 32, two tables and more."""
    return _kv_block("float16", (4, 16, 300), _wide_data(10))


def bfloat_block() -> RecyclableUnit:
    """bfloat16, with zeros, infinities and NaN between the numbers."""
    elements = _wide_data(7).view("<u2").copy()
    elements[5::311] = np.resize(np.array([0, 0x8000, 0x7F80, 0xFF80, 0x7FC1], np.uint16), len(elements[5::311]))
    return _kv_block("bfloat16", (4, 16, 300), elements.view(np.uint8))


def _wide_data(mantissa_bits: int) -> np.ndarray:
    count, index = 4 * 16 * 300, np.arange(4 * 16 * 300)
    noise = b"".join(hashlib.sha256(index.to_bytes(4, "little")).digest() for index in range(count // 8))
    words = np.frombuffer(noise, "<u4")
    ones = sum((words >> bit & 1 for bit in range(16, 24)), start=np.zeros(count, np.uint32))
    exponent = 9 + index % 7 + np.minimum(ones, 5) // 2 + (103 if mantissa_bits == 7 else 0)
    negative = np.where(index % 3 == 0, index % 300 % 2, words >> 31)
    mantissa = words & ((1 << mantissa_bits) - 1)
    return (negative << 15 | exponent << mantissa_bits | mantissa).astype("<u2").view(np.uint8)


def _kv_block(dtype: str, shape: tuple[int, ...], data: np.ndarray) -> RecyclableUnit:
    return RecyclableUnit(
        kind="kv",
        cf=BLOCKS[1],
        parent=BLOCKS[0],
        token_ids=np.array(PROMPT[16:32], np.uint32),
        model_state=MODEL,
        epoch=3,
        created_at=1_790_000_000.5,
        layout="golden.kv",
        dtype=dtype,
        shape=shape,
        data=data,
    )


def logits() -> RecyclableUnit:
    values = (np.arange(50, dtype="<f4") - 25) / 4  # exact in float32
    return RecyclableUnit(
        kind="logits",
        cf=end_fingerprint(BLOCKS[1], PROMPT[32:]),
        parent=BLOCKS[1],
        token_ids=np.array(PROMPT[32:], np.uint32),
        model_state=MODEL,
        epoch=0,
        created_at=1_790_000_001.0,
        layout="golden.logits",
        dtype="float32",
        shape=(50,),
        data=values.view(np.uint8),
    )


class ReferenceEntropy:
    """Writes what the native part writes, whether it is built or not."""

    name = "paged_kvcache_v2/entropy"

    def encode(self, data: np.ndarray, dtype: str, shape: tuple[int, int, int]) -> bytes:
        body = entropy_numpy.encode(KvShape(*shape, {"float16": 10, "bfloat16": 7}[dtype]), data)
        return bytes([2]) + bytes(7) + body

    decode = get_codec("paged_kvcache_v2", "entropy").decode


# Lossy codecs: the largest error, relative to the largest value.
LOSSY = {"kv_int8.ru": 0.5 / 127, "logits_fp16.ru": 0.0}

# name: unit, codec, HMAC key
FILES = {
    "kv_none.ru": (kv_block, get_codec("paged_kvcache_v2", "none"), None),
    "kv_zstd.ru": (kv_block, get_codec("paged_kvcache_v2", "zstd"), None),
    "kv_none_hmac.ru": (kv_block, get_codec("paged_kvcache_v2", "none"), HMAC_KEY),
    "kv_entropy.ru": (wide_block, ReferenceEntropy(), None),
    "kv_entropy_bfloat16.ru": (bfloat_block, ReferenceEntropy(), None),
    "kv_int8.ru": (kv_block, get_codec("int8_kv", "none"), None),
    "logits_fp16.ru": (logits, get_codec("fp16_quant", "none"), None),
    "logits_raw.ru": (logits, get_codec("raw", "none"), None),
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_earlier_releases_are_read(name):
    make, codec, key = FILES[name]
    unit = make()
    expected = Expectation(unit.kind, unit.cf, unit.token_ids, unit.model_state, unit.layout, len(unit.data))
    read = unpack((HERE / name).read_bytes(), expected=expected, hmac_key=key)
    if name in LOSSY:
        values = [
            each.data.view({"float16": "<f2", "float32": "<f4"}[unit.dtype]).astype(float) for each in (read, unit)
        ]
        assert np.abs(values[0] - values[1]).max() <= LOSSY[name] * np.abs(values[1]).max() * 1.01
    else:
        assert read.data.tobytes() == unit.data.tobytes()
    assert (read.kind, read.cf, read.parent, read.model_state) == (unit.kind, unit.cf, unit.parent, unit.model_state)
    assert (read.epoch, read.created_at, read.layout) == (unit.epoch, unit.created_at, unit.layout)
    assert (read.dtype, read.shape, read.codec) == (unit.dtype, unit.shape, codec.name)


@pytest.mark.parametrize("name", [name for name in FILES if "zstd" not in name])
def test_the_same_bytes_are_written(name):
    make, codec, key = FILES[name]
    assert pack(make(), codec, hmac_key=key) == (HERE / name).read_bytes()


def test_compressed_header_is_the_same():
    """Compressed planes may differ between versions of zstd; everything that doesn't depend on them may not."""
    make, codec, _ = FILES["kv_zstd.ru"]
    old, new = (HERE / "kv_zstd.ru").read_bytes(), pack(make(), codec)
    assert new[:28] == old[:28]
    assert new[40:316] == old[40:316]


def test_the_specification_describes_the_files():
    """Reads a file by the offsets of docs/format.md, without any code of the library."""
    blob = (HERE / "kv_none.ru").read_bytes()
    assert blob[:8] == b"KITERU\r\n"
    assert struct.unpack_from("<HHI", blob, 8) == (1, 0, 320)
    assert struct.unpack_from("<5B", blob, 16) == (1, 9, 7, 21, 3)
    assert blob[21:24] == bytes(3)
    num_token_ids, payload_crc, payload_bytes, data_bytes, epoch, created_at = struct.unpack_from("<IIQQQd", blob, 24)
    assert (num_token_ids, payload_bytes, data_bytes, epoch, created_at) == (16, 2048, 2048, 3, 1_790_000_000.5)
    assert blob[64:96] == block_fingerprint(BLOCKS[0], PROMPT[16:32])
    assert blob[96:128] == BLOCKS[0]
    assert blob[128:160] == MODEL
    assert struct.unpack_from("<3Q", blob, 160) == (2, 16, 32)
    assert list(struct.unpack_from("<16I", blob, 184)) == PROMPT[16:32]
    assert blob[248:285] == b"golden.kvfloat16paged_kvcache_v2/none"
    assert blob[285:316] == bytes(31)
    assert struct.unpack_from("<I", blob, 316) == (zlib.crc32(blob[:316]),)
    assert blob[320:] == kv_data().tobytes()
    assert payload_crc == zlib.crc32(blob[320:])


def test_the_specification_describes_the_planes():
    blob = (HERE / "kv_zstd.ru").read_bytes()[320:]
    assert blob[:8] == b"\x02" + bytes(7)
    (low_method, low_bytes), (high_method, high_bytes) = struct.iter_unpack("<B7xQ", blob[8:40])
    assert (low_method, low_bytes, high_method) == (0, 1024, 1)
    assert blob[40:1064] == kv_data()[0::2].tobytes()
    assert len(blob) == 1064 + high_bytes
    assert blob[1064:1068] == b"\x28\xb5\x2f\xfd"


def test_the_specification_describes_coded_elements():
    """The sizes of docs/format.md add up to the payload, and its first parts are where it says."""
    blob = (HERE / "kv_entropy.ru").read_bytes()
    body = blob[struct.unpack_from("<I", blob, 12)[0] :]
    assert body[:8] == b"\x02" + bytes(7)
    low, escapes, words, starts = struct.unpack_from("<B3xIIQ", body, 8)
    assert (low, escapes, starts & 1) == (0, 0, 1)
    at = 8 + 20 + 4
    for _ in range(2 * starts.bit_count()):
        first, number = body[at], body[at + 1]
        assert first + number <= 64
        at += 2 + (number + 1) // 2
    elements = wide_block().data.view("<u2")
    assert body[at : at + 256] == (elements[:256] & 255).astype(np.uint8).tobytes()
    assert len(body) == at + len(elements) // 256 * 288 + 128 + 2 * words


@pytest.mark.skipif(native_library() is None, reason="the native part is not built")
@pytest.mark.parametrize("name", ["kv_entropy.ru", "kv_entropy_bfloat16.ru"])
def test_the_native_part_writes_the_same_bytes(name):
    make, _, key = FILES[name]
    assert pack(make(), get_codec("paged_kvcache_v2", "entropy"), hmac_key=key) == (HERE / name).read_bytes()


def test_a_tool_can_list_the_files():
    for name in FILES:
        assert inspect((HERE / name).read_bytes()).kind == name.partition("_")[0]


def test_every_file_is_covered():
    assert {path.name for path in HERE.glob("*.ru")} == set(FILES)


if __name__ == "__main__":
    for file_name, (make_unit, file_codec, file_key) in FILES.items():
        if not (HERE / file_name).exists():
            (HERE / file_name).write_bytes(pack(make_unit(), file_codec, hmac_key=file_key))
