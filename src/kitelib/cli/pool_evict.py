"""The options of `kite pool evict`, and the same as a command of its own: `kite-ru-pool-evict`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

from kitelib.cli.pool_filters import add_filter_options
from kitelib.cli.pool_options import add_pool_options

__all__ = ["EVICT_DESCRIPTION", "add_evict_options", "main"]

EVICT_DESCRIPTION: Final = """\
Delete units from every shared tier that is named. A unit is deleted if it meets all of the options given;
--freshness means the units that an engine's reload() or invalidate() made stale. Engines that run meanwhile keep
what is in their own memory; a deleted unit is a miss for them and is computed again."""

_EXAMPLES = """\
examples:
  kite-ru-pool-evict --freshness                              what is stale, in the user's cache folder
  kite-ru-pool-evict --freshness --config upcycle_config.yaml
  kite-ru-pool-evict --idle 7d --redis redis://cache:6379 --dry-run
  kite-ru-pool-evict --all --yes --disk /var/cache/kite

The same as `kite pool evict`. Exit codes: 0 done, 1 a tier failed or did only a part, 2 a wrong option."""


def add_evict_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add_filter_options(parser, times=True)
    parser.add_argument("--freshness", action="store_true", help="units older than their model's present epoch")
    parser.add_argument("--all", action="store_true", help="everything; asks before it does, unless --yes")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    add_pool_options(parser, disk_default="the user's cache folder, if no tier is named")
    parser.set_defaults(execute=_run)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `kite-ru-pool-evict`; the exit codes are those of `kitelib.cli.main`."""
    from kitelib.cli.main import run_command_line

    parser = argparse.ArgumentParser(
        prog="kite-ru-pool-evict",
        description=EVICT_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_evict_options(parser)
    return run_command_line(parser, argv)


def _run(args: argparse.Namespace) -> int:
    from kitelib.cli.pool_clean import run_evict  # not above: showing the help needs no numpy

    return run_evict(args)
