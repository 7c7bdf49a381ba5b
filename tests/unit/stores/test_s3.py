"""The S3 store against a real server over HTTP."""

import asyncio
import os
import random
import subprocess
import sys
import time

import anyio
import pytest

from kitelib.abc import SharedStore
from kitelib.errors import StoreError
from kitelib.fingerprint import store_key
from kitelib.stores.s3 import S3Store, client
from kitelib.stores.s3 import store as s3_store
from tests.support.event_loop import quietest


class HandClock:
    def __init__(self):
        self.now = time.time()

    def time(self):
        return self.now

    def monotonic(self):
        return self.now


def key(number, kind="kv", model="0123456789abcdef"):
    return store_key(model, kind, random.Random(number).randbytes(32))


@pytest.fixture
def make(s3_server):
    stores = []

    def make_one(url=None, proxy=None, *, options=None, **others):
        given = s3_server.options() | ({} if proxy is None else {"endpoint": proxy.endpoint}) | (options or {})
        stores.append(S3Store(s3_server.new_url() if url is None else url, options=given, **others))
        return stores[-1]

    return make_one


@pytest.fixture(scope="module")
def large_place(s3_server):
    """The URL of a place with 1010 units of one kind, 50 of another and one foreign key."""
    url = s3_server.new_url()

    async def fill():
        store = S3Store(url, options=s3_server.options())
        items = [(key(number), bytes(50)) for number in range(1010)]
        items += [(key(number, "logits", "f" * 16), bytes(10)) for number in range(50)]
        await store.put_many([*items, ("other", b"x")])

    asyncio.run(fill())
    return url


def test_is_a_shared_store():
    """tests/contract has the rest."""
    assert isinstance(S3Store("s3://abc"), SharedStore)


async def test_big_values_go_up_in_parts_and_appear_whole(make, s3_proxy):
    """B4: a value is visible when its upload is complete, never before."""
    proxy = s3_proxy()
    store = make(proxy=proxy)
    value = random.Random(1).randbytes(client.PART_BYTES * 2 + 12345)
    await store.put_many([(key(0), value), (key(1), value[: client.PART_BYTES])])
    assert await store.get_many([key(0), key(1)]) == [value, value[: client.PART_BYTES]]
    assert await store.get_heads([key(0)], 10) == [value[:10]]
    uploads = [request.path for request in proxy.requests if request.method in ("PUT", "POST")]
    assert sum("partNumber=" in path for path in uploads) == 3
    assert len(uploads) == 1 + 3 + 1 + 1  # start, parts, completion; and one PUT for what is exactly one part


async def test_an_upload_that_ends_early_leaves_no_value(make, s3_proxy):
    proxy = s3_proxy()
    store = make(proxy=proxy)
    proxy.only, proxy.faults = "PUT", type(proxy.faults)([None, "hang", "hang", "hang"])
    with anyio.move_on_after(0.5):
        await store.put_many([(key(0), bytes(3 * client.PART_BYTES))])
    assert await store.get_many([key(0)]) == [None]
    assert (await store.stats()).items == 0


async def test_moving_big_values_does_not_hold_the_loop_up(make, loop_gap):
    store = make()
    value = bytes(40 * 2**20)
    small = value[:370_000]
    await store.warm()

    async def write_and_read() -> None:
        await store.put_many([(key(0), value)] + [(key(number), small) for number in range(1, 30)])
        found = await store.get_many([key(number) for number in range(30)])
        assert [len(each) for each in found] == [len(value)] + [370_000] * 29

    gap = await quietest(loop_gap, 0.01, write_and_read)
    assert gap.turns > 20
    assert gap.longest_cpu_s < 0.01


async def test_objects_too_big_for_a_unit_are_misses_before_anything_is_allocated(make, monkeypatch, s3_proxy):
    proxy = s3_proxy()
    store = make(proxy=proxy)
    await store.put_many([(key(0), bytes(5000)), (key(1), bytes(100)), (key(2), bytes(900)), (key(3), bytes(900))])
    monkeypatch.setattr(s3_store, "MAX_OBJECT_BYTES", 1000)
    store.limit_values(2000)  # never more than that
    assert await store.get_many([key(0), key(1)]) == [None, bytes(100)]
    assert (await store.stats()).errors == 0
    # Together they would be too big for one answer: one of them is left out, and counted.
    found = await store.get_many([key(2), key(3)])
    assert sorted(value is None for value in found) == [False, True]
    assert (await store.stats()).errors == 1
    await store.put_many([(key(4), bytes(1001))])
    assert (await store.stats()).dropped == 1
    assert await store.get_many([key(4)]) == [None]


