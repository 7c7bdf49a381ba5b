"""The example of a third-party store is found by its entry point, and keeps the contract."""

import itertools
import re
import sys
from pathlib import Path

import anyio.to_thread
import pytest

from kitelib.config import PoolConfig
from kitelib.errors import ConfigError, StoreError
from kitelib.stores.registry import open_stores
from kitelib.testing import check_store
from tests.support.installed import install

EXAMPLE = Path(__file__).parents[3] / "examples" / "sqlite_store"


@pytest.fixture
def sqlite_installed(monkeypatch, tmp_path):
    """The entry points are read from the example's pyproject.toml, so that a mistake there is found."""
    text = (EXAMPLE / "pyproject.toml").read_text()
    section = text.partition('[project.entry-points."kitelib.stores"]\n')[2].partition("\n\n")[0]
    entry_points = dict(re.findall(r'^(\w+) = "([^"]+)"$', section, re.MULTILINE))
    install(monkeypatch, tmp_path / "site", "kite-sqlite-store", entry_points, EXAMPLE)
    yield
    sys.modules.pop("kite_sqlite_store", None)


@pytest.fixture
def open_sqlite(sqlite_installed, tmp_path):
    numbers = itertools.count()

    async def open_one(name=None, *, max_bytes=16 * 2**20, **config):
        path = tmp_path / f"{next(numbers) if name is None else name}.db"
        pool = PoolConfig(stores=(f"sqlite://{path}?max_bytes={max_bytes}",), **config)
        ((_, store),) = await anyio.to_thread.run_sync(open_stores, pool)
        return store

    return open_one


async def test_the_example_keeps_the_store_contract(open_sqlite):
    await check_store(open_sqlite)


async def test_values_survive_a_restart(open_sqlite):
    store = await open_sqlite("a")
    await store.put_many([("kite:1", b"one")])
    await store.aclose()
    again = await open_sqlite("a")
    assert await again.get_many(["kite:1"]) == [b"one"]
    await again.aclose()


async def test_two_handles_share_one_file(open_sqlite):
    first, second = await open_sqlite("a"), await open_sqlite("a")
    await first.put_many([("kite:1", b"one")])
    assert await second.get_many(["kite:1"]) == [b"one"]
    assert (await second.stats()).items == 1
    await first.aclose()
    await second.aclose()


async def test_the_bound_holds_and_the_least_recently_used_goes_first(open_sqlite, tmp_path):
    store = await open_sqlite("a", max_bytes=10 * 4096)
    for number in range(10):
        await store.put_many([(f"kite:{number}", b"x" * 3000)])
    await store.get_many(["kite:0"])
    await store.put_many([("kite:new", b"x" * 3000), ("kite:huge", b"x" * 100_000)])
    stats = await store.stats()
    assert (stats.items, stats.bytes, stats.evictions, stats.dropped) == (10, 10 * 4096, 1, 1)
    assert await store.leading_run(["kite:0", "kite:new", "kite:1"]) == 2
    for number in range(300):
        await store.put_many([(f"kite:{number}", b"y" * 3000)])
    assert (tmp_path / "a.db").stat().st_size < 30 * 4096
    await store.aclose()


async def test_values_expire(open_sqlite):
    store = await open_sqlite(ttl_seconds=60.0)
    now = 1000.0
    store._time = lambda: now
    await store.put_many([("kite:1", b"one")])
    now = 1059.0
    assert await store.get_many(["kite:1"]) == [b"one"]
    now = 1060.0
    assert await store.get_many(["kite:1"]) == [None]
    assert await store.leading_run(["kite:1"]) == 0
    assert (await store.stats()).items == 0
    await store.aclose()


async def test_a_file_that_is_no_database_is_a_store_error(open_sqlite, tmp_path):
    (tmp_path / "a.db").write_bytes(b"not a database" * 1000)
    store = await open_sqlite("a")
    with pytest.raises(StoreError, match="not a database"):
        await store.get_many(["kite:1"])
    await store.aclose()
    with pytest.raises(StoreError, match="closed"):
        await store.get_many(["kite:1"])


@pytest.mark.parametrize(
    "url", ["sqlite://host/a.db", "sqlite://", "sqlite:///a.db?max_bytes=1G", "sqlite:///a.db?x=1"]
)
def test_a_wrong_url_is_refused(sqlite_installed, url):
    with pytest.raises(ConfigError, match="sqlite:///folder/file.db"):
        open_stores(PoolConfig(stores=(url,)))
