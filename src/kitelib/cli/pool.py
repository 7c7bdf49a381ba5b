"""`kite pool`: look at, clean and check what the shared tiers of a pool hold."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Final

from kitelib.cli.pool_evict import EVICT_DESCRIPTION, add_evict_options
from kitelib.cli.pool_filters import add_filter_options
from kitelib.cli.pool_options import REDIS_VARIABLE, add_pool_options

__all__ = ["SORTS", "add_parser"]

SORTS: Final = ("used", "written", "size")
"""What `ls` can sort by."""

_DISK_DEFAULT: Final = "the user's cache folder, if no tier is named"

_EXAMPLES = f"""\
examples:
  kite pool stats                                   what `kite demo` keeps in the user's cache folder
  kite pool ls --disk /var/cache/kite --sort size
  kite pool get 3f9a41d2 --out unit.ru
  kite pool evict --idle 7d --dry-run
  kite pool verify --fix --config upcycle_config.yaml
  {REDIS_VARIABLE}=rediss://:secret@cache kite pool stats
  kite pool ls --help                               all options of a subcommand"""

_STATS_EXAMPLES = """\
examples:
  kite pool stats
  kite pool stats --disk /var/cache/kite --redis redis://cache:6379
  kite pool stats --config upcycle_config.yaml --json

Exit codes: 0 done, 1 no tier could be reached, 2 a wrong option."""

_LS_EXAMPLES = """\
examples:
  kite pool ls --limit 20
  kite pool ls --kind kv --sort size --disk /var/cache/kite
  kite pool ls --limit 0 --json | jq '.units[].key'

cf: start of the fingerprint. age: since it was written; Redis does not know, so there it is since the unit was made.
idle: since it was last read or written; S3 does not know when a unit was read, so there it is since its writing."""

_GET_EXAMPLES = """\
examples:
  kite pool get 3f9a41d2
  kite pool get 3f9a41d2 --kind kv --out unit.ru --disk /var/cache/kite

Exit codes: 0 found and good, 1 not found or damaged, 2 a wrong option, or a CF that several units begin with."""

_EVICT_EXAMPLES = """\
examples:
  kite pool evict --freshness
  kite pool evict --model 0f3a --older-than 7d --dry-run
  kite pool evict --kind logits --idle 1d --redis redis://cache:6379
  kite pool evict --all --yes --disk /var/cache/kite

Exit codes: 0 done, 1 a tier failed or did only a part, 2 a wrong option."""

_VERIFY_DESCRIPTION = """\
Read every unit and check what can be checked without a prompt: checksums, that it decodes, that its fingerprint is
that of its own tokens, and that it lies under its own key. Nothing that is read is ever run, and memory is bounded."""

_VERIFY_EXAMPLES = """\
examples:
  kite pool verify
  kite pool verify --fix --disk /var/cache/kite
  kite pool verify --hmac-key-file key.bin --namespace tenant-a --namespace tenant-b --s3 s3://bucket/kite

With --hmac-key-file a unit must carry the HMAC of one of the namespaces named, or of no namespace; name all that
share the pool, or the others' units count as bad.
Exit codes: 0 all good or all that is bad deleted, 1 bad units are left or a tier was not wholly read, 2 a wrong option."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand, which has subcommands of its own, to the command line."""
    parser = commands.add_parser(
        "pool",
        help="look at, clean and check a pool's shared tiers",
        description="Look at, clean and check what the disk, Redis, S3 and other shared tiers of a pool hold.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)

    stats = _action(actions, "stats", "Units, bytes and epochs per tier, model and kind.", _STATS_EXAMPLES)
    _add_common(stats, _stats)

    ls = _action(actions, "ls", "List units.", _LS_EXAMPLES)
    add_filter_options(ls, times=True)
    ls.add_argument("--sort", choices=SORTS, default="used", help="newest or greatest first (default: used)")
    ls.add_argument("--limit", type=_limit, default=100, metavar="N", help="most units (default 100; 0: all)")
    _add_common(ls, _ls)

    get = _action(actions, "get", "Show one fingerprint's units, checked.", _GET_EXAMPLES)
    get.add_argument("cf", type=_fingerprint, metavar="CF", help="fingerprint, or its first 8 or more digits")
    get.add_argument("--out", metavar="FILE", help="write the unit's stored bytes to this new file")
    add_filter_options(get, times=False)
    _add_common(get, _get)

    evict = _action(actions, "evict", EVICT_DESCRIPTION, _EVICT_EXAMPLES, "delete units")
    add_evict_options(evict)

    verify = _action(actions, "verify", _VERIFY_DESCRIPTION, _VERIFY_EXAMPLES, "read and check every unit")
    add_filter_options(verify, times=False)
    verify.add_argument("--fix", action="store_true", help="delete what is bad")
    verify.add_argument("--hmac-key-file", metavar="FILE", help="file with the bytes of PoolConfig.hmac_key")
    verify.add_argument(
        "--namespace", action="append", default=[], metavar="NAME", help="a namespace in the pool; may be repeated"
    )
    verify.add_argument(
        "--namespace-secret-file", metavar="FILE", help="file with the bytes of PoolConfig.namespace_secret"
    )
    _add_common(verify, _verify)


def _action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    description: str,
    examples: str,
    summary: str | None = None,
) -> argparse.ArgumentParser:
    return actions.add_parser(
        name,
        help=summary or description[0].lower() + description[1:].rstrip("."),
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_common(parser: argparse.ArgumentParser, execute: Callable[[argparse.Namespace], int]) -> None:
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    add_pool_options(parser, disk_default=_DISK_DEFAULT)
    parser.set_defaults(execute=execute)


# Not imported above: showing the help needs no numpy.


def _stats(args: argparse.Namespace) -> int:
    from kitelib.cli.pool_show import run_stats

    return run_stats(args)


def _ls(args: argparse.Namespace) -> int:
    from kitelib.cli.pool_show import run_ls

    return run_ls(args)


def _get(args: argparse.Namespace) -> int:
    from kitelib.cli.pool_show import run_get

    return run_get(args)


def _verify(args: argparse.Namespace) -> int:
    from kitelib.cli.pool_check import run_verify

    return run_verify(args)


def _limit(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _fingerprint(text: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{8,64}", text.lower()):
        raise argparse.ArgumentTypeError(f"{text!r} is no fingerprint; give its first 8 to 64 hexadecimal digits")
    return text.lower()
