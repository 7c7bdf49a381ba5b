"""The one conformance suite, run against every store that there is."""

from __future__ import annotations

import inspect
import itertools
import sys
from pathlib import Path

import anyio.to_thread
import pytest

from kitelib.abc import SharedStore, Store
from kitelib.config import PoolConfig
from kitelib.stores.disk import DiskStore
from kitelib.stores.memory import MemoryStore
from kitelib.stores.redis import RedisStore
from kitelib.stores.registry import open_stores
from kitelib.stores.s3 import S3Store
from kitelib.testing import check_shared_store, check_store
from tests.support.installed import install

ROOM = 16 * 2**20
SQLITE = Path(__file__).parents[2] / "examples" / "sqlite_store"


class Wrapped:
    """What a third party may put around a store, e.g. to trace it: the methods of `Store`, and nothing else."""

    def __init__(self, inner):
        self._inner = inner

    async def get_many(self, keys):
        return await self._inner.get_many(keys)

    async def put_many(self, items):
        await self._inner.put_many(items)

    async def leading_run(self, keys):
        return await self._inner.leading_run(keys)

    async def delete_many(self, keys):
        return await self._inner.delete_many(keys)

    async def stats(self):
        return await self._inner.stats()

    async def aclose(self):
        await self._inner.aclose()


@pytest.fixture
def memory():
    return lambda: MemoryStore(ROOM)


@pytest.fixture
def wrapped():
    return lambda: Wrapped(MemoryStore(ROOM))


@pytest.fixture
def sqlite(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path / "site", "kite-sqlite-store", {"sqlite": "kite_sqlite_store:open_store"}, SQLITE)
    numbers = itertools.count()

    async def make():
        pool = PoolConfig(stores=(f"sqlite://{tmp_path}/{next(numbers)}.db",))
        ((_, store),) = await anyio.to_thread.run_sync(open_stores, pool)
        return store

    yield make
    sys.modules.pop("kite_sqlite_store", None)


@pytest.fixture
def disk(tmp_path):
    return lambda place: DiskStore(tmp_path / place, ROOM)


@pytest.fixture
def redis(redis_server):
    numbers = {}

    async def make(place):
        if place not in numbers and len(numbers) % 16 == 0:  # a server has 16 databases: they begin anew
            await anyio.to_thread.run_sync(redis_server.call, "FLUSHALL")
        return RedisStore(f"{redis_server.url}/{numbers.setdefault(place, len(numbers) % 16)}")

    return make


@pytest.fixture
def cluster(redis_cluster):
    last = []

    async def make(place):
        if last[-1:] != [place]:  # a cluster has one place only, which a new name finds empty
            await anyio.to_thread.run_sync(redis_cluster.flush)
            last.append(place)
        return RedisStore(redis_cluster.url)

    return make


@pytest.fixture
def s3(s3_server):
    urls = {}
    return lambda place: S3Store(urls.setdefault(place, s3_server.new_url()), options=s3_server.options())


@pytest.mark.parametrize("name", ["memory", "wrapped", "sqlite"])
async def test_a_private_store_keeps_the_contract(name, request):
    await check_store(request.getfixturevalue(name))


@pytest.mark.parametrize("name", ["disk", "redis", "cluster", "s3"])
async def test_a_shared_store_keeps_the_contract_of_stores(name, request):
    make, numbers = request.getfixturevalue(name), itertools.count()
    await check_store(lambda: make(f"fresh-{next(numbers)}"))


@pytest.mark.parametrize("name", ["disk", "redis", "cluster", "s3"])
async def test_a_shared_store_keeps_the_contract_of_shared_stores(name, request):
    await check_shared_store(request.getfixturevalue(name))


@pytest.mark.parametrize("name", ["memory", "wrapped", "sqlite"])
async def test_a_private_store_claims_no_more_than_it_is(name, request):
    made = request.getfixturevalue(name)()
    store = await made if inspect.isawaitable(made) else made
    assert isinstance(store, Store)
    assert not isinstance(store, SharedStore)
    await store.aclose()
