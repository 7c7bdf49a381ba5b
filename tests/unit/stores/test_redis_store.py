from __future__ import annotations

import asyncio
import os
import re
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from kitelib.abc import SharedStore
from kitelib.errors import MissingExtraError, StoreError
from kitelib.stores.redis import RedisStore, wire
from kitelib.stores.redis.store import DEFAULT_TTL_S
from kitelib.testing import check_store
from tests.support.event_loop import MeasureLoopGap, quietest
from tests.support.redis_servers import RedisCluster, RedisSentinels, RedisServer, listening

PATIENT: dict[str, Any] = {"connect_timeout": 10.0, "socket_timeout": 10.0}  # a busy machine is no failure


def key(number: int) -> str:
    digits = f"{number * 40503 % 65536:04x}{number:060x}"
    return f"kite:{{{digits[:4]}}}:0123456789abcdef:kv:{digits}"


@asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[RedisStore]:
    store = RedisStore(url, **{**PATIENT, **options})
    try:
        yield store
    finally:
        await store.aclose()


async def test_one_server_keeps_the_contract(redis_server: RedisServer) -> None:
    """B15: one key holds all parts of a unit, so none of it can go alone."""

    async def make() -> RedisStore:
        redis_server.call("FLUSHALL")
        return RedisStore(redis_server.url, **PATIENT)

    await check_store(make)
    assert isinstance(RedisStore(redis_server.url), SharedStore)


async def test_a_unix_socket_keeps_the_contract(redis_server: RedisServer) -> None:
    async def make() -> RedisStore:
        redis_server.call("FLUSHALL")
        return RedisStore(f"unix://{redis_server.folder.parent}/redis.sock", **PATIENT)

    await check_store(make)


async def test_a_cluster_keeps_the_contract(redis_cluster: RedisCluster) -> None:
    """B28: one value per unit, answers in order with None for misses, over all nodes."""

    async def make() -> RedisStore:
        redis_cluster.flush()
        return RedisStore(redis_cluster.url, **PATIENT)

    await check_store(make)


async def test_tls_and_an_acl_user_keep_the_contract(redis_tls_server: RedisServer) -> None:
    async def make() -> RedisStore:
        redis_tls_server.call("FLUSHALL")
        ca = f"{redis_tls_server.tls}/ca.crt"
        return RedisStore(f"rediss://kite:s3cret%2F%40%3A@{redis_tls_server.name}?ssl_ca_certs={ca}", **PATIENT)

    await check_store(make)


async def test_an_unknown_certificate_is_refused(redis_tls_server: RedisServer) -> None:
    async with opened(f"rediss://kite:s3cret%2F%40%3A@{redis_tls_server.name}") as store:
        with pytest.raises(StoreError, match="certificate"):
            await store.warm()
    async with opened(f"rediss://kite:s3cret%2F%40%3A@{redis_tls_server.name}?ssl_cert_reqs=none") as store:
        await store.warm()


async def test_a_wrong_password_is_a_store_error_without_the_password(redis_tls_server: RedisServer) -> None:
    url = f"rediss://kite:wr0ngpw@{redis_tls_server.name}?ssl_ca_certs={redis_tls_server.tls}/ca.crt"
    async with opened(url) as store:
        for call in (store.warm(), store.get_many([key(1)]), store.put_many([(key(1), b"x")])):
            with pytest.raises(StoreError) as caught:
                await call
            assert "wr0ngpw" not in f"{caught.value!r} {caught.value.__cause__!r}"
        assert (await store.stats()).errors > 0


@pytest.mark.parametrize("kind", ["cluster", "sentinel"])
async def test_why_no_server_can_be_asked_is_said_every_time(redis_server: RedisServer, kind: str) -> None:
    """Also while it is not tried, since the first call is the engine's, and the second that of a person who looks."""
    name = "/mymaster" if kind == "sentinel" else ""
    async with opened(f"redis+{kind}://:wr0ngpw@{redis_server.name}{name}") as store:
        messages = []
        for call in (store.get_epoch("model"), store.warm()):
            with pytest.raises(StoreError) as caught:
                await call
            messages.append(str(caught.value))
    reason = messages[0].partition("can't be reached: ")[2]
    assert reason
    assert messages[1].endswith(f"is not asked now, after this: {reason}")
    assert "wr0ngpw" not in "".join(messages)


