import dataclasses
import math
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitelib.errors import FormatError, KiteError
from kitelib.fingerprint import block_fingerprint, end_fingerprint, root_fingerprint
from kitelib.upcycle.codec import get_codec
from kitelib.upcycle.unit import MAX_DATA_BYTES, Expectation, RecyclableUnit, inspect, pack, unpack

MODEL = bytes(range(32))
ROOT = root_fingerprint(MODEL, {"backend": "test"}, None)
IDS = np.arange(100, 116, dtype=np.uint32)
NONE = get_codec("paged_kvcache_v2", "none")
ZSTD = get_codec("paged_kvcache_v2", "zstd")
KEY = b"k" * 32


def kv_unit(**changes) -> RecyclableUnit:
    data = np.random.default_rng(3).standard_normal(2048).astype(np.float16).view(np.uint8)
    unit = {
        "kind": "kv",
        "cf": block_fingerprint(ROOT, IDS),
        "parent": ROOT,
        "token_ids": IDS,
        "model_state": MODEL,
        "epoch": 3,
        "created_at": 1_790_000_000.25,
        "layout": "test.kv.1",
        "dtype": "float16",
        "shape": (2, 16, 64),
        "data": data,
    }
    return RecyclableUnit(**{**unit, **changes})


def expect(unit: RecyclableUnit, **changes) -> Expectation:
    return dataclasses.replace(
        Expectation(unit.kind, unit.cf, unit.token_ids, unit.model_state, unit.layout, len(unit.data)), **changes
    )


def assert_equal(left: RecyclableUnit, right: RecyclableUnit) -> None:
    for field in dataclasses.fields(RecyclableUnit):
        if field.name != "codec":
            one, two = getattr(left, field.name), getattr(right, field.name)
            assert np.array_equal(one, two) if isinstance(one, np.ndarray) else one == two, field.name


def reseal(blob: bytes, offset: int, value: bytes) -> bytes:
    """The unit with bytes of its header replaced and the header's checksum made right again."""
    header_bytes = struct.unpack_from("<I", blob, 12)[0]
    header = blob[:offset] + value + blob[offset + len(value) : header_bytes - 4]
    return header + struct.pack("<I", zlib.crc32(header)) + blob[header_bytes:]


@st.composite
def units(draw):
    kind = draw(st.sampled_from(["kv", "logits", "completion", "lora"]))
    ids = np.array(draw(st.lists(st.integers(0, 2**32 - 1), max_size=0 if kind == "lora" else 33)), np.uint32)
    parent = draw(st.binary(min_size=32, max_size=32))
    fingerprint = block_fingerprint if kind == "kv" and draw(st.booleans()) else end_fingerprint
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    dtype = draw(st.sampled_from(["float16", "bfloat16", "float32", "uint8", "uint32"]))
    num_bytes = math.prod(shape) * {"uint8": 1, "float32": 4, "uint32": 4}.get(dtype, 2)
    return RecyclableUnit(
        kind=kind,
        cf=fingerprint(parent, ids),
        parent=parent,
        token_ids=ids,
        model_state=draw(st.binary(min_size=32, max_size=32)),
        epoch=draw(st.integers(0, 2**64 - 1)),
        created_at=draw(st.floats(allow_nan=False, allow_infinity=False)),
        layout=draw(st.text(st.characters(max_codepoint=127), min_size=1, max_size=255)),
        dtype=dtype,
        shape=shape,
        data=np.frombuffer(draw(st.binary(min_size=num_bytes, max_size=num_bytes)), np.uint8),
    )


@settings(deadline=None)
@given(units(), st.sampled_from([NONE, ZSTD]), st.none() | st.binary(min_size=1, max_size=64))
def test_round_trip(unit, codec, key):
    blob = pack(unit, codec, hmac_key=key)
    assert_equal(unpack(blob, expected=expect(unit), hmac_key=key), unit)
    read = inspect(memoryview(blob))
    assert_equal(read, unit)
    assert read.codec == codec.name


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=400), st.booleans())
def test_arbitrary_bytes_are_a_miss(junk, with_magic):
    with pytest.raises(FormatError):
        inspect(b"KITERU\r\n\x01\x00" + junk if with_magic else junk)


@pytest.mark.parametrize("codec", [NONE, ZSTD], ids=["none", "zstd"])
@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "hmac"])
def test_truncated_anywhere(codec, key):
    unit = kv_unit()
    blob = pack(unit, codec, hmac_key=key)
    for size in {*range(400), *range(0, len(blob), 37), len(blob) - 1}:
        with pytest.raises(FormatError):
            unpack(blob[:size], expected=expect(unit), hmac_key=key)


