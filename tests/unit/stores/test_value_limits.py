"""Every store refuses values that are longer than it was told a unit can be, before they come in."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from kitelib.abc import SharedStore
from kitelib.errors import StoreError
from kitelib.stores.disk import DiskStore
from kitelib.stores.redis import RedisStore
from kitelib.stores.s3 import S3Store
from tests.support.redis_servers import RedisServer
from tests.support.s3_server import S3Server


@pytest.mark.parametrize("kind", ["disk", "redis", "s3"])
async def test_a_longer_value_is_a_miss_and_the_others_still_come(
    kind: str, tmp_path: Path, redis_server: RedisServer, s3_server: S3Server
) -> None:
    place = s3_server.new_url()

    def opened() -> SharedStore:
        if kind == "disk":
            return DiskStore(tmp_path / "pool", 2**30)
        return RedisStore(redis_server.url) if kind == "redis" else S3Store(place, options=s3_server.options())

    keys = [f"kite:{{000{index}}}:{'0' * 16}:kv:{index:064x}" for index in range(3)]
    writer = opened()
    await writer.put_many([(keys[0], b"short"), (keys[1], bytes(6 * 2**20))])
    await writer.aclose()
    store = opened()
    store.limit_values(4 * 2**20)  # type: ignore[attr-defined]
    assert await store.get_many([keys[0]]) == [b"short"]
    found: list[bytes | None] = [None]
    with contextlib.suppress(StoreError):  # a store that could do nothing else in the call may say so
        found = await store.get_many([keys[1]])
    assert found == [None]
    assert await store.get_many([keys[0], keys[2]]) == [b"short", None]
    await store.aclose()
