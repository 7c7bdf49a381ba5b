from __future__ import annotations

import random

import pytest

from kitelib.runtime.allocator import keep_freed_memory
from kitelib.stores.redis.bulk import BulkReader
from kitelib.stores.redis.fault import Fault, WireError
from kitelib.stores.redis.topology import hash_slot


def _receive(reader: BulkReader, data: bytes, sizes: random.Random) -> list[object]:
    replies: list[object] = []
    while data:
        room = reader.room(sizes.randint(1, 300_000))
        part = data[: min(len(room), sizes.randint(1, 300_000))]
        room[: len(part)] = part
        reader.received(len(part), replies)
        data = data[len(part) :]
    return replies


@pytest.mark.parametrize("seed", range(8))
def test_replies_come_out_whole_however_they_were_cut_on_the_way(seed: int) -> None:
    chance = random.Random(seed)
    values = [chance.randbytes(chance.choice([0, 1, 50, 70_000, 400_000, 2_500_000])) for _ in range(12)]
    sent = b"".join(b"$%d\r\n%b\r\n" % (len(value), value) for value in values)
    reader = BulkReader(2**30)
    assert _receive(reader, sent + b"$-1\r\n:-7\r\n+OK\r\n-MOVED 1 h:2\r\n", chance)[:-1] == [*values, None, -7, "OK"]
    assert reader.finish()


def test_an_error_reply_is_a_fault_with_its_code() -> None:
    (fault,) = _receive(BulkReader(100), b"-OOM command not allowed\r\n", random.Random(0))
    assert isinstance(fault, Fault)
    assert (fault.code, str(fault)) == ("OOM", "OOM command not allowed")


@pytest.mark.parametrize(
    "sent",
    [
        b"$101\r\n",
        b"$1e3\r\n",
        b"$-2\r\n",
        b"*1\r\n$1\r\nx\r\n",
        b"HTTP/1.1 400 Bad Request\r\n",
        b"$2\r\nabcd",
        b":x\r\n",
    ],
)
def test_what_is_no_reply_or_too_long_is_refused_at_once(sent: bytes) -> None:
    with pytest.raises(WireError):
        _receive(BulkReader(100), sent, random.Random(0))


def test_a_line_without_end_is_refused() -> None:
    with pytest.raises(WireError, match="doesn't end"):
        _receive(BulkReader(100), b"-" + b"x" * 200_000, random.Random(0))


def test_memory_grows_with_what_came_not_with_what_is_announced() -> None:
    reader = BulkReader(2**30)
    _receive(reader, b"$1000000000\r\n" + b"x" * 3_000_000, random.Random(0))
    assert len(reader._buffer) <= 8 * 2**20


def test_a_half_reply_is_not_clean() -> None:
    reader = BulkReader(100)
    assert _receive(reader, b"$5\r\nab", random.Random(0)) == []
    assert not reader.finish()


def test_slots_are_those_of_the_cluster_specification() -> None:
    # From the specification, and from CLUSTER KEYSLOT of Redis 7.0.
    assert hash_slot("123456789") == 0x31C3
    assert hash_slot("foo{bar}{zap}") == hash_slot("bar")
    assert hash_slot("foo{}{bar}") != hash_slot("bar")
    assert hash_slot("kite:{0000}:x") == hash_slot("0000")


def test_only_the_first_reader_of_a_process_changes_how_memory_is_kept() -> None:
    """Freed memory that is kept may have to be cleared when it is used again: 15 ms on the event loop, once."""
    for _ in range(3):
        BulkReader(100)
    assert keep_freed_memory.cache_info().misses <= 1