async def test_sentinels_keep_the_contract_and_lead_to_the_new_primary(redis_sentinels: RedisSentinels) -> None:
    async def make() -> RedisStore:
        redis_sentinels.primary().call("FLUSHALL")
        return RedisStore(redis_sentinels.url, **PATIENT)

    await check_store(make)
    async with opened(redis_sentinels.url, replica_reads=True) as reader:
        await reader.put_many([(key(1), b"copied")])
        redis_sentinels.primary().call("WAIT", 1, 5000)
        primary = redis_sentinels.primary()
        before = primary.call("INFO", "commandstats").count(b"cmdstat_get:")
        primary.call("CONFIG", "RESETSTAT")
        assert before == 1
        assert await reader.get_many([key(1)]) == [b"copied"]
        assert b"cmdstat_get:" not in primary.call("INFO", "commandstats")  # the replica answered
    async with opened(redis_sentinels.url, socket_timeout=1.0) as store:
        await store.put_many([(key(1), b"before")])
        assert await store.raise_epoch("model", 3) == 3
        old = redis_sentinels.primary()
        old.call("WAIT", 1, 5000)
        old.kill()
        with anyio.fail_after(30):
            while True:
                try:
                    if await store.get_many([key(1)]) == [b"before"]:
                        break
                except StoreError:
                    await anyio.sleep(0.1)
        with anyio.fail_after(30):
            while True:
                try:
                    await store.put_many([(key(2), b"after")])
                    break
                except StoreError:
                    await anyio.sleep(0.1)
        assert await store.get_epoch("model") == 3


async def test_sentinels_that_do_not_know_the_service_are_named(redis_server: RedisServer) -> None:
    async with opened(f"redis+sentinel://{redis_server.name}/nosuch") as store:
        with pytest.raises(StoreError, match="SENTINEL|nosuch"):
            await store.warm()


async def test_every_key_has_a_time_to_live_on_every_node(redis_cluster: RedisCluster) -> None:
    """B28: peers' Redis tiers write keys without an end."""
    async with opened(redis_cluster.url) as plain, opened(redis_cluster.url, ttl_s=60.5) as short:
        await plain.put_many([(key(index), b"x") for index in range(100)])
        await short.put_many([(key(index), b"y") for index in range(100, 200)])
        lives = []
        for node in redis_cluster.primaries():
            keys = node.call("KEYS", "*")
            assert len(keys) > 20
            lives += [node.call("PTTL", each) for each in keys]
    assert len(lives) == 200
    assert sum(60_500 >= life > 0 for life in lives) == 100
    assert sum(1000 * DEFAULT_TTL_S >= life > 60_500 for life in lives) == 100


async def test_a_value_is_gone_after_its_time_to_live(redis_server: RedisServer) -> None:
    async with opened(redis_server.url, ttl_s=0.05) as store:
        await store.put_many([(key(1), b"x")])
        await anyio.sleep(0.1)
        assert await store.get_many([key(1)]) == [None]
        assert await store.leading_run([key(1)]) == 0


async def test_a_long_run_is_cut_at_its_first_gap(redis_cluster: RedisCluster) -> None:
    keys = [key(index) for index in range(1500)]
    async with opened(redis_cluster.url) as store:
        await store.put_many([(each, b"x") for index, each in enumerate(keys) if index != 1400])
        assert await store.leading_run(keys) == 1400
        assert await store.leading_run(keys[1401:]) == 99
        assert await store.delete_many([*keys[:10], keys[1400], keys[3]]) == 10


async def test_items_are_listed_on_every_node_without_foreign_keys_and_without_touching_them(
    redis_cluster: RedisCluster,
) -> None:
    class Clock:
        now = 1_000_000.0

        def time(self) -> float:
            return self.now

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    values = {key(index): bytes(index) for index in range(1200)}
    async with opened(redis_cluster.url, clock=clock) as store:
        await store.put_many(list(values.items()))
        node = redis_cluster.owner("other")
        node.call("SET", "other", "x")
        redis_cluster.owner("kite:list").call("RPUSH", "kite:list", "no string")
        await store.raise_epoch("model", 1)
        pages = [page async for page in store.list_items()]
        listed = {item.key: item for page in pages for item in page}
        assert {name: item.num_bytes for name, item in listed.items()} == values_sizes(values)
        assert len(pages) >= 3
        assert max(map(len, pages)) < 1100
        used = {name: item.used_at for name, item in listed.items()}
        assert all(at is not None and 999_000 < at <= 1_000_000 for at in used.values())
        # To the listing, an hour passes; Redis counts that STRLEN as the last use. A unit that was read since is new.
        await store.get_many([key(7)])
        again = {item.key: item.used_at async for page in store.list_items() for item in page}
        assert again == used