async def test_keys_that_s3_can_not_name_are_dropped_and_missed(make):
    store = make()
    long = "x" * 5000
    await store.put_many([(long, b"1"), ("a b/ü", b"2")])
    assert await store.get_many([long, "a b/ü"]) == [None, b"2"]
    assert await store.get_heads([long, "a b/ü"], 5) == [None, b"2"]
    assert await store.delete_many([long]) == 0
    stats = await store.stats()
    assert (stats.dropped, stats.items, stats.errors) == (1, 1, 0)


async def test_expired_values_are_misses_everywhere(make, s3_server):
    clock, url = HandClock(), s3_server.new_url()
    store, forever = make(url, ttl_s=60.0, clock=clock), make(url)
    await store.put_many([(key(0), b"old"), (key(1), b"")])
    assert await store.get_many([key(0)]) == [b"old"]
    clock.now += 62
    assert await store.get_many([key(0), key(1)]) == [None, None]
    assert await store.get_heads([key(0), key(1)], 2) == [None, None]
    assert await store.leading_run([key(0)]) == 0
    assert [page async for page in store.list_items()] == []
    stats = await store.stats()
    assert (stats.items, stats.bytes) == (0, 0)
    assert await forever.get_many([key(0)]) == [b"old"]
    assert await store.delete_many([key(0)]) == 0, "what has expired does not count, but it goes"
    assert await forever.get_many([key(0), key(1)]) == [None, b""]


async def test_a_sweep_deletes_what_has_expired_and_nothing_else(make, s3_server):
    clock, url = HandClock(), s3_server.new_url()
    store, forever = make(url, ttl_s=60.0, clock=clock), make(url)
    await store.put_many([(key(number), b"x") for number in range(30)])
    await store.raise_epoch("model", 4)
    assert await store.sweep() == 0
    clock.now += 62
    assert await store.sweep() == 30
    assert (await store.stats()).evictions == 30
    assert [page async for page in forever.list_items()] == []
    assert await store.get_epoch("model") == 4, "epochs don't expire"
    assert await forever.sweep() == 0


async def test_a_listing_tells_sizes_and_times(make):
    store = make()
    await store.put_many([(key(0), b"12345")])
    ((item,),) = [page async for page in store.list_items()]
    assert (item.key, item.num_bytes, item.used_at) == (key(0), 5, None)
    assert abs(item.written_at - time.time()) < 60


async def test_a_listing_comes_in_pages(make, large_place):
    pages = [[item.key for item in page] async for page in make(large_place).list_items()]
    expected = {key(number) for number in range(1010)} | {key(number, "logits", "f" * 16) for number in range(50)}
    assert {each for page in pages for each in page} == expected
    assert max(map(len, pages)) == 500


async def test_foreign_objects_in_the_prefix_are_left_alone(make, s3_server):
    url = s3_server.new_url()
    store = make(url)
    s3_server.call(f"{url.removeprefix('s3:/')}/v1/units/notes.txt", b"hello", "PUT")
    assert (await store.stats()).items == 0
    assert [page async for page in store.list_items()] == []


async def test_large_stores_are_estimated_from_their_first_objects(make, monkeypatch, large_place):
    store = make(large_place)
    exact = await store.stats()
    assert (exact.items, exact.bytes) == (1061, 1010 * 50 + 50 * 10 + 1)
    monkeypatch.setattr(s3_store, "_COUNTED", 900)
    monkeypatch.setattr(s3_store, "PAGE", 250)
    estimate = await store.stats()
    assert estimate.items != exact.items
    assert estimate.items == pytest.approx(exact.items, rel=0.15)
    assert estimate.bytes == pytest.approx(exact.bytes, rel=0.15)


async def test_a_run_takes_few_round_trips(make, s3_proxy):
    """B29: what a look-up costs does not grow with the run times the round trip."""
    proxy = s3_proxy()
    store = make(proxy=proxy)
    keys = [key(number) for number in range(48)]
    await store.put_many([(each, b"x") for each in keys])
    proxy.requests.clear()
    proxy.most_at_once = 0
    assert await store.leading_run(keys) == 48
    assert len(proxy.requests) == 48
    assert proxy.most_at_once > 8
    proxy.requests.clear()
    assert await store.leading_run([key(10_000), *keys]) == 0
    assert len(proxy.requests) == 16, "a miss at the front ends the search in its first window"


