"""Adapters and the pool: an adapter that the pool has need not be read from its folder, which may even be absent."""

from __future__ import annotations

import functools
import logging
import pathlib
from collections.abc import Collection, Mapping

from kitelib.config import AdapterConfig
from kitelib.errors import FormatError, KiteError
from kitelib.fingerprint import short
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.pool import RUPool
from kitelib.stores.wanted import Wanted
from kitelib.upcycle.adapter_unit import (
    ANY_MODEL,
    AdapterContent,
    adapter_unit,
    content_of,
    expect_adapter,
    fits_a_unit,
)
from kitelib.upcycle.unit import RecyclableUnit

__all__ = ["adapters_from_pool", "adapters_to_pool"]

_LOG = logging.getLogger("kitelib.adapters")


async def adapters_from_pool(
    pool: RUPool,
    adapters: Mapping[str, AdapterConfig],
    door: ThreadDoor,
    *,
    cache_dir: pathlib.Path | None = None,
    model_state: bytes = ANY_MODEL,
) -> dict[str, AdapterContent]:
    """Those adapters that the pool has, checked against their digests; call it before loading the model.

    An adapter is looked for by `AdapterConfig.digest`, else by the digest of its folder, which is remembered. Whatever
    goes wrong is a miss: the loader then reads the folder, and says what is wrong with it.

    Args:
        pool: memory and the outer tiers are asked.
        adapters: name -> adapter of the torch backend.
        door: runs what blocks.
        cache_dir: folder of remembered digests; None means the user's.
        model_state: the model whose units they are kept among; by default they are every model's.

    Returns:
        name -> content, for `AdapterSet`.
    """
    found: dict[str, AdapterContent] = {}
    if not pool.enabled:
        return found
    for name, config in adapters.items():
        try:
            content = await _look_up(pool, name, config, door, cache_dir, model_state)
            if content is not None:
                found[name] = content
        except Exception:  # noqa: BLE001 - whatever a tier does, opening only takes longer
            _LOG.exception("the adapter %r could not be looked for in the pool", name)
    return found


async def adapters_to_pool(
    pool: RUPool,
    contents: Mapping[str, AdapterContent],
    door: ThreadDoor,
    *,
    skip: Collection[str] = (),
    model_state: bytes = ANY_MODEL,
) -> int:
    """Keeps adapters for the next time. Call it once the pool knows the model. Never raises.

    Args:
        pool: takes the units; outer tiers are written behind the caller.
        contents: name -> adapter, as `AdapterSet.take_contents` gives them.
        door: runs what blocks.
        skip: names of those that came from the pool, unless it was cleared since.
        model_state: as of `adapters_from_pool`.

    Returns:
        How many were handed over; those that the pool has, and those larger than a unit may be, are left out.
    """
    count = 0
    if not pool.enabled:
        return count
    for name, content in contents.items():
        if name in skip:
            continue
        try:
            if pool.contains(Wanted.of(expect_adapter(content.digest, model_state))):
                continue
            if not fits_a_unit(content):
                _LOG.info("the adapter %r is larger than a unit may be, so the pool does not keep it", name)
                continue
            epoch = pool.epoch
            unit = await door.run(functools.partial(adapter_unit, content, model_state, epoch=epoch))
            await pool.put_units([unit], epoch)
            count += 1
            _LOG.debug("the pool keeps the adapter %r as %s", name, short(content.digest))
        except Exception:  # noqa: BLE001 - as above
            _LOG.exception("the adapter %r could not be kept in the pool", name)
    return count


async def _look_up(
    pool: RUPool,
    name: str,
    config: AdapterConfig,
    door: ThreadDoor,
    cache_dir: pathlib.Path | None,
    model_state: bytes,
) -> AdapterContent | None:
    digest = await door.run(lambda: _digest(name, config, cache_dir))
    if digest is None:
        return None
    wanted = Wanted.of(expect_adapter(digest, model_state))
    unit = await _fetch(pool, wanted)
    if unit is None:
        return None
    try:
        return await door.run(lambda: content_of(unit))
    except FormatError as error:
        _LOG.warning("dropped the pool's copy of the adapter %r: %s", name, error)
        # Else it would stand in the way of a good one for as long as it is kept.
        pool.memory.delete(wanted.key)
        await pool.tiers.delete_many([wanted.key])
        return None


async def _fetch(pool: RUPool, wanted: Wanted) -> RecyclableUnit | None:
    units = await pool.fetch_run([wanted])
    if units:
        return units[0][0]
    found = (await pool.fetch_any([wanted]))[0]
    return None if found is None else found[0]


def _digest(name: str, config: AdapterConfig, cache_dir: pathlib.Path | None) -> bytes | None:
    """The digest to look for; None if the folder does not tell it. Blocks."""
    if config.digest is not None:
        return bytes.fromhex(config.digest)
    from kitelib.backends.torch_engine.peft_folder import folder_digest

    try:
        return folder_digest(config.path, name, cache_dir)
    except KiteError:
        return None  # the loader meets it again, and raises it
