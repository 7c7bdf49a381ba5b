"""Bundles in an engine: mapped beside process memory, or taken over into the pool."""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import anyio.lowlevel

from kitelib.engine.serving import Serving
from kitelib.errors import BundleMismatchError, FormatError, InvalidRequestError
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.pool import RUPool
from kitelib.upcycle.unit import RecyclableUnit

if TYPE_CHECKING:  # an engine that loads no bundle does without
    from kitelib.upcycle.bundle import Bundle, BundleUnit

__all__ = ["Preloader"]

_SIBLINGS_AT_ONCE: Final = 512  # units; what the event loop does in about a millisecond
_IMPORT_BYTES: Final = 16 * 2**20
_IMPORT_UNITS: Final = 64


@dataclasses.dataclass(frozen=True, slots=True)
class _Opened:
    """A bundle that fits the model, and which of its units can be found."""

    bundle: Bundle
    units: dict[str, BundleUnit]
    blocks: list[BundleUnit]
    tokens: int

    @classmethod
    def of(cls, serving: Serving, bundle: Bundle) -> _Opened:
        """In a thread: there may be many units.

        Raises:
            BundleMismatchError: as `_usable_units`.
        """
        units = _usable_units(serving, bundle)
        blocks = [unit for unit in units.values() if unit.kind == "kv"]
        return cls(bundle, units, blocks, sum(len(unit.token_ids) for unit in blocks))


class Preloader:
    """Loads and unloads bundles. Used on the event loop; files are opened in threads.

    Args:
        pool: the tiers.
        door: to the threads.
        hmac_key: `PoolConfig.hmac_key`.
    """

    def __init__(self, pool: RUPool, door: ThreadDoor, hmac_key: bytes | None) -> None:
        self._pool = pool
        self._door = door
        self._hmac_key = hmac_key

    async def load(
        self,
        serving: Serving,
        path: str | os.PathLike[str],
        *,
        pin: bool,
        require_signature: bool,
        trusted_keys: str | bytes | Sequence[str | bytes],
        accept_stale: bool,
        not_before: float | None,
    ) -> dict[str, Any]:
        """See `KiteEngine.preload`."""
        await self._pool.freshen()
        name, begun = os.fspath(path), self._pool.epoch

        def open_bundle() -> Bundle:
            from kitelib.upcycle.bundle import Bundle

            return Bundle.open(
                path, require_signature=require_signature, trusted_keys=trusted_keys, hmac_key=self._hmac_key
            )

        bundle = await self._door.run(open_bundle, discard=lambda opened: opened.close())
        try:
            opened = await self._door.run(lambda: _Opened.of(serving, bundle))
            if pin:
                await self._note_siblings(opened)
            # Nothing is awaited from here to the pinning, so that no invalidation gets in between.
            accepted = accept_stale and self._pool.epoch == begun
            _check_age(bundle, -1 if accepted else self._pool.epoch, not_before, accept_stale)
            if pin:
                epoch = None if accepted else bundle.manifest.epoch
                self._pool.pinned.add(name, bundle, opened.units, bundle.num_bytes, epoch)
            refused = 0 if pin else await self._take_over(opened)
        except BaseException:
            bundle.close()
            raise
        return {
            "bundle": name,
            "digest": bundle.digest,
            "signer": bundle.signer,
            "units": len(opened.units) - refused,
            "tokens": opened.tokens,
            "bytes": bundle.num_bytes,
            "skipped": len(bundle.units) - len(opened.units) + refused,
        }

    async def _note_siblings(self, opened: _Opened) -> None:
        for start in range(0, len(opened.blocks), _SIBLINGS_AT_ONCE):
            for unit in opened.blocks[start : start + _SIBLINGS_AT_ONCE]:
                self._pool.siblings.add(unit.parent, unit.cf, unit.token_ids)
            await anyio.lowlevel.checkpoint()

    async def _take_over(self, opened: _Opened) -> int:
        """Copies all units into the pool, as if they had just been computed; returns how many were no good."""
        bundle, refused, epoch = opened.bundle, 0, self._pool.epoch
        try:
            for batch in _batches(opened.units.values()):
                units, failed = await self._door.run(_reader(bundle, batch, epoch))
                refused += failed
                for index in sorted({entry.root for entry, _ in units}):
                    part = [unit for entry, unit in units if entry.root == index]
                    taken = await self._pool.put_units(part, epoch, bundle.manifest.roots[index].root)
                    refused += len(part) - taken
                await self._pool.settle()  # else what the tiers can't take at once would be dropped
        finally:
            bundle.close()
        return refused

    async def unload(self, bundle: str | os.PathLike[str]) -> None:
        """See `KiteEngine.unload`."""
        name = os.fspath(bundle)
        if not self._pool.pinned.remove(name):
            known = ", ".join(map(repr, self._pool.pinned.stats())) or "none"
            raise InvalidRequestError(f"no bundle was loaded from {name!r}; loaded: {known}")


