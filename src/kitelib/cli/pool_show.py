"""`kite pool stats | ls | get`: what the shared tiers hold."""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import json
import sys
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import anyio

from kitelib.abc import SharedStore
from kitelib.cli.pool_check import check_value
from kitelib.cli.pool_filters import Filter, age, filter_of, format_age, format_bytes, format_date, printable
from kitelib.cli.pool_tiers import (
    Found,
    Tier,
    on_all_tiers,
    open_tiers,
    problems,
    read_values,
    scan,
    with_heads,
    with_times,
)
from kitelib.cli.table import format_table
from kitelib.errors import ConfigError, FormatError
from kitelib.upcycle.unit import RecyclableUnit

__all__ = ["run_get", "run_ls", "run_stats"]

_NO_MODEL: Final = "(no unit)"


# stats


@dataclasses.dataclass(slots=True)
class _Group:
    """The units of one model and kind in one tier."""

    items: int = 0
    bytes: int = 0
    written: list[float] = dataclasses.field(default_factory=list)  # the oldest and the newest, once there is one

    def add(self, found: Found) -> None:
        self.items += 1
        self.bytes += found.item.num_bytes
        if found.item.written_at is not None:
            times = [*self.written, found.item.written_at]
            self.written = [min(times), max(times)]


def run_stats(args: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code: 1 if no tier could be listed."""
    tiers = open_tiers(args)
    groups: dict[str, dict[tuple[str, str], _Group]] = {tier.name: {} for tier in tiers}
    epochs: dict[str, dict[str, int]] = {tier.name: {} for tier in tiers}

    async def count(tier: Tier, store: SharedStore) -> None:
        async for page in scan(store):
            for found in page:
                key = (found.model or _NO_MODEL, found.kind or "-")
                groups[tier.name].setdefault(key, _Group()).add(found)
        for model in sorted({model for model, _ in groups[tier.name] if model != _NO_MODEL}):
            epochs[tier.name][model] = await store.get_epoch(model)

    anyio.run(on_all_tiers, tiers, count)
    now = time.time()
    if args.json:
        print(json.dumps(_stats_json(tiers, groups, epochs)))
    else:
        print(_stats_text(tiers, groups, epochs, now))
    return 0 if any(_reached(tier, groups[tier.name]) for tier in tiers) else 1


def _reached(tier: Tier, listed: Collection[Any]) -> bool:
    return tier.store is not None and (bool(listed) or not tier.problem)


def _stats_json(
    tiers: list[Tier],
    groups: Mapping[str, Mapping[tuple[str, str], _Group]],
    epochs: Mapping[str, Mapping[str, int]],
) -> dict[str, Any]:
    return {
        "tiers": [
            {
                "tier": tier.name,
                "problem": tier.problem,
                "items": sum(group.items for group in groups[tier.name].values()),
                "bytes": sum(group.bytes for group in groups[tier.name].values()),
                "bytes_taken": None if tier.stats is None else tier.stats.bytes,
                "groups": [
                    {
                        "model": None if model == _NO_MODEL else model,
                        "kind": None if model == _NO_MODEL else kind,
                        "items": group.items,
                        "bytes": group.bytes,
                        "oldest_written_at": group.written[0] if group.written else None,
                        "newest_written_at": group.written[1] if group.written else None,
                        "epoch": epochs[tier.name].get(model),
                    }
                    for (model, kind), group in sorted(groups[tier.name].items())
                ],
            }
            for tier in tiers
        ]
    }


def _stats_text(
    tiers: list[Tier],
    groups: Mapping[str, Mapping[tuple[str, str], _Group]],
    epochs: Mapping[str, Mapping[str, int]],
    now: float,
) -> str:
    rows = []
    for tier in tiers:
        for (model, kind), group in sorted(groups[tier.name].items()):
            oldest, newest = group.written or (None, None)
            rows.append(
                (
                    tier.name,
                    model,
                    kind,
                    f"{group.items:,}",
                    format_bytes(group.bytes),
                    format_age(age(oldest, now)),
                    format_age(age(newest, now)),
                    str(epochs[tier.name].get(model, "-")),
                )
            )
    header = ("tier", "model", "kind", "units", "bytes", "oldest", "newest", "epoch")
    table = [format_table(header, rows, left=(0, 1, 2)), ""] if rows else []
    return "\n".join([*table, *(_total(tier, groups[tier.name]) for tier in tiers if tier.stats), *problems(tiers)])


def _total(tier: Tier, groups: Mapping[Any, _Group]) -> str:
    items = sum(group.items for group in groups.values())
    size = format_bytes(sum(group.bytes for group in groups.values()))
    taken = "" if tier.stats is None else f"; by its own books it takes {format_bytes(tier.stats.bytes)}"
    return f"{tier.name}: {items:,} units of {size}{taken}"


# ls


_SORT_KEYS: Final[Mapping[str, Callable[[Found], float]]] = {
    "used": lambda found: found.used_at or 0.0,
    "written": lambda found: found.written_at or 0.0,
    "size": lambda found: found.item.num_bytes,
}


def run_ls(args: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code: 1 if no tier could be listed."""
    tiers = open_tiers(args)
    listed: dict[str, list[Found]] = {tier.name: [] for tier in tiers}
    now = time.time()

    async def collect(tier: Tier, store: SharedStore) -> None:
        listed[tier.name] = await with_heads(store, await _greatest(store, filter_of(args), args.sort, args.limit, now))

    anyio.run(on_all_tiers, tiers, collect)
    every = [(tier, found) for tier in tiers for found in listed[tier.name]]
    every.sort(key=lambda pair: _SORT_KEYS[args.sort](pair[1]), reverse=True)
    every = every[: args.limit] if args.limit else every
    if args.json:
        units = [_unit_json(tier.name, found) for tier, found in every]
        print(json.dumps({"units": units, "problems": {tier.name: tier.problem for tier in tiers if tier.problem}}))
    else:
        if every:
            print(_ls_text(every, now))
        for line in problems(tiers):
            print(f"kite: {line}", file=sys.stderr)
    return 0 if any(_reached(tier, listed[tier.name]) for tier in tiers) else 1


async def _greatest(store: SharedStore, which: Filter, sort: str, limit: int, now: float) -> list[Found]:
    """The first `limit` units of the order (0: all); no more than those are held."""
    best: list[Found] = []
    async for page in scan(store):
        fitting = [found for found in page if which.ageless.fits(found, now)]
        if which.older_than_s is not None or sort == "written":
            fitting = [found for found in await with_times(store, fitting) if which.fits(found, now)]
        best += fitting
        if limit:
            best = heapq.nlargest(limit, best, key=_SORT_KEYS[sort])
    return best


def _unit_json(tier: str, found: Found) -> dict[str, Any]:
    head = found.head
    return {
        "tier": tier,
        "key": found.item.key,
        "cf": found.cf or None,
        "kind": found.kind or None,
        "model": found.model or None,
        "bytes": found.item.num_bytes,
        "written_at": found.item.written_at,
        "used_at": found.item.used_at,
        "tokens": None if head is None else head.num_tokens,
        "epoch": None if head is None else head.epoch,
        "created_at": None if head is None else head.created_at,
        "parent": None if head is None else head.parent.hex(),
        "data_bytes": None if head is None else head.data_bytes,
    }


def _ls_text(every: list[tuple[Tier, Found]], now: float) -> str:
    rows = [
        (
            found.cf[:16] or printable(found.item.key[:40]),
            found.kind or "-",
            found.model or _NO_MODEL,
            "-" if found.head is None else str(found.head.num_tokens),
            format_bytes(found.item.num_bytes),
            "-" if found.head is None else str(found.head.epoch),
            format_age(age(found.written_at, now)),
            format_age(age(found.used_at, now)),
            tier.name,
        )
        for tier, found in every
    ]
    return format_table(
        ("cf", "kind", "model", "tokens", "bytes", "epoch", "age", "idle", "tier"), rows, left=(0, 1, 2, 8)
    )


# get


@dataclasses.dataclass(frozen=True, slots=True)
class _Read:
    """A unit that was asked for: where it lies, its bytes, and what they are."""

    tier: str
    found: Found
    value: bytes
    unit: RecyclableUnit | None
    problem: str


def run_get(args: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code: 1 if there is no such unit or one of them is damaged."""
    tiers = open_tiers(args)
    wanted: str = args.cf
    reads: list[_Read] = []
    which = filter_of(args)

    async def look(tier: Tier, store: SharedStore) -> None:
        hits: list[Found] = []
        async for page in scan(store):
            hits += [found for found in page if found.cf.startswith(wanted) and which.fits(found, 0.0)]
            _check_unique(wanted, {found.cf for found in hits})
        for found in hits:
            value = (await read_values(store, [found]))[0]
            if value is not None:
                reads.append(await anyio.to_thread.run_sync(_read, tier.name, found, value))

    anyio.run(on_all_tiers, tiers, look)
    _check_unique(wanted, {read.found.cf for read in reads})
    order = [tier.name for tier in tiers]
    reads.sort(key=lambda read: (read.found.item.key, order.index(read.tier)))
    for line in problems(tiers):
        print(f"kite: {line}", file=sys.stderr)
    if not reads:
        print(f"kite: no unit has a fingerprint that starts with {wanted}; `kite pool ls` lists units", file=sys.stderr)
        return 1
    if args.out is not None:
        _write_out(args.out, reads)
    print(json.dumps([_read_json(read) for read in reads]) if args.json else "\n\n".join(map(_read_text, reads)))
    return 1 if any(read.problem for read in reads) else 0


def _check_unique(wanted: str, fingerprints: set[str]) -> None:
    if len(fingerprints) > 1:
        some = ", ".join(sorted(fingerprints)[:3])
        raise ConfigError(f"more than one fingerprint starts with {wanted}, such as {some}; give more digits")


def _read(tier: str, found: Found, value: bytes) -> _Read:
    try:
        return _Read(tier, found, value, check_value(found, value), "")
    except FormatError as error:
        return _Read(tier, found, value, None, str(error))


def _write_out(path: str, reads: list[_Read]) -> None:
    if len({read.found.item.key for read in reads}) > 1:
        kinds = ", ".join(sorted({f"--kind {read.found.kind} --model {read.found.model}" for read in reads}))
        raise ConfigError(f"--out takes one unit, but several have this fingerprint; choose one of: {kinds}")
    best = next((read for read in reads if not read.problem), reads[0])
    try:
        with open(path, "xb") as file:
            file.write(best.value)
    except FileExistsError as error:
        raise ConfigError(f"the file {path!r} of --out exists; give another name") from error
    except OSError as error:
        raise ConfigError(f"the file {path!r} of --out can't be written: {error.strerror}") from error


def _fields(read: _Read) -> dict[str, Any]:
    unit, item = read.unit, read.found.item
    fields: dict[str, Any] = {"tier": read.tier, "key": item.key, "bytes": len(read.value)}
    if unit is not None:
        fields |= {
            "kind": unit.kind,
            "cf": unit.cf.hex(),
            "parent": unit.parent.hex(),
            "model_state": unit.model_state.hex(),
            "tokens": len(unit.token_ids),
            "token_ids": unit.token_ids.tolist(),
            "epoch": unit.epoch,
            "created_at": unit.created_at,
            "layout": unit.layout,
            "dtype": unit.dtype,
            "shape": list(unit.shape),
            "codec": unit.codec,
            "data_bytes": len(unit.data),
        }
    return {**fields, "written_at": item.written_at, "used_at": item.used_at}


def _read_json(read: _Read) -> dict[str, Any]:
    return {**_fields(read), "problem": read.problem}


def _read_text(read: _Read) -> str:
    fields = _fields(read)
    if "token_ids" in fields:
        ids = fields["token_ids"]
        fields["token_ids"] = " ".join(map(str, ids[:32])) + (" ..." if len(ids) > 32 else "")
        fields["shape"] = " x ".join(map(str, fields["shape"]))
    for name in ("created_at", "written_at", "used_at"):
        if fields.get(name) is not None:
            fields[name] = format_date(fields[name])
    fields["check"] = f"BAD: {read.problem}" if read.problem else "good"
    return "\n".join(f"{name:<12} {'-' if value is None else printable(str(value))}" for name, value in fields.items())