def values_sizes(values: dict[str, bytes]) -> dict[str, int]:
    return {name: len(value) for name, value in values.items()}


async def test_a_value_that_was_replaced_is_listed_with_its_new_length(redis_server: RedisServer) -> None:
    async with opened(redis_server.url) as store:
        await store.put_many([(key(1), b"long" * 10), (key(2), b"")])
        assert {item.num_bytes async for page in store.list_items() for item in page} == {40, 0}
        await anyio.sleep(2.1)  # the idle time counts whole seconds
        await store.put_many([(key(1), b"short")])
        assert {item.num_bytes async for page in store.list_items() for item in page} == {5, 0}
        await store.delete_many([key(1), key(2)])
        assert [item async for page in store.list_items() for item in page] == []


async def test_heads_are_the_first_bytes(redis_cluster: RedisCluster) -> None:
    async with opened(redis_cluster.url) as store:
        await store.put_many([(key(1), b"0123456789"), (key(2), b"01"), (key(3), b"")])
        heads = await store.get_heads([key(9), key(1), key(2), key(3), key(1)], 4)
        assert heads == [None, b"0123", b"01", b"", b"0123"]


async def test_sizes_are_estimated_when_there_are_many_keys(redis_server: RedisServer) -> None:
    async with opened(redis_server.url) as store:
        await store.put_many([(key(index), b"x" * 100) for index in range(4000)])
        exact = await store.stats()
        assert exact.items == 4000
        for start in range(0, 4000, 1000):
            redis_server.call("MSET", *[word for index in range(start, start + 1000) for word in (f"o{index}", "x")])
        estimate = await store.stats()
        assert 2800 < estimate.items < 5200
        assert 0.7 * exact.bytes < estimate.bytes < 1.3 * exact.bytes


async def test_an_epoch_only_grows_under_concurrent_raisers(redis_cluster: RedisCluster) -> None:
    top = 2**63 - 1
    async with opened(redis_cluster.url) as one, opened(redis_cluster.url) as two, opened(redis_cluster.url) as three:
        seen: list[int] = []
        low: list[int] = []

        async def raise_by(store: RedisStore, start: int) -> None:
            for epoch in range(start, 400, 3):
                got = await store.raise_epoch("model", epoch)
                low.extend([epoch] if got < epoch else [])

        async def watch() -> None:
            while len(seen) < 200:
                seen.append(await three.get_epoch("model"))

        async with anyio.create_task_group() as group:
            for store, start in ((one, 0), (two, 1), (one, 2)):
                group.start_soon(raise_by, store, start)
            group.start_soon(watch)
        assert not low
        assert seen == sorted(seen)
        assert await three.raise_epoch("model", 5) == 399
        assert await two.raise_epoch("model", top - 1) == top - 1  # more digits than a Lua number has
        assert await two.raise_epoch("model", top) == top
        assert await one.raise_epoch("model", top - 1) == top
        assert await three.get_epoch("other") == 0
        node = redis_cluster.owner("kite-epoch:{model}")
        assert node.call("TTL", "kite-epoch:{model}") == -1
        assert (await one.stats()).items == 0


async def test_an_epoch_that_a_failover_lost_is_raised_again(redis_server: RedisServer) -> None:
    async with opened(redis_server.url) as store, opened(redis_server.url) as other:
        assert await store.raise_epoch("model", 7) == 7
        redis_server.call("FLUSHALL")
        assert await other.get_epoch("model") == 0
        assert await store.get_epoch("model") == 7
        assert await other.get_epoch("model") == 7


