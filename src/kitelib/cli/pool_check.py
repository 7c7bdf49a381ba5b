"""`kite pool verify`: whether every stored unit is whole and lies where it belongs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import anyio

from kitelib.abc import SharedStore
from kitelib.cli.pool_filters import Filter, filter_of, printable
from kitelib.cli.pool_options import file_bytes
from kitelib.cli.pool_tiers import MAX_VALUE_BYTES, Found, Tier, on_all_tiers, open_tiers, problems, read_values, scan
from kitelib.cli.screen import LoadProgress, is_terminal
from kitelib.errors import ConfigError, FormatError, StoreError
from kitelib.fingerprint import model_key, short, store_key
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.keys import unit_key
from kitelib.upcycle.unit import RecyclableUnit, inspect, peek

__all__ = ["check_value", "run_verify"]

_BATCH_BYTES: Final = 16 * 2**20
_BATCH_KEYS: Final = 64
_BATCHES_AT_ONCE: Final = 4
_LARGE_BYTES: Final = 64 * 2**20
"""Values and data past this are read and decoded one at a time."""
_MAX_REPORTED: Final = 1000
"""Bad units that are remembered for the report, per tier; all are counted."""


def check_value(found: Found, value: bytes, hmac_keys: tuple[bytes, ...] = ()) -> RecyclableUnit:
    """The unit in a stored value, checked with everything that needs no prompt: checksums, its codec, its own
    fingerprint, the key it lies under, and its HMAC, which must be that of one of `hmac_keys` if there are any.

    Raises:
        FormatError: the value is no such unit; the message says why.
    """
    try:
        unit = _inspect(value, hmac_keys)
    except FormatError:
        raise
    except Exception as error:  # hostile bytes may break anything that reads them
        raise FormatError(f"reading it failed: {type(error).__name__}: {error}") from error
    if store_key(model_key(unit.model_state), unit.kind, unit.cf) != found.item.key:
        raise FormatError(f"it is the {unit.kind} unit {short(unit.cf)} and lies under the key of another")
    return unit


def _inspect(value: bytes, hmac_keys: tuple[bytes, ...]) -> RecyclableUnit:
    for key in hmac_keys[:-1]:
        try:
            return inspect(value, hmac_key=key)
        except FormatError:
            continue
    return inspect(value, hmac_key=hmac_keys[-1] if hmac_keys else None)


@dataclasses.dataclass(slots=True)
class _Report:
    """What was found in one tier. `gone` are those that were listed, but not there to be read: deleted or evicted
    meanwhile, or damaged so that the tier itself refused them."""

    checked: int = 0
    bad: int = 0
    deleted: int = 0
    gone: int = 0
    lines: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # key, what is wrong


def run_verify(args: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code: 1 if bad units are left, or a tier was not wholly checked."""
    keys = _hmac_keys(args)
    tiers = open_tiers(args)
    reports = {tier.name: _Report() for tier in tiers}

    async def verify(tier: Tier, store: SharedStore) -> None:
        await _Verifier(tier.name, store, reports[tier.name], keys, fix=args.fix).run(filter_of(args))

    anyio.run(on_all_tiers, tiers, verify)
    print(json.dumps(_verify_json(tiers, reports)) if args.json else _verify_text(tiers, reports, fix=args.fix))
    left = sum(report.bad - report.deleted for report in reports.values())
    return 1 if left or any(tier.problem for tier in tiers) else 0


def _hmac_keys(args: argparse.Namespace) -> tuple[bytes, ...]:
    """The keys that a unit may be authenticated with: one per namespace, and that of the engine's own."""
    if args.hmac_key_file is None:
        if args.namespace or args.namespace_secret_file:
            raise ConfigError("--namespace is given without --hmac-key-file; a namespace only matters for an HMAC")
        return ()
    secret = (
        None if args.namespace_secret_file is None else file_bytes(args.namespace_secret_file, "namespace-secret-file")
    )
    key = file_bytes(args.hmac_key_file, "hmac-key-file")
    keys = (unit_key(key, namespace, secret) for namespace in (None, *args.namespace))
    return tuple(each for each in keys if each is not None)