def _usable_units(serving: Serving, bundle: Bundle) -> dict[str, BundleUnit]:
    """The units that requests of this engine can find, by store key.

    Raises:
        BundleMismatchError: there are none; the message names every field that differs.
    """
    from kitelib.upcycle.bundle import ModelIdentity
    from kitelib.upcycle.bundle.compatibility import check_identity, check_roots, mismatch_message

    manifest = bundle.manifest
    differences = check_identity(manifest, ModelIdentity.of(serving.backend.info))
    usable, more = check_roots(manifest, serving.root_of, serving.execution_path)
    if differences:
        # No root can be the engine's own then; what else differs often says why (a layout: other numerics).
        usable = []
        differences.update({name: values for name, values in more.items() if name in serving.execution_path})
    else:
        differences = more
    if not any(usable):
        raise BundleMismatchError(mismatch_message(bundle.path, differences), differences)
    return {key: unit for key, unit in bundle.keys.items() if usable[unit.root]}


def _check_age(bundle: Bundle, epoch: int, not_before: float | None, accept_stale: bool) -> None:
    manifest = bundle.manifest
    if not_before is not None and manifest.created_at < not_before:
        raise BundleMismatchError(
            f"the bundle {bundle.path!r} was made at {_utc(manifest.created_at)}, before {_utc(not_before)}, which is asked "
            "for: an older one in the place of a newer; get the newer one",
            {"created_at": (str(manifest.created_at), str(not_before))},
        )
    if manifest.epoch < epoch:
        remedy = "load it again" if accept_stale else "load it with accept_stale=True"
        when = "while it was being loaded" if accept_stale else "after it was made"
        raise BundleMismatchError(
            f"the pool was invalidated {when} (the epoch of the bundle {bundle.path!r} is {manifest.epoch}, the pool's "
            f"{epoch}); make it again with this epoch, or {remedy} if what it holds is still right",
            {"epoch": (str(manifest.epoch), str(epoch))},
        )


def _utc(time_s: float) -> str:
    try:
        return f"{datetime.datetime.fromtimestamp(time_s, datetime.timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):  # a year that there is not
        return f"{time_s:.0f} s after 1970"


def _reader(
    bundle: Bundle, batch: Sequence[BundleUnit], epoch: int
) -> Callable[[], tuple[list[tuple[BundleUnit, RecyclableUnit]], int]]:
    def read() -> tuple[list[tuple[BundleUnit, RecyclableUnit]], int]:
        units = []
        for entry in batch:
            try:
                units.append((entry, dataclasses.replace(bundle.read(entry, full=True), epoch=epoch)))
            except FormatError:
                continue
        return units, len(batch) - len(units)

    return read


def _batches(units: Iterable[BundleUnit]) -> Iterator[list[BundleUnit]]:
    batch: list[BundleUnit] = []
    num_bytes = 0
    for unit in units:
        if batch and (num_bytes + unit.data_bytes > _IMPORT_BYTES or len(batch) == _IMPORT_UNITS):
            yield batch
            batch, num_bytes = [], 0
        batch.append(unit)
        num_bytes += unit.data_bytes
    if batch:
        yield batch
