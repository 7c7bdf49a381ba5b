"""Opening, replacing and closing what serves an engine's requests."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Final

import anyio

from kitelib.config import AdapterConfig, PoolConfig, ReusePolicy
from kitelib.engine.calls import check_policy
from kitelib.engine.exporting import LivePool
from kitelib.engine.gate import Gate
from kitelib.engine.loading import Loader
from kitelib.engine.matching import open_encoder
from kitelib.engine.preloading import Preloader
from kitelib.engine.serving import Serving, load_backend, use_model
from kitelib.errors import EngineClosedError
from kitelib.runtime.supervisor import Supervisor
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.pool import RUPool
from kitelib.upcycle.recycler import Recycler
from kitelib.yoco.encoder import Encoder

__all__ = ["Lifetime"]

_MAX_PENDING_WRITE_BYTES: Final = 256 * 2**20


class Lifetime:
    """What an engine consists of, from its opening to its end; `KiteEngine` adds what one can ask of it.

    Attributes: see `KiteEngine`.
    """

    pool: RUPool
    reuse: ReusePolicy

    def __init__(
        self,
        loader: Loader,
        pool_config: PoolConfig,
        reuse: ReusePolicy,
        max_queue: int,
        encoder: str | Encoder | None = None,
    ) -> None:
        """Use `KiteEngine.open`."""
        self.reuse = check_policy(reuse, ReusePolicy(numerics="bitwise"))
        self._loader = loader
        self._pool_config = pool_config
        self._wanted_encoder = encoder
        self._encoder: Encoder | None = None
        self._door = ThreadDoor()
        self.pool = RUPool(pool_config, self._door, on_epoch=self._on_epoch)
        self.pool.exporter = LivePool(self.pool, pool_config, self._door).export
        self._recycler = Recycler(self.pool, _MAX_PENDING_WRITE_BYTES)
        self._supervisor = Supervisor()
        self._preloader = Preloader(self.pool, self._door, pool_config.hmac_key)
        self._gate = Gate(max_queue + loader.most_requests)
        self._serving: Serving | None = None
        self._closing: asyncio.Task[None] | None = None

    # Opening

    async def _start(self) -> None:
        self._supervisor.start()
        try:
            self._encoder = await open_encoder(self._wanted_encoder, self._door)
            await self.pool.start(self._supervisor)
            backend = await load_backend(self._loader, self.pool, self._door)
            try:
                await use_model(self.pool, backend, self._door)
                self._serve(backend)
            except BaseException:
                backend.close()
                raise
        except BaseException:
            await self._supervisor.aclose()
            await self.pool.aclose()
            raise
        self._supervisor.keep("recycler", self._recycler.run)

    def _serve(self, backend: Any) -> None:
        self._serving = Serving.start(
            backend, self.pool, self._recycler, self._supervisor, self._pool_config, self._door, self._encoder
        )
        # A program that ends without closing the engine must not hang on the model's thread.
        atexit.register(self._serving.abandon)

    def _on_epoch(self) -> None:
        """The pool was cleared, here or by another process: idle blocks in the context are of no use any more."""
        if self._serving is not None:
            self._serving.scheduler.forget()

    @property
    def _current(self) -> Serving:
        if self._serving is None or self._closing is not None:
            raise EngineClosedError()
        return self._serving

    # Replacing

    async def reload(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        adapters: Mapping[str, str | AdapterConfig] | None = None,
    ) -> None:
        """Replaces the weights, the adapters, or both. Running requests finish on the old ones, new calls wait.

        Units of other weights can't be found any more, whatever the file or the adapter is called: fingerprints cover
        their content. If loading fails, the engine goes on with the old model.

        Raises:
            as `open`.
        """
        old_loader = self._loader
        loader = dataclasses.replace(
            old_loader,
            model=old_loader.model if model is None else os.fspath(model),
            adapters=old_loader.adapters if adapters is None else dict(adapters),
        )
        async with self._gate.shut():
            old = self._current
            backend = await load_backend(loader, self.pool, self._door)
            self._unregister(old)
            try:
                await old.stop(EngineClosedError("the model was replaced"))
            finally:  # from here on there is no way back, also for a cancelled caller
                if self._closing is None:
                    self._loader = loader
                    with anyio.CancelScope(shield=True):
                        if backend.info.model_state != old.backend.info.model_state:
                            await self.pool.clear()
                        await use_model(self.pool, backend, self._door)
                    self._serve(backend)
                else:
                    backend.close()
            self._current  # noqa: B018 - says so if the engine was closed meanwhile

    # Closing

    async def aclose(self) -> None:
        """Ends open requests with `EngineClosedError` and frees everything. Idempotent."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._gate.close()
        if self._serving is not None:
            self._unregister(self._serving)
            await self._drain(self._serving)
            await self._serving.stop(EngineClosedError())
        await self._supervisor.aclose()
        self._recycler.close()
        await self.pool.aclose()

    async def _drain(self, serving: Serving) -> None:
        """Ends open requests and, where a tier outlives the process, writes what is not there yet."""
        with anyio.move_on_after(self._pool_config.drain_seconds), contextlib.suppress(EngineClosedError):
            await serving.finish(EngineClosedError(), save=bool(self.pool.tiers.tiers))
            await self._recycler.drain()
            await self.pool.drain()

    @staticmethod
    def _unregister(serving: Serving) -> None:
        atexit.unregister(serving.abandon)