async def test_one_request_deletes_many(make, s3_proxy):
    proxy = s3_proxy()
    store = make(proxy=proxy)
    keys = [key(number) for number in range(40)]
    await store.put_many([(each, b"x") for each in keys])
    proxy.requests.clear()
    assert await store.delete_many([*keys, key(10_000), keys[0]]) == 40
    assert sorted({request.method for request in proxy.requests}) == ["HEAD", "POST"]
    assert [request.method for request in proxy.requests].count("POST") == 1


async def test_requests_under_way_are_bounded(make, s3_proxy):
    proxy = s3_proxy()
    store = make(proxy=proxy)
    keys = [key(number) for number in range(100)]
    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(store.get_many, keys)
    assert 1 < proxy.most_at_once <= 64
    assert len(proxy.requests) == 500


async def test_older_epochs_are_tidied_up(make, s3_server, s3_proxy):
    url = s3_server.new_url()
    store = make(url)
    for epoch in (1, 5, 3, 9):
        await store.raise_epoch("model", epoch)
    listing = s3_server.call(f"/{s3_server.bucket}?list-type=2&prefix={url.rpartition('/')[2]}/", method="GET")
    assert listing.count(b"<Key>") == 1
    assert b"/v1/epochs/model/00000000000000000009</Key>" in listing


async def test_an_epoch_stands_though_tidying_up_fails(make, s3_proxy):
    proxy = s3_proxy()
    store = make(proxy=proxy)
    await store.raise_epoch("model", 1)
    proxy.only, proxy.always = "POST", "500"
    assert await store.raise_epoch("model", 2) == 2
    proxy.always = None
    assert await store.get_epoch("model") == 2


async def test_random_cancellations_never_mix_values(make):
    """B2, B7: whatever is cut off, a key gets its own value or none."""
    store, dice = make(), random.Random(5)
    values = {key(number): b"%d;" % number * dice.randrange(1, 40_000) for number in range(24)}
    await store.put_many(list(values.items()))

    async def use(patience_s):
        keys = dice.sample(list(values), 3)
        with anyio.move_on_after(patience_s):
            if dice.random() < 0.3:
                await store.put_many([(each, values[each]) for each in keys])
            found = await store.get_many(keys)
            heads = await store.get_heads(keys, 3)
            assert await store.leading_run(keys) == 3
            assert found == [values[each] for each in keys]
            assert heads == [values[each][:3] for each in keys]
            return 1
        return 0

    finished = cut_off = 0
    for _ in range(20):
        patience = [dice.expovariate(50.0) for _ in range(8)] + [float("inf")] * 6
        tasks = [asyncio.ensure_future(use(patience_s)) for patience_s in patience]
        await asyncio.sleep(dice.expovariate(50.0))
        for task in tasks[-4:]:
            task.cancel()  # asyncio's own way, besides anyio's
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert result in (0, 1) or isinstance(result, asyncio.CancelledError), result
            finished += result == 1
            cut_off += result != 1
    assert finished >= 40
    assert cut_off > 100
    assert await store.get_many(list(values)) == list(values.values())
    assert (await store.stats()).errors == 0


async def test_another_process_finds_what_this_one_wrote(make, s3_server):
    """B6: where a value lies depends on its key alone, not on the process that asks."""
    url = s3_server.new_url()
    store = make(url)
    await store.put_many([(key(0), b"value"), ("other key", b"other")])
    await store.raise_epoch("model", 6)
    code = f"""
import anyio
from kitelib.stores.s3 import S3Store

async def main():
    store = S3Store({url!r}, options={s3_server.options()!r})
    print(await store.get_many([{key(0)!r}, "other key"]), await store.get_epoch("model"))

anyio.run(main)
"""
    for seed in ("1", "2"):
        run = [sys.executable, "-c", code]
        done = await anyio.run_process(run, env=os.environ | {"PYTHONHASHSEED": seed}, stderr=subprocess.STDOUT)
        assert done.stdout.decode().strip() == "[b'value', b'other'] 6"


async def test_values_whose_fingerprints_begin_alike_are_apart(make):
    """B24: the whole fingerprint is the identity, here as everywhere."""
    store = make()
    keys = [store_key("0123456789abcdef", "kv", bytes(24) + number.to_bytes(8, "big")) for number in range(20)]
    await store.put_many([(each, each.encode()) for each in keys[::2]])
    assert await store.get_many(keys) == [each.encode() if at % 2 == 0 else None for at, each in enumerate(keys)]


async def test_a_closed_store_is_a_store_error(make):
    store = make()
    await store.put_many([(key(0), b"x")])
    await store.aclose()
    with pytest.raises(StoreError, match="is closed; open a new one"):
        await store.get_many([key(0)])