@pytest.mark.parametrize("name", ["", "UPPER", "x" * 65, "a b", "a}b"])
async def test_a_bad_epoch_name_is_a_store_error(redis_server: RedisServer, name: str) -> None:
    async with opened(redis_server.url) as store:
        with pytest.raises(StoreError, match="named"):
            await store.get_epoch(name)
        with pytest.raises(StoreError, match="2\\*\\*63"):
            await store.raise_epoch("model", 2**63)


async def test_a_foreign_value_under_an_epoch_key_is_named(redis_server: RedisServer) -> None:
    redis_server.call("SET", "kite-epoch:{model}", "seven")
    async with opened(redis_server.url) as store:
        with pytest.raises(StoreError, match="kite-epoch:"):
            await store.get_epoch("model")


async def test_a_key_of_another_type_is_an_error_of_that_key_alone(redis_server: RedisServer) -> None:
    redis_server.call("RPUSH", key(1), "x")
    async with opened(redis_server.url) as store:
        await store.put_many([(key(2), b"x")])
        assert await store.get_many([key(1), key(2)]) == [None, b"x"]
        assert (await store.stats()).errors == 1


async def test_large_values_come_back_and_the_loop_stays_free(
    redis_cluster: RedisCluster, loop_gap: MeasureLoopGap
) -> None:
    """B27: a run is read and written in pipelines of bounded size, in small steps."""
    items = [(key(index), os.urandom(370_000)) for index in range(64)]
    async with opened(redis_cluster.url) as store:
        await store.warm()

        async def write_and_read() -> None:
            await store.put_many(items)
            assert await store.get_many([name for name, _ in items]) == [value for _, value in items]

        gap = await quietest(loop_gap, 0.02, write_and_read)
        assert gap.longest_cpu_s < 0.02, gap  # mostly comparing and the noise of shared cores
        await store.put_many([(key(1), os.urandom(12_000_000)), (key(2), b"y" * 9_000_000)])
        one, two = await store.get_many([key(1), key(2)])
        assert one is not None
        assert (len(one), two) == (12_000_000, b"y" * 9_000_000)


