"""`kite bundle export`: the units of a fleet's pool that are used most, as a bundle. Needs no model."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

import anyio

from kitelib.cli.bundle_options import (
    add_compress_option,
    add_write_options,
    clip,
    labels_of,
    read_key_file,
    summary_fields,
    summary_text,
)
from kitelib.cli.pool_options import add_pool_options, file_bytes
from kitelib.cli.screen import LoadProgress, is_terminal
from kitelib.cli.table import counted
from kitelib.config import PoolConfig
from kitelib.errors import ConfigError, FormatError, StoreError

if TYPE_CHECKING:
    from kitelib.abc import HitLedger
    from kitelib.cli.pool_tiers import Tier
    from kitelib.stores.hot_units import PoolView
    from kitelib.upcycle.bundle.exporting import ExportSummary

__all__ = ["add_export_options", "run_export"]

_TIER_OPTIONS: Final = ("config", "disk", "redis", "redis_url_file", "s3", "store")
_MOST_DAYS: Final = 8  # `kitelib.stores.hits.HIT_DAYS`, which needs numpy


def add_export_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the subcommand."""
    group = parser.add_argument_group("which units")
    group.add_argument(
        "--from-pool",
        metavar="URL",
        help="the pool: redis://..., s3://..., the URL of an installed store, or a folder. With a password in it, or for "
        "several tiers, use the options under `pool` instead",
    )
    group.add_argument(
        "--top", type=_whole, default=200, metavar="N", help="most blocks, with those before them (default 200)"
    )
    group.add_argument(
        "--min-hits", type=_whole, default=1, metavar="N", help="fewest requests that used a block (default 1)"
    )
    group.add_argument(
        "--days", type=_days, default=7, metavar="N", help="count hits of the last N days, 1 to 8 (default 7)"
    )
    group.add_argument(
        "--namespace",
        action="append",
        default=[],
        metavar="NAME",
        help="also units of this tenant; may be repeated. Without it only those of no namespace",
    )
    group.add_argument(
        "--namespace-secret-file", metavar="FILE", help="file with the bytes of PoolConfig.namespace_secret"
    )
    group.add_argument(
        "--model-state", type=_digits, metavar="DIGITS", help="start of the model state, if the pool has several models"
    )
    group.add_argument("--no-completions", action="store_true", help="leave out the tokens that followed prompts")
    add_compress_option(parser)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    add_write_options(parser)
    add_pool_options(parser, disk_default="the user's cache folder, if no tier is named")