@pytest.mark.parametrize("codec", [NONE, ZSTD], ids=["none", "zstd"])
@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "hmac"])
def test_flipped_bit_anywhere(codec, key):
    """Every byte of the header and of the tail, and every 23rd of the payload."""
    unit = kv_unit()
    blob = pack(unit, codec, hmac_key=key)
    for offset in {*range(400), *range(0, len(blob), 23), *range(len(blob) - 40, len(blob))}:
        changed = bytearray(blob)
        changed[offset] ^= 1 << offset % 8
        with pytest.raises(FormatError):
            unpack(changed, expected=expect(unit), hmac_key=key)


def test_trailing_garbage():
    unit = kv_unit()
    for key in (None, KEY):
        with pytest.raises(FormatError, match="its header says"):
            unpack(pack(unit, NONE, hmac_key=key) + b"\0", expected=expect(unit), hmac_key=key)


def test_wrong_magic():
    blob = b"KITERU\n\n" + pack(kv_unit(), NONE)[8:]  # what a transfer in text mode leaves
    with pytest.raises(FormatError, match="magic"):
        inspect(blob)


def test_wrong_version():
    with pytest.raises(FormatError, match="version is 2"):
        inspect(reseal(pack(kv_unit(), NONE), 8, b"\x02\x00"))


def test_reserved_bits():
    for offset in (10, 11, 21, 22, 23):
        with pytest.raises(FormatError, match="reserved"):
            inspect(reseal(pack(kv_unit(), NONE), offset, b"\x80"))


def test_padding_must_be_zero():
    blob = pack(kv_unit(), NONE)
    header_bytes = struct.unpack_from("<I", blob, 12)[0]
    assert blob[header_bytes - 5] == 0
    with pytest.raises(FormatError, match="padding"):
        inspect(reseal(blob, header_bytes - 5, b"\x01"))


def test_unknown_kind():
    with pytest.raises(FormatError, match="kind 9"):
        inspect(reseal(pack(kv_unit(), NONE), 16, b"\x09"))


@pytest.mark.parametrize(
    ("offset", "value", "reason"),
    [
        (12, struct.pack("<I", 0), "header says"),
        (12, struct.pack("<I", 2**32 - 1), "header says"),
        (17, b"\xff", "header says"),
        (20, b"\xff", "dimensions"),
        (24, struct.pack("<I", 2**32 - 1), "token ids"),
        (24, struct.pack("<I", 200), "header says"),
        (32, struct.pack("<Q", 2**64 - 1), "bytes, its header says"),
        (32, struct.pack("<Q", 0), "bytes, its header says"),
        (40, struct.pack("<Q", 2**64 - 1), "bytes of data"),
        (40, struct.pack("<Q", 2**40), "bytes of data"),
        (40, struct.pack("<Q", MAX_DATA_BYTES), "does not take"),
        (160, struct.pack("<Q", 2**63), "does not take"),
        (160, struct.pack("<Q", 0), "does not take"),
    ],
)
@pytest.mark.parametrize("codec", [NONE, ZSTD], ids=["none", "zstd"])
def test_absurd_sizes_allocate_nothing(offset, value, reason, codec):
    """B3: what a value says of its own size is believed only after it was checked."""
    blob = reseal(pack(kv_unit(), codec), offset, value) if offset != 12 else None
    if blob is None:  # the header's own length: the checksum can't be found any more
        good = pack(kv_unit(), codec)
        blob = good[:12] + value + good[16:]
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=reason):
            inspect(blob)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_decompression_bomb_allocates_nothing():
    """Sizes that agree with each other, far beyond what the reader needs, and a payload that would give them."""
    bomb = kv_unit(shape=(2**25,), data=np.zeros(2**26, np.uint8))
    blob = pack(bomb, ZSTD)
    assert len(blob) < 20_000
    wanted = expect(kv_unit())
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="67108864 bytes of data, not 4096"):
            unpack(blob, expected=wanted)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_payload_of_another_unit():
    """Both parts are whole, but they don't belong together."""
    unit, other = kv_unit(), kv_unit(data=np.zeros(4096, np.uint8))
    one, two = pack(unit, NONE), pack(other, NONE)
    header_bytes = struct.unpack_from("<I", one, 12)[0]
    with pytest.raises(FormatError, match="payload's checksum"):
        unpack(one[:header_bytes] + two[header_bytes:], expected=expect(unit))


def test_swapped_key():
    """A whole and valid unit that a store gives back under another unit's key."""
    other_ids = IDS + 1
    other = kv_unit(token_ids=other_ids, cf=block_fingerprint(ROOT, other_ids))
    unit = kv_unit()
    with pytest.raises(FormatError, match="the unit is"):
        unpack(pack(other, NONE), expected=expect(unit))


def test_other_tokens_under_the_same_fingerprint():
    unit = kv_unit()
    blob = pack(unit, NONE)
    with pytest.raises(FormatError, match="token ids differ"):
        unpack(blob, expected=expect(unit, token_ids=[*IDS.tolist()[:-1], 7]))
    with pytest.raises(FormatError, match="token ids differ"):
        unpack(blob, expected=expect(unit, token_ids=IDS[:-1]))
    with pytest.raises(FormatError, match="token ids differ"):
        unpack(blob, expected=expect(unit, token_ids=[]))


