"""What `RUPool.export` needs of the engine around the pool: bundles are a layer above the stores."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from kitelib.config import PoolConfig
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.hot_units import PoolView, live_sources, live_view
from kitelib.stores.pool import RUPool

if TYPE_CHECKING:
    from kitelib.upcycle.bundle.exporting import ExportSummary

__all__ = ["LivePool"]


@dataclasses.dataclass(frozen=True, slots=True)
class LivePool:
    """The pool of a running engine, as an export sees it."""

    pool: RUPool
    config: PoolConfig
    door: ThreadDoor

    async def view(self, days: int, limit: int) -> PoolView:
        """What it holds of the model in use, with the hits of so many days, at most `limit` entries of each ledger."""
        pool, tiers = self.pool, self.pool.tiers.tiers
        await pool.freshen()
        return await live_view(
            pool.hits,
            pool.hit_publisher,
            tiers,
            live_sources(pool.memory, pool.pinned, tiers, self.door),
            epoch=pool.epoch,
            config=self.config,
            days=days,
            limit=limit,
        )

    async def export(self, path: str | os.PathLike[str], **options: Any) -> ExportSummary:
        """See `RUPool.export`."""
        from kitelib.upcycle.bundle.exporting import export_pool

        return await export_pool(self, path, **options)
