"""`kite pool evict`: deletes units from the shared tiers."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import anyio

from kitelib.abc import SharedStore
from kitelib.cli.pool_filters import Filter, filter_of, format_bytes
from kitelib.cli.pool_tiers import Found, Tier, on_all_tiers, open_tiers, problems, scan, with_heads, with_times
from kitelib.cli.screen import LoadProgress, is_terminal
from kitelib.errors import ConfigError, StoreError

__all__ = ["run_evict"]

_DELETE_AT_ONCE: Final = 512


@dataclasses.dataclass(slots=True)
class _Report:
    """What was chosen in one tier, and how many of those units were there to be deleted."""

    chosen: int = 0
    chosen_bytes: int = 0
    deleted: int = 0


def run_evict(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit code: 1 if a tier failed or did only a part, or the answer was no."""
    which = filter_of(args)
    if not (which or args.freshness or args.all):
        raise ConfigError("nothing says which units to delete; give --freshness, --idle, --model, ... or --all")
    if args.all and (which or args.freshness):
        raise ConfigError("--all means everything; leave it out, or the other options that choose units")
    tiers = open_tiers(args)
    if args.all and not args.yes and not args.dry_run and not _agreed(tiers):
        print("nothing was deleted", file=sys.stderr)
        return 1
    reports = {tier.name: _Report() for tier in tiers}
    anyio.run(_evict, tiers, reports, which, args)
    print(json.dumps(_json(tiers, reports, args)) if args.json else _text(tiers, reports, args))
    return 1 if any(tier.problem for tier in tiers) else 0


def _agreed(tiers: Sequence[Tier]) -> bool:
    if not is_terminal(sys.stdin):
        raise ConfigError("--all deletes everything, and nobody is there to be asked; add --yes")
    names = ", ".join(tier.name for tier in tiers)
    print(f"Delete everything in: {names}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


async def _evict(tiers: list[Tier], reports: Mapping[str, _Report], which: Filter, args: argparse.Namespace) -> None:
    epochs = _Epochs(tiers)
    progress = LoadProgress(sys.stderr, enabled=is_terminal(sys.stderr))
    now = time.time()

    async def one(tier: Tier, store: SharedStore) -> None:
        report, seen = reports[tier.name], 0
        async for page in scan(store):
            chosen = [found for found in page if which.ageless.fits(found, now)]
            if which.older_than_s is not None:
                chosen = [found for found in await with_times(store, chosen) if which.fits(found, now)]
            if args.freshness:
                chosen = [found for found in await with_heads(store, chosen) if await epochs.stale(found)]
            for start in range(0, len(chosen), _DELETE_AT_ONCE):
                part = chosen[start : start + _DELETE_AT_ONCE]
                report.chosen += len(part)
                report.chosen_bytes += sum(found.item.num_bytes for found in part)
                if not args.dry_run:
                    report.deleted += await store.delete_many([found.item.key for found in part])
            seen += len(page)
            progress(f"{tier.name}: {seen:,} units seen, {report.chosen:,} chosen")

    await on_all_tiers(tiers, one)
    progress.clear()


class _Epochs:
    """The present epoch of each model: the highest that any tier knows, since a tier may not have heard of it yet."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._stores = [tier.store for tier in tiers if tier.store is not None]
        self._known: dict[str, int] = {}
        self._lock = anyio.Lock()

    async def stale(self, found: Found) -> bool:
        """Whether the unit is older than its model's epoch. What is no unit has no epoch, and is not."""
        return found.head is not None and bool(found.model) and found.head.epoch < await self._of(found.model)

    async def _of(self, model: str) -> int:
        async with self._lock:
            if model not in self._known:
                self._known[model] = max([await self._read(store, model) for store in self._stores])
            return self._known[model]

    @staticmethod
    async def _read(store: SharedStore, model: str) -> int:
        try:
            return await store.get_epoch(model)
        except StoreError:  # that tier's own part of the work says so
            return 0


def _json(tiers: Sequence[Tier], reports: Mapping[str, _Report], args: argparse.Namespace) -> dict[str, Any]:
    every = [{"tier": tier.name, "problem": tier.problem, **dataclasses.asdict(reports[tier.name])} for tier in tiers]
    return {"dry_run": args.dry_run, "tiers": every}


def _text(tiers: Sequence[Tier], reports: Mapping[str, _Report], args: argparse.Namespace) -> str:
    lines = []
    for tier in tiers:
        report = reports[tier.name]
        size = format_bytes(report.chosen_bytes)
        if tier.store is None:
            continue
        if args.dry_run:
            lines.append(f"{tier.name}: {report.chosen:,} units ({size}) would be deleted")
        elif report.deleted == report.chosen:
            lines.append(f"{tier.name}: {report.deleted:,} units ({size}) deleted")
        else:
            lines.append(f"{tier.name}: {report.deleted:,} of {report.chosen:,} units ({size}) deleted")
    return "\n".join(lines + problems(tiers))