def test_other_model():
    unit = kv_unit()
    with pytest.raises(FormatError, match="model state"):
        unpack(pack(unit, NONE), expected=expect(unit, model_state=bytes(32)))


def test_other_layout_and_kind_and_size():
    """B1: data laid out in another way than the reader knows is refused, never copied."""
    unit = kv_unit()
    blob = pack(unit, NONE)
    with pytest.raises(FormatError, match=r"layout is 'test\.kv\.1', not 'test\.kv\.2'"):
        unpack(blob, expected=expect(unit, layout="test.kv.2"))
    with pytest.raises(FormatError, match="kind 'kv', not 'logits'"):
        unpack(blob, expected=expect(unit, kind="logits"))
    with pytest.raises(FormatError, match="4096 bytes of data, not 4098"):
        unpack(blob, expected=expect(unit, num_bytes=4098))
    assert_equal(unpack(blob, expected=expect(unit, layout=None, num_bytes=None)), unit)


def test_a_forged_header_with_right_checksums_is_refused():
    """Checksums are no proof: whoever can write to a store can make them right. The key check is what holds."""
    unit = kv_unit()
    forged = reseal(pack(unit, NONE), 176 + 8, struct.pack("<I", 4711))  # the first token id
    with pytest.raises(FormatError, match="token ids differ"):
        unpack(forged, expected=expect(unit))
    with pytest.raises(FormatError, match="not that of the unit's own token ids"):
        inspect(forged)
    moved = reseal(pack(unit, NONE), 96, bytes(32))  # the parent
    with pytest.raises(FormatError, match="not that of the unit's own token ids"):
        unpack(moved, expected=expect(unit))


def test_hmac_proves_the_writer():
    unit = kv_unit()
    signed = pack(unit, ZSTD, hmac_key=KEY)
    assert_equal(unpack(signed, expected=expect(unit), hmac_key=KEY), unit)
    assert_equal(unpack(signed, expected=expect(unit)), unit)  # a reader without a key has the checksums
    with pytest.raises(FormatError, match="no HMAC"):
        unpack(pack(unit, ZSTD), expected=expect(unit), hmac_key=KEY)
    with pytest.raises(FormatError, match="HMAC does not match"):
        unpack(signed, expected=expect(unit), hmac_key=b"another key")


def test_uncompressed_data_is_a_read_only_view():
    unit = kv_unit()
    for blob in (pack(unit, NONE), bytearray(pack(unit, NONE))):
        data = unpack(blob, expected=expect(unit)).data
        assert np.shares_memory(data, np.frombuffer(blob, np.uint8))
        assert not data.flags.writeable


def test_payload_is_aligned():
    for length in range(1, 70):
        blob = pack(kv_unit(layout="x" * length), NONE)
        assert struct.unpack_from("<I", blob, 12)[0] % 64 == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kind": "weights"}, "kind"),
        ({"cf": b"short"}, "cf has 5 bytes"),
        ({"parent": b""}, "parent has 0 bytes"),
        ({"model_state": bytes(31)}, "model_state has 31"),
        ({"cf": bytes(32)}, "own token ids"),
        ({"token_ids": IDS[:-1]}, "own token ids"),
        ({"kind": "logits"}, "own token ids"),  # a block's fingerprint is no prompt's
        ({"kind": "lora"}, "own token ids"),
        ({"epoch": -1}, "epoch is -1"),
        ({"epoch": 2**64}, "epoch"),
        ({"created_at": math.nan}, "creation time nan"),
        ({"layout": ""}, "layout"),
        ({"layout": "é"}, "ASCII"),
        ({"layout": "x" * 256}, "layout"),
        ({"dtype": "float17"}, "float17"),
        ({"dtype": "float32"}, "does not take 4096 bytes"),
        ({"shape": (2, 16, 63)}, "does not take"),
        ({"shape": (-2, 16, -64)}, "does not take"),
        ({"shape": (1,) * 6 + (2, 16, 64)}, "does not take"),
        ({"data": np.zeros(2048, np.uint16)}, "array of uint8"),
        ({"data": np.zeros(8192, np.uint8)[::2]}, "contiguous"),
        ({"data": bytes(4096)}, "array of uint8"),
        ({"token_ids": np.zeros(2**16 + 1, np.uint32)}, "65537 token ids"),
    ],
)
def test_a_unit_that_contradicts_itself_can_not_be_made(changes, reason):
    with pytest.raises(FormatError, match=reason):
        kv_unit(**changes)


def test_every_refusal_is_a_kite_error():
    assert issubclass(FormatError, KiteError)
