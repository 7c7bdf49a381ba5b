"""The Redis tier over one server that is full, loading, restarted, read-only, hanging, or trickling."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from kitelib.errors import StoreError
from kitelib.stores.redis import RedisStore
from tests.support.redis_servers import RedisServer, free_port, listening


def key(number: int) -> str:
    digits = f"{number * 40503 % 65536:04x}{number:060x}"
    return f"kite:{{{digits[:4]}}}:0123456789abcdef:kv:{digits}"


@asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[RedisStore]:
    store = RedisStore(url, **{"connect_timeout": 1.0, "socket_timeout": 1.0, **options})
    try:
        yield store
    finally:
        await store.aclose()


async def test_a_full_server_drops_writes_and_goes_on_reading(redis_server: RedisServer) -> None:
    """B4: a write that failed is never visible; B27: writes are what is dropped first."""
    async with opened(redis_server.url) as store:
        await store.put_many([(key(1), b"before")])
        used = int(redis_server.call("INFO", "memory").split(b"used_memory:")[1].split()[0])
        redis_server.call("CONFIG", "SET", "maxmemory", used + 2_000_000, "maxmemory-policy", "noeviction")
        try:
            await store.put_many([(key(index), bytes(100_000)) for index in range(2, 60)])
            stats = await store.stats()
            assert 20 < stats.dropped < 58
            assert stats.errors == stats.dropped
            found = await store.get_many([key(index) for index in range(2, 60)])
            assert sum(value is None for value in found) == stats.dropped
            assert all(value in (None, bytes(100_000)) for value in found)
            with pytest.raises(StoreError, match="OOM"):
                await store.put_many([(key(100 + index), bytes(100_000)) for index in range(3)])
            assert await store.get_many([key(1)]) == [b"before"]
        finally:
            redis_server.call("CONFIG", "SET", "maxmemory", 0)
        await store.put_many([(key(100), b"fits again")])
        assert await store.get_many([key(100)]) == [b"fits again"]


async def test_a_failed_disk_write_of_the_server_is_a_dropped_value(redis_server: RedisServer) -> None:
    """MISCONF: the server refuses writes after a failed snapshot, as on a full disk."""
    redis_server.call("CONFIG", "SET", "save", "3600 1", "dir", "/proc/self")
    try:
        async with opened(redis_server.url) as store:
            await store.put_many([(key(1), b"before")])
            redis_server.call("BGSAVE")
            with anyio.fail_after(20):
                while b"rdb_last_bgsave_status:err" not in redis_server.call("INFO", "persistence"):
                    await anyio.sleep(0.02)
            with pytest.raises(StoreError, match="MISCONF"):
                await store.put_many([(key(2), b"x")])
            assert await store.get_many([key(1), key(2)]) == [b"before", None]
            stats = await store.stats()
            assert (stats.dropped, stats.errors) == (1, 1)
    finally:
        redis_server.call("CONFIG", "SET", "save", "", "dir", str(redis_server.folder))


async def test_a_read_only_server_is_read_and_not_written(redis_server: RedisServer) -> None:
    async with opened(redis_server.url) as store:
        await store.put_many([(key(1), b"x")])
        redis_server.call("REPLICAOF", "127.0.0.1", free_port())
        try:
            assert await store.get_many([key(1)]) == [b"x"]
            with pytest.raises(StoreError, match="READONLY"):
                await store.put_many([(key(2), b"y")])
            with pytest.raises(StoreError, match="READONLY"):
                await store.raise_epoch("model", 2)
        finally:
            redis_server.call("REPLICAOF", "NO", "ONE")
        assert await store.raise_epoch("model", 2) == 2


async def test_a_restarted_server_is_used_again_at_once(redis_server: RedisServer) -> None:
    async with opened(redis_server.url) as store:
        await asyncio.gather(*(store.put_many([(key(index), b"x")]) for index in range(8)))
        redis_server.restart()
        assert await store.get_many([key(1)]) == [None]
        await store.put_many([(key(1), b"y")])
        assert await store.get_many([key(1)]) == [b"y"]
        assert (await store.stats()).errors == 0


async def test_a_hanging_server_costs_the_timeout_then_nothing(redis_server: RedisServer) -> None:
    """B29: nobody waits for a store that doesn't answer."""
    async with opened(redis_server.url, connect_timeout=0.2, socket_timeout=0.2) as store:
        await store.put_many([(key(1), b"x")])
        redis_server.pause()
        try:
            waited = []
            for _ in range(10):
                begin = time.perf_counter()
                with pytest.raises(StoreError):
                    await store.get_many([key(1)])
                waited.append(time.perf_counter() - begin)
            assert sum(seconds >= 0.2 for seconds in waited) <= 5, waited
            assert sorted(waited)[4] < 0.2, waited
        finally:
            redis_server.resume()
        with anyio.fail_after(20):
            while True:
                try:
                    assert await store.get_many([key(1)]) == [b"x"]
                    break
                except StoreError:
                    await anyio.sleep(0.05)


async def test_a_loading_server_is_an_error_of_the_call_only(redis_server: RedisServer) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await reader.read(65536):
            writer.write(b"-LOADING Redis is loading the dataset in memory\r\n" * request.count(b"*"))
            await writer.drain()

    async with listening(answer) as url, opened(url) as store:
        for _ in range(5):
            with pytest.raises(StoreError, match="LOADING"):
                await store.get_many([key(1), key(2)])
        assert (await store.stats()).errors >= 10


async def test_a_trickling_server_does_not_hold_a_call_for_ever() -> None:
    """A byte now and then is not silence, but no service either."""

    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"$100000\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    async with listening(trickle) as url, opened(url, socket_timeout=0.3) as store:
        with anyio.fail_after(30), pytest.raises(StoreError, match="slow"):
            await store.get_many([key(1)])


async def test_many_calls_at_once_on_a_slow_server_end_in_time(redis_server: RedisServer) -> None:
    """B27: calls beyond the connections wait for a bounded time and hold no memory for ever."""
    async with opened(redis_server.url, connect_timeout=0.2, socket_timeout=0.2, connections=2) as store:
        await store.put_many([(key(1), b"x")])
        redis_server.pause()
        try:
            with anyio.fail_after(20):
                outcomes = await asyncio.gather(*(store.get_many([key(1)]) for _ in range(100)), return_exceptions=True)
        finally:
            redis_server.resume()
        assert all(isinstance(outcome, StoreError) for outcome in outcomes)
        assert len({str(outcome) for outcome in outcomes}) <= 4