def run_export(args: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code."""
    from kitelib.cli.pool_tiers import tiers_of

    config = _config(args)
    hmac_key, secret = read_key_file(args.hmac_key_file) or config.hmac_key, config.namespace_secret
    if args.namespace_secret_file is not None:
        secret = file_bytes(args.namespace_secret_file, "namespace-secret-file")
    labels = labels_of(args)
    tiers = tiers_of(config)
    progress = LoadProgress(sys.stderr, enabled=is_terminal(sys.stderr))

    async def export() -> tuple[PoolView, ExportSummary]:
        from kitelib.runtime.threads import ThreadDoor
        from kitelib.upcycle.bundle.exporting import export_units

        try:
            view = await _view(tiers, args, hmac_key, secret)
            return view, await export_units(
                view,
                args.output,
                door=ThreadDoor(),
                top=args.top,
                min_hits=args.min_hits,
                max_bytes=args.max_bytes,
                namespaces=(None, *args.namespace),
                with_completions=not args.no_completions,
                compression=args.compress,
                sign_key=args.sign_key,
                labels=labels,
                progress=progress,
            )
        finally:
            progress.clear()
            for tier in tiers:
                if tier.store is not None:
                    with contextlib.suppress(StoreError):
                        await tier.store.aclose()

    view, summary = anyio.run(export)
    print(json.dumps(_json(view, summary)) if args.json else _text(view, summary))
    return 0


def _config(args: argparse.Namespace) -> PoolConfig:
    from kitelib.cli.pool_tiers import pool_config_of

    if args.from_pool is None:
        return pool_config_of(args)
    named = next((name for name in _TIER_OPTIONS if getattr(args, name)), None)
    if named is not None:
        raise ConfigError(f"--from-pool and --{named.replace('_', '-')} are both given; leave one out")
    return _pool_at(args.from_pool)


def _pool_at(url: str) -> PoolConfig:
    """The pool with one tier, which a URL or a folder names."""
    if "://" not in url:
        return PoolConfig(disk=str(Path(url).expanduser()))
    scheme = url.partition("://")[0].lower()
    if scheme.startswith("redis"):
        return PoolConfig(redis=url)
    if scheme == "s3":
        return PoolConfig(s3=url)
    if scheme == "file":
        return PoolConfig(disk=unquote(urlsplit(url).path))
    return PoolConfig(stores=(url,))


async def _view(
    tiers: Sequence[Tier], args: argparse.Namespace, hmac_key: bytes | None, secret: bytes | None
) -> PoolView:
    """What the tiers hold of the model that is meant.

    Raises:
        ConfigError: a tier can't be used, none counts hits, or it is not clear which model is meant.
        StoreError: a tier can't be read.
    """
    from kitelib.abc import HitLedger
    from kitelib.stores.hits import last_days
    from kitelib.stores.hot_units import PoolView, read_ledgers, source_of
    from kitelib.upcycle.bundle.exporting import leaves_to_read

    unusable = next((tier for tier in tiers if tier.store is None), None)
    if unusable is not None:
        raise ConfigError(f"{unusable.name}: {unusable.problem}")
    stores = [(tier.name, tier.store) for tier in tiers if tier.store is not None]
    ledgers = [store for _, store in stores if isinstance(store, HitLedger)]
    if not ledgers:
        raise ConfigError(
            f"{', '.join(name for name, _ in stores)} keeps no counts of hits; name the Redis or the disk folder of the "
            "same engines as well, which do, or compute the prompts that you know with `kite bundle build`"
        )
    days = last_days(args.days, time.time())
    model = await _model(ledgers, days, args.model_state)
    hits, roots = await read_ledgers(ledgers, model, days, leaves_to_read(args.top))
    epoch = max([await store.get_epoch(model) for _, store in stores])
    return PoolView(model, epoch, hits, roots, [source_of(*each) for each in stores], hmac_key, secret)


async def _model(ledgers: Sequence[HitLedger], days: Sequence[int], digits: str | None) -> str:
    models = sorted({name for ledger in ledgers for name in await ledger.hit_models()})
    fitting = [name for name in models if name.startswith((digits or "")[:16])]
    if len(fitting) == 1:
        return fitting[0]
    if not models:
        raise ConfigError(
            "the pool has counted no hits; an engine adds its own once a minute (freshness_check_interval) and at its end"
        )
    named = "; ".join([await _named(ledgers, days, name) for name in models[:20]])
    if not fitting:
        raise ConfigError(f"no model of the pool begins with {digits}; it has {named}")
    raise ConfigError(f"the pool has {len(fitting)} models; choose one with --model-state DIGITS: {named}")


async def _named(ledgers: Sequence[HitLedger], days: Sequence[int], model: str) -> str:
    from kitelib.stores.hot_units import PoolView, read_ledgers
    from kitelib.upcycle.bundle.exporting import described_model

    hits, roots = await read_ledgers(ledgers, model, days, 1)
    try:
        return f"{model} ({clip(described_model(PoolView(model, 0, hits, roots, ())).name, 60)})"
    except FormatError:
        return clip(model, 20)


def _json(view: PoolView, summary: ExportSummary) -> dict[str, Any]:
    return {
        **summary_fields(summary.bundle),
        "model": view.model,
        "epoch": view.epoch,
        "fewest_hits": summary.fewest_hits,
        "leaves": summary.leaves,
        "lost": summary.lost,
        "refused": summary.refused,
        "unknown_namespaces": list(summary.unknown),
    }


def _text(view: PoolView, summary: ExportSummary) -> str:
    lines = [
        summary_text(summary.bundle),
        f"{'model':<10} {view.model}, epoch {view.epoch}",
        f"{'hits':<10} at least {summary.fewest_hits:,} per block; requests ended in {counted(summary.leaves, 'block')}",
    ]
    if summary.unknown:
        names = ", ".join(repr(clip(name, 60)) for name in summary.unknown[:20])
        lines.append(f"{'unknown':<10} namespaces without a unit in the pool, with this namespace secret: {names}")
    if summary.lost:
        lines.append(f"{'lost':<10} {counted(summary.lost, 'such block')} whose units are not in the pool any more")
    if summary.refused:
        lines.append(
            f"{'refused':<10} {counted(summary.refused, 'unit')} that failed a check, or go on from one that did"
        )
    return "\n".join(lines)


def _whole(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:12]) <= 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 1,000,000,000")
    return int(text)


def _days(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:12]) <= _MOST_DAYS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of days from 1 to {_MOST_DAYS}")
    return int(text)


def _digits(text: str) -> str:
    digits = text.lower()
    if not 1 <= len(digits) <= 64 or not set(digits) <= set("0123456789abcdef"):
        raise argparse.ArgumentTypeError(f"{text!r} is not the start of a model state: 1 to 64 hexadecimal digits")
    return digits