async def test_a_value_that_no_unit_can_have_is_not_taken(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kitelib.stores.redis.store._MAX_VALUE_BYTES", 1000)
    redis_server.call("SET", key(1), b"x" * 200_000)
    async with opened(redis_server.url) as store:
        await store.put_many([(key(2), b"y" * 1000), (key(3), b"z" * 1001)])
        for _ in range(5):  # it is no failure of the server, which is asked again
            assert await store.get_many([key(2), key(1), key(9), key(2)]) == [b"y" * 1000, None, None, b"y" * 1000]
        stats = await store.stats()
        assert (stats.dropped, stats.errors) == (1, 5)


async def test_cancelled_calls_never_leave_a_reply_for_others(redis_cluster: RedisCluster) -> None:
    """B2: whatever is cancelled when, a later read never gives another key's value."""
    values = {key(index): f"{index}:".encode() * (200 if index % 3 else 30_000) for index in range(60)}
    wrong: list[str] = []
    cancelled = 0
    async with opened(redis_cluster.url, connections=2) as store:
        await store.put_many(list(values.items()))

        async def use(seed: int) -> None:
            names = [key((seed * 7 + step * step) % 60) for step in range(12)]
            found = await store.get_many(names)
            wrong.extend(name for name, value in zip(names, found, strict=True) if value not in (None, values[name]))
            if await store.leading_run(names) != len(names):
                wrong.append("leading_run")
            name = names[0]
            await store.put_many([(name, values[name])])
            heads = await store.get_heads(names, 3)
            wrong.extend(n for n, head in zip(names, heads, strict=True) if head is not None and head != values[n][:3])

        for seed in range(300):
            task = asyncio.create_task(use(seed))
            for _ in range(seed % 37):
                await asyncio.sleep(0)
            if seed % 5 == 0:
                await anyio.sleep(0.0005 * (seed % 11))
            cancelled += task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()
            if seed % 20 == 0:
                await use(seed)
        assert await store.get_many(list(values)) == list(values.values())
    assert not wrong
    assert cancelled > 100  # of 300; the quicker the machine, the more end before


async def test_after_closing_calls_fail_and_no_connection_is_left(redis_server: RedisServer) -> None:
    before = redis_server.call("INFO", "clients")
    store = RedisStore(redis_server.url, **PATIENT)
    await asyncio.gather(*(store.get_many([key(1)]) for _ in range(10)))
    await store.aclose()
    await store.aclose()
    for call in (store.get_many([key(1)]), store.warm(), store.get_epoch("x")):
        with pytest.raises(StoreError, match="closed"):
            await call
    await anyio.sleep(0.1)
    assert redis_server.call("INFO", "clients").split()[2] == before.split()[2]


async def test_an_address_where_nothing_listens_is_a_store_error_soon() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: refused
        port = taken.getsockname()[1]
        for scheme, tail in (("redis", ""), ("redis+cluster", ""), ("redis+sentinel", "/kite")):
            async with opened(f"{scheme}://127.0.0.1:{port}{tail}") as store:
                for _ in range(5):
                    with pytest.raises(StoreError, match=re.escape(f"{scheme}://127.0.0.1:{port}")):
                        await store.get_many([key(1)])
                stats = await store.stats()
                assert (stats.items, stats.hits) == (0, 0)
                assert stats.errors > 0


async def test_a_server_that_speaks_another_protocol_is_a_store_error() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()

    async with listening(answer) as url, opened(url) as store:
        with pytest.raises(StoreError):
            await store.get_many([key(1)])


async def test_large_values_are_asked_for_a_few_at_a_time() -> None:
    """B27: neither the server's send buffer nor this side fills up with a long run of large values."""
    ahead: list[int] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = 0
        while request := await reader.read(65536):
            asked += request.count(b"GET")
            while asked:
                ahead.append(asked)
                writer.write(b"$600000\r\n%b\r\n" % bytes(600_000))
                await writer.drain()
                asked -= 1
                await asyncio.sleep(0.002)
                if reader._buffer:  # type: ignore[attr-defined]
                    asked += (await reader.read(65536)).count(b"GET")

    async with listening(answer) as url, opened(url) as store:
        assert await store.get_many([key(index) for index in range(30)]) == [bytes(600_000)] * 30
        assert len(ahead) == 30
        assert max(ahead) <= 3


async def test_an_error_that_repeats_the_login_does_not_show_it() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.read(65536)
        writer.write(b"-ERR unknown command, with args beginning with: " + request.replace(b"\r\n", b" ") + b"\r\n")
        await writer.drain()
        await reader.read(1)

    async with listening(answer) as url, opened(url.replace("//", "//user:hunter2@")) as store:
        with pytest.raises(StoreError, match="unknown command") as caught:
            await store.get_many([key(1)])
        assert "hunter2" not in str(caught.value)


async def test_a_server_that_answers_too_much_is_not_believed(redis_server: RedisServer) -> None:
    """B2: a reply that nobody asked for ends the connection instead of shifting all later ones."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await reader.read(65536):
            if b"GET" in request:
                writer.write(b"$5\r\nfirst\r\n$6\r\nsecond\r\n")
            else:
                writer.write(b"+OK\r\n" * request.count(b"*"))
            await writer.drain()

    async with listening(relay) as url, opened(url) as store:
        for number in range(3):
            assert await store.get_many([key(number)]) == [b"first"]


@pytest.mark.parametrize("surplus", [b":", b"$6\r\nsec", b"*2\r\n", b"$7\r\n", b":0"])
async def test_part_of_a_reply_too_much_is_not_taken_for_the_next(surplus: bytes) -> None:
    """B2: as above, when only part of the surplus came."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await reader.read(65536):
            writer.write((b"$5\r\nfirst\r\n" if b"GET" in request else b":1\r\n") + surplus)
            await writer.drain()

    async with listening(relay) as url, opened(url) as store:
        for number in range(4):
            assert await store.leading_run([key(number)]) == 1
        for number in range(4):
            assert await store.get_many([key(number)]) == [b"first"]
        assert (await store.stats()).items == 0  # this server's answer to SCAN makes no sense
        with pytest.raises(StoreError, match="list_items"):
            [page async for page in store.list_items()]


def test_without_the_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hiredis", None)
    with pytest.raises(MissingExtraError, match=r"kitelib\[redis\]"):
        wire.require_redis()
    with pytest.raises(MissingExtraError, match="Redis tier"):
        RedisStore("redis://cache")
