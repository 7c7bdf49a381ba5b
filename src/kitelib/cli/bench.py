"""`kite bench replay`: how much of a recorded load the pool would have answered, at several sizes."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kitelib.cli.options import positive_count
from kitelib.cli.screen import LoadProgress
from kitelib.cli.table import format_table
from kitelib.errors import InvalidRequestError, MissingExtraError

if TYPE_CHECKING:
    from kitelib.cli.replay import Trace

__all__ = ["Result", "add_parser", "replay", "run_replay"]

_DEFAULT_CAPACITIES = "1%,5%,10%,25%,50%,100%"

_EXAMPLES = """\
examples:
  kite bench replay conversation_trace.jsonl
  kite bench replay trace.jsonl --png hits.png --json hits.json
  kite bench replay trace.jsonl --capacity 5%,20000 --requests 2000"""

_REPLAY_DESCRIPTION = """\
Replays the KV blocks of a recorded load through the memory tier, in the trace's
own time, and shows the share of blocks that were there, beside plain LRU, the
optimum that knows the future (Belady), and a cache that never evicts. A hit is a
block of the leading run: those of a prompt up to the first that is missing,
since what comes after a missing block can't be used.

FILE has one JSON object a line, in order of time, as the traces published with
Mooncake have: timestamp (ms), input_length (tokens) and hash_ids, one id for
each block; equal ids are equal blocks after equal prefixes."""

_LEGEND = (
    "Share of all blocks that were hits; a hit counts only while the prompt's run from its first block is unbroken."
)


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """Hits at one capacity, in blocks.

    Attributes:
        capacity: blocks that fit.
        share: capacity as part of the working set.
        kite, lru, belady: hits of each.
    """

    capacity: int
    share: float
    kite: int
    lru: int
    belady: int


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand to the command line."""
    parser = commands.add_parser(
        "bench",
        help="replay a recorded load through the pool",
        description="Measurements that need no model.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(metavar="KIND", title="kinds", required=True)
    replaying = kinds.add_parser(
        "replay",
        help="hit rates of a trace at several pool sizes",
        description=_REPLAY_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    replaying.add_argument("file", metavar="FILE", help="the trace")
    replaying.add_argument(
        "--capacity",
        type=_capacities,
        default=_DEFAULT_CAPACITIES,
        metavar="LIST",
        help=f"pool sizes, in blocks or in %% of the different blocks (default {_DEFAULT_CAPACITIES.replace('%', '%%')})",
    )
    replaying.add_argument(
        "--block-tokens",
        type=positive_count,
        default=512,
        metavar="N",
        help="tokens in one block of the trace (default 512)",
    )
    replaying.add_argument("--requests", type=positive_count, metavar="N", help="only the first N requests")
    replaying.add_argument(
        "--ttl", type=_seconds, metavar="SECONDS", help="time to live in the pool (default: none); the others have none"
    )
    replaying.add_argument("--json", metavar="OUT", help="write the figures to this file")
    replaying.add_argument("--png", metavar="OUT", help="draw them into this file (needs the extra 'plot')")
    replaying.set_defaults(execute=run_replay)


def run_replay(args: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code.

    Raises:
        KiteError: see `kitelib.cli.main` for what becomes of it.
    """
    from kitelib.cli.replay import hits_of_infinite, read_trace

    if args.png:
        _check_plot()  # before minutes of work, not after
    progress = LoadProgress(sys.stderr)
    stage = "Reading the trace"
    progress(stage)
    trace = read_trace(
        args.file,
        args.block_tokens,
        max_requests=args.requests,
        progress=lambda fraction: progress(stage, fraction),
    )
    infinite = hits_of_infinite(trace)
    capacities = sorted({capacity(trace.num_distinct) for capacity in args.capacity})
    results = replay(trace, capacities, ttl_s=args.ttl, progress=progress)
    progress.clear()
    print(_summary(trace))
    print()
    print(_table(trace, results, infinite))
    print()
    print(_LEGEND)
    if args.json:
        _write(args.json, lambda path: path.write_text(_json(args, trace, results, infinite), encoding="utf-8"))
    if args.png:
        _write(args.png, lambda path: _draw(path, trace, results, infinite))
    return 0


def replay(
    trace: Trace, capacities: Sequence[int], *, ttl_s: float | None = None, progress: Callable[..., None]
) -> list[Result]:
    """Replays the trace at each capacity; `progress` gets what is being done and the done part."""
    from kitelib.cli.replay import hits_of_belady, hits_of_lru, hits_of_store, stand_ins

    items = stand_ins(trace)
    results = []
    for capacity in capacities:

        def during(name: str, capacity: int = capacity) -> Callable[[float], None]:
            return lambda fraction: progress(f"{capacity:,} blocks, {name}", fraction)

        results.append(
            Result(
                capacity,
                capacity / trace.num_distinct,
                hits_of_store(trace, items, capacity, ttl_s=ttl_s, progress=during("KITE")),
                hits_of_lru(trace, capacity, progress=during("LRU")),
                hits_of_belady(trace, capacity, progress=during("Belady")),
            )
        )
    return results


def _summary(trace: Trace) -> str:
    hours = (trace.requests[-1].at_s - trace.requests[0].at_s) / 3600
    return (
        f"{len(trace.requests):,} requests in {hours:.2f} h, {trace.num_blocks:,} blocks of {trace.block_tokens} tokens, "
        f"{trace.num_distinct:,} different ones (the working set)"
    )


def _table(trace: Trace, results: Sequence[Result], infinite: int) -> str:
    def rate(hits: int) -> str:
        return f"{hits / trace.num_blocks:.1%}"

    rows = [
        (
            f"{result.capacity:,}",
            f"{result.share:.1%}",
            rate(result.kite),
            rate(result.lru),
            rate(result.belady),
            rate(infinite),
        )
        for result in results
    ]
    return format_table(("blocks", "of the set", "KITE", "LRU", "Belady", "infinite"), rows)


def _json(args: argparse.Namespace, trace: Trace, results: Sequence[Result], infinite: int) -> str:
    report = {
        "trace": Path(args.file).name,
        "block_tokens": trace.block_tokens,
        "ttl_s": args.ttl,
        "requests": len(trace.requests),
        "blocks": trace.num_blocks,
        "distinct_blocks": trace.num_distinct,
        "hits_are": "blocks of the leading run",
        "infinite_hits": infinite,
        "results": [dataclasses.asdict(result) for result in results],
    }
    return json.dumps(report, indent=2) + "\n"


def _check_plot() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("matplotlib", "plot", "drawing a PNG") from error


def _draw(path: Path, trace: Trace, results: Sequence[Result], infinite: int) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    shares = [result.share for result in results]
    lines = (("optimum that knows the future", "belady", "^:"), ("KITE", "kite", "o-"), ("LRU", "lru", "s--"))
    for label, name, style in lines:
        axes.plot(shares, [getattr(result, name) / trace.num_blocks for result in results], style, label=label)
    axes.axhline(infinite / trace.num_blocks, color="gray", linewidth=1, label="nothing evicted")
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel(f"room, as part of the {trace.num_distinct:,} different blocks")
    axes.set_ylabel("hits, as part of all blocks")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150, format="png")


def _write(path: str, write: Callable[[Path], object]) -> None:
    try:
        write(Path(path))
    except OSError as error:
        raise InvalidRequestError(f"{path!r} can't be written: {error.strerror}") from error
    print(f"\nwritten: {os.fspath(path)}")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def _capacities(text: str) -> list[Callable[[int], int]]:
    """Functions from the number of different blocks to a capacity in blocks."""
    return [_capacity(part.strip()) for part in text.split(",")]


def _capacity(text: str) -> Callable[[int], int]:
    if not text.endswith("%"):
        blocks = positive_count(text)
        return lambda _: blocks
    try:
        percent = float(text[:-1])
    except ValueError:
        percent = math.nan
    if not 0 < percent <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share above 0% and at most 100%")
    return lambda num_distinct: max(1, int(num_distinct * percent / 100))