class _Verifier:
    """Checks the units of one tier in bounded memory, whatever they and the store say about themselves."""

    def __init__(self, tier: str, store: SharedStore, report: _Report, keys: tuple[bytes, ...], *, fix: bool) -> None:
        self._tier = tier
        self._store = store
        self._report = report
        self._keys = keys
        self._fix = fix
        self._failure: StoreError | None = None
        self._door = ThreadDoor(2)
        self._one_large = anyio.Lock()
        self._batches = anyio.CapacityLimiter(_BATCHES_AT_ONCE)
        self._progress = LoadProgress(sys.stderr, enabled=is_terminal(sys.stderr))

    async def run(self, which: Filter) -> None:
        """Checks everything that the filter means; deletes what is bad if that was asked for.

        Raises:
            StoreError: the tier can't be read any more.
        """
        async for page in scan(self._store):
            async with anyio.create_task_group() as tasks:
                for batch in _in_batches([found for found in page if which.fits(found, 0.0)]):
                    tasks.start_soon(self._try_batch, batch)
            if self._failure is not None:
                raise self._failure
        self._progress.clear()

    async def _try_batch(self, batch: list[Found]) -> None:
        # A task group would wrap what it raises; the other batches of the page are checked all the same.
        try:
            await self._check_batch(batch)
        except StoreError as error:
            self._failure = error

    async def _check_batch(self, batch: list[Found]) -> None:
        large = any(found.item.num_bytes > _LARGE_BYTES for found in batch)
        bad = [(found, "it is larger than a unit can be") for found in batch if found.item.num_bytes > MAX_VALUE_BYTES]
        async with self._batches, self._one_large if large else contextlib.nullcontext():
            values = await read_values(self._store, batch)
            for position, found in enumerate(batch):
                value, values[position] = values[position], None  # given back as soon as it is checked
                if value is not None:
                    reason = await self._reason(found, value, alone=large)
                    bad += [(found, reason)] if reason else []
                    self._report.checked += 1
                elif found.item.num_bytes <= MAX_VALUE_BYTES:
                    self._report.gone += 1
        self._report.bad += len(bad)
        self._report.lines += [(found.item.key, why) for found, why in bad[: _MAX_REPORTED - len(self._report.lines)]]
        if self._fix and bad:
            self._report.deleted += await self._store.delete_many([found.item.key for found, _ in bad])
        self._progress(f"{self._tier}: {self._report.checked:,} units checked, {self._report.bad:,} bad")

    async def _reason(self, found: Found, value: bytes, *, alone: bool) -> str:
        """What is wrong with a value; "" if nothing. A small value may hold much data, so that is looked at first."""
        try:
            large = peek(value).data_bytes > _LARGE_BYTES and not alone
            async with self._one_large if large else contextlib.nullcontext():
                await self._door.run(lambda: check_value(found, value, self._keys))
        except FormatError as error:
            return str(error)
        return ""


def _in_batches(page: Sequence[Found]) -> Iterator[list[Found]]:
    """The units in batches of bounded bytes and number; a large one is alone in its own."""
    batch: list[Found] = []
    size = 0
    for found in page:
        if batch and (len(batch) == _BATCH_KEYS or size + found.item.num_bytes > _BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(found)
        size += found.item.num_bytes
    if batch:
        yield batch


def _verify_json(tiers: Sequence[Tier], reports: Mapping[str, _Report]) -> dict[str, Any]:
    return {
        "tiers": [
            {
                "tier": tier.name,
                "problem": tier.problem,
                "checked": reports[tier.name].checked,
                "bad": reports[tier.name].bad,
                "deleted": reports[tier.name].deleted,
                "gone": reports[tier.name].gone,
                "bad_units": [{"key": key, "reason": reason} for key, reason in reports[tier.name].lines],
            }
            for tier in tiers
        ]
    }


def _verify_text(tiers: Sequence[Tier], reports: Mapping[str, _Report], *, fix: bool) -> str:
    lines = []
    for tier in tiers:
        report = reports[tier.name]
        lines += [f"{tier.name}: {printable(key)}: {printable(reason)}" for key, reason in report.lines]
        if report.bad > len(report.lines):
            lines.append(f"{tier.name}: ... and {report.bad - len(report.lines):,} more")
        if tier.store is not None:
            deleted = f", {report.deleted:,} deleted" if fix else ""
            gone = f", {report.gone:,} gone before they could be read" if report.gone else ""
            lines.append(f"{tier.name}: {report.checked:,} units checked, {report.bad:,} bad{deleted}{gone}")
    return "\n".join(lines + problems(tiers))
