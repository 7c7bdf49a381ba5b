"""Adapters in the pool: read from there instead of the folder, and never a reason for opening to fail."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kitelib.config import AdapterConfig, PoolConfig
from kitelib.engine import adapters as adapters_module
from kitelib.engine.adapters import adapters_from_pool, adapters_to_pool
from kitelib.errors import StoreError
from kitelib.runtime.supervisor import Supervisor
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.pool import RUPool
from kitelib.upcycle.adapter_unit import AdapterContent, adapter_digest, adapter_unit
from tests.support.peft_folders import small_model, write_adapter

OpenPool = Callable[..., AbstractAsyncContextManager[RUPool]]
DOOR = ThreadDoor()


@pytest.fixture
def open_pool(tmp_path: Path) -> OpenPool:
    """``async with open_pool(**options) as pool``: memory and a disk tier that outlives the pool."""

    @asynccontextmanager
    async def opened(**options: Any) -> AsyncIterator[RUPool]:
        config = PoolConfig(**{"memory_bytes": 10**7, "disk": str(tmp_path / "pool"), **options})
        supervisor = Supervisor()
        supervisor.start()
        pool = RUPool(config, ThreadDoor())
        try:
            await pool.start(supervisor)
            yield pool
            await pool.drain()
        finally:
            await supervisor.aclose()
            await pool.aclose()

    return opened


def made(number: int = 0) -> AdapterContent:
    from safetensors.numpy import save

    data = save({"base_model.model.a.lora_A.weight": np.full((2, 4), number, np.float32)})
    return AdapterContent({"a": 1.0}, data, adapter_digest({"a": 1.0}, hashlib.sha256(data).digest()))


def named(content: AdapterContent, path: str = "/nowhere") -> AdapterConfig:
    return AdapterConfig(path, digest=content.digest.hex())


async def test_adapter_comes_from_memory(open_pool: OpenPool) -> None:
    async with open_pool() as pool:
        assert await adapters_from_pool(pool, {"x": named(made())}, DOOR) == {}
        assert await adapters_to_pool(pool, {"any": made()}, DOOR) == 1
        found = await adapters_from_pool(pool, {"x": named(made()), "y": named(made(1))}, DOOR)
        assert list(found) == ["x"]
        assert bytes(found["x"].weights) == made().weights
        assert found["x"].digest == made().digest


async def test_adapter_outlives_the_process_in_an_outer_tier(open_pool: OpenPool) -> None:
    async with open_pool() as pool:
        await adapters_to_pool(pool, {"any": made()}, DOOR)
    async with open_pool() as pool:
        found = await adapters_from_pool(pool, {"x": named(made())}, DOOR)
        assert bytes(found["x"].weights) == made().weights


async def test_authenticated_pool_gives_adapters_only_under_its_key(open_pool: OpenPool) -> None:
    async with open_pool(hmac_key=b"k" * 16) as pool:
        await adapters_to_pool(pool, {"any": made()}, DOOR)
    async with open_pool(hmac_key=b"k" * 16) as pool:
        assert "x" in await adapters_from_pool(pool, {"x": named(made())}, DOOR)
    async with open_pool(hmac_key=b"other key" * 2) as pool:
        assert await adapters_from_pool(pool, {"x": named(made())}, DOOR) == {}


async def test_each_content_is_stored_once(open_pool: OpenPool) -> None:
    async with open_pool() as pool:
        assert await adapters_to_pool(pool, {"a": made(), "b": made(), "c": made(1)}, DOOR) == 2
        assert await adapters_to_pool(pool, {"a": made()}, DOOR) == 0
        assert await adapters_to_pool(pool, {"z": made(2)}, DOOR, skip={"z"}) == 0


async def test_cleared_pool_has_no_adapters(open_pool: OpenPool) -> None:
    async with open_pool(disk=None) as pool:
        await adapters_to_pool(pool, {"a": made()}, DOOR)
        await pool.clear()
        assert await adapters_from_pool(pool, {"a": named(made())}, DOOR) == {}


async def test_unit_with_a_foreign_content_is_dropped(open_pool: OpenPool, caplog: pytest.LogCaptureFixture) -> None:
    good, bad = adapter_unit(made()), adapter_unit(made(1))
    object.__setattr__(bad, "cf", good.cf)
    async with open_pool() as pool:
        await pool.put_units([bad], pool.epoch)
        await pool.drain()
        with caplog.at_level(logging.WARNING):
            assert await adapters_from_pool(pool, {"x": named(made())}, DOOR) == {}
        assert "as its fingerprint says" in caplog.text
        assert await adapters_to_pool(pool, {"x": made()}, DOOR) == 1
        assert bytes((await adapters_from_pool(pool, {"x": named(made())}, DOOR))["x"].weights) == made().weights


async def test_folder_of_a_known_content_is_not_read(
    open_pool: OpenPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    from kitelib.backends.torch_engine.lora import AdapterSet

    model = await DOOR.run(lambda: small_model("llama"))
    await DOOR.run(lambda: write_adapter(tmp_path / "a", model))
    config = {"a": AdapterConfig(str(tmp_path / "a"))}

    async def load(**options: Any) -> Any:
        return await DOOR.run(lambda: AdapterSet(model, config, torch.float32, "cpu", tmp_path / "cache", **options))

    async with open_pool() as pool:
        first = await load()
        assert await adapters_to_pool(pool, first.take_contents(), DOOR) == 1
        first.close()
        contents = await adapters_from_pool(pool, config, DOOR, cache_dir=tmp_path / "cache")
        monkeypatch.setattr(
            "kitelib.backends.torch_engine.lora.read_adapter", lambda *_: pytest.fail("the folder was read")
        )
        second = await load(contents=contents)
        assert second.states == first.states
        second.close()


async def test_missing_folder_without_digest_is_left_to_the_loader(open_pool: OpenPool) -> None:
    async with open_pool() as pool:
        assert await adapters_from_pool(pool, {"x": AdapterConfig("/nowhere")}, DOOR) == {}


async def test_pool_that_keeps_nothing_is_not_asked(open_pool: OpenPool) -> None:
    async with open_pool(memory_bytes=0, disk=None) as pool:
        assert await adapters_to_pool(pool, {"x": made()}, DOOR) == 0
        assert await adapters_from_pool(pool, {"x": named(made())}, DOOR) == {}


async def test_failing_store_is_only_a_miss(
    open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: Any, **__: Any) -> Any:
        raise StoreError("it is down")

    async with open_pool(disk=None) as pool:
        monkeypatch.setattr(pool.memory, "put_many", broken)
        assert await adapters_to_pool(pool, {"x": made()}, DOOR) == 0
        assert "could not be kept in the pool" in caplog.text
        monkeypatch.setattr(pool, "fetch_any", broken)
        assert await adapters_from_pool(pool, {"x": named(made())}, DOOR) == {}
        assert "could not be looked for" in caplog.text


async def test_adapter_too_large_for_a_unit_is_left_out(open_pool: OpenPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters_module, "fits_a_unit", lambda content: content.digest != made().digest)
    async with open_pool() as pool:
        assert await adapters_to_pool(pool, {"large": made(), "small": made(1)}, DOOR) == 1
        assert await adapters_from_pool(pool, {"large": named(made())}, DOOR) == {}
