"""`kite bundle build`: computes the prompts of a file and writes their units to a bundle."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

import anyio

from kitelib.cli.bundle_engine import adapters_of, add_bundle_engine_options, open_bundle_engine
from kitelib.cli.bundle_options import (
    add_compress_option,
    add_write_options,
    clip,
    labels_of,
    read_key_file,
    summary_fields,
    summary_text,
)
from kitelib.cli.options import add_model_argument, engine_notes, resolve_model
from kitelib.cli.screen import LoadProgress, is_terminal
from kitelib.cli.table import counted, format_seconds
from kitelib.config import ReusePolicy
from kitelib.errors import ConfigError

if TYPE_CHECKING:
    from kitelib import KiteEngine
    from kitelib.engine.bundle_prompts import BundlePrompt
    from kitelib.upcycle.bundle import BundleSummary

__all__ = ["add_build_options", "run_build"]

_PROMPTS_HELP = """\
file of JSON lines, one prompt a line: a text, a list of token ids, or an object with one of "prompt", "messages" and
"template" (a text or messages in which {{name}} marks what varies; only what comes before it is kept), and maybe
"tools", "hits" (how often it is expected), "completion" (most tokens of an answer to keep) and "adapter"\
"""


def add_build_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the subcommand."""
    add_model_argument(parser)
    parser.add_argument("--prompts", required=True, metavar="FILE", help=_PROMPTS_HELP)
    parser.add_argument(
        "--numerics",
        choices=("standard", "bitwise"),
        default="standard",
        help="standard: for any machine (default); bitwise: only for machines and options exactly like these",
    )
    parser.add_argument(
        "--completions",
        type=_count,
        default=0,
        metavar="N",
        help="keep a greedy answer of up to N tokens for prompts that don't say it themselves (default 0: none)",
    )
    add_compress_option(parser)
    parser.add_argument("--namespace", metavar="NAME", help="whose units these are (default: the engine's own)")
    parser.add_argument(
        "--epoch",
        type=_count,
        metavar="N",
        help="freshness epoch of the fleet's pool (default 0), see `kite pool stats`",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    add_write_options(parser)
    add_bundle_engine_options(parser)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _source_date() -> float | None:
    """The time that builds are to state instead of their own: https://reproducible-builds.org/specs/source-date-epoch/.

    Raises:
        ConfigError: it is no number.
    """
    text = os.environ.get("SOURCE_DATE_EPOCH", "")
    if text and not (text.isascii() and text.isdecimal() and len(text) <= 12):
        raise ConfigError(f"SOURCE_DATE_EPOCH is {text[:80]!r}; give seconds since 1970 as a whole number, or unset it")
    return float(text) if text else None


def _version(path: str) -> tuple[int, int] | None:
    """Changes when the file is replaced."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def run_build(args: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code.

    Raises:
        KiteError: see `kitelib.cli.main` for what becomes of it.
    """
    from kitelib.engine.bundle_prompts import read_prompts, unmarked_parts
    from kitelib.upcycle.bundle.replacing import target_of

    # Everything that can be refused is refused before the model is loaded, which may take long.
    prompts = read_prompts(args.prompts)
    target_of(args.output)
    for prompt in prompts:
        if names := unmarked_parts(prompt):
            print(
                f"{prompt.source}: {{{{{clip(names[0], 40)}}}}} is taken as it stands; to have it mark what varies, give the "
                "prompt as a template",
                file=sys.stderr,
            )
    options = {
        "completions": args.completions,
        "compression": args.compress,
        "max_bytes": args.max_bytes,
        "sign_key": args.sign_key,
        "hmac_key": read_key_file(args.hmac_key_file),
        "labels": labels_of(args),
        "reuse": ReusePolicy(numerics=args.numerics, namespace=args.namespace),
        "epoch": args.epoch,
        "created_at": _source_date(),
    }
    progress = LoadProgress(sys.stderr, enabled=is_terminal(sys.stderr))
    model = resolve_model(args.model)
    opening = open_bundle_engine(args, model, progress, numerics=args.numerics, hmac_key=options["hmac_key"])
    begun, before = time.monotonic(), _version(args.output)
    try:
        summary, notes = anyio.run(_build, opening, progress, prompts, args.output, options)
    except KeyboardInterrupt:
        written = _version(args.output) != before
        raise KeyboardInterrupt(
            "stopped; " + ("it was written already" if written else "nothing was written")
        ) from None
    seconds = time.monotonic() - begun
    if args.json:
        print(json.dumps({**summary_fields(summary), "prompts": len(prompts), "seconds": round(seconds, 3)}))
    else:
        print(_text(args, model, summary, prompts, seconds, notes))
    return 0


async def _build(
    opening: AbstractAsyncContextManager[KiteEngine],
    progress: LoadProgress,
    prompts: Sequence[BundlePrompt],
    path: str,
    options: dict[str, Any],
) -> tuple[BundleSummary, list[str]]:
    try:
        async with opening as engine:
            summary = await engine.build_bundle(prompts, path, progress=progress, **options)
            return summary, engine_notes(engine)
    finally:
        progress.clear()


def _text(
    args: argparse.Namespace,
    model: str,
    summary: BundleSummary,
    prompts: Sequence[BundlePrompt],
    seconds: float,
    notes: Sequence[str],
) -> str:
    templates = sum(prompt.varying for prompt in prompts)
    varying = f", {counted(templates, 'template')} among them" if templates else ""
    policy = [f"numerics={args.numerics!r}"] if args.numerics == "standard" else []
    policy += ["completions=True"] if summary.units.get("completion") else []
    policy += [f"namespace={args.namespace!r}"] if args.namespace is not None else []
    options = [f"reuse=ReusePolicy({', '.join(policy)})"] if policy else []
    adapters = {name: os.path.abspath(path) for name, path in adapters_of(args).items()}
    options += [f"adapters={adapters!r}"] if adapters else []
    secrets = [("hmac_key", args.hmac_key_file), ("namespace_secret", args.namespace_secret_file)]
    pool = [f"{field}=Path({os.path.abspath(file)!r}).read_bytes()" for field, file in secrets if file is not None]
    options += [f"pool=PoolConfig({', '.join(pool)})"] if pool else []
    trust = f", require_signature=True, trusted_keys=[{summary.signer!r}]" if summary.signer else ""
    check = [args.output, "--model", args.model]
    check += [part for name, path in args.adapter for part in ("--adapter", f"{name}={path}")]
    for option, file in (
        ("--hmac-key-file", args.hmac_key_file),
        ("--namespace-secret-file", args.namespace_secret_file),
    ):
        check += [] if file is None else [option, file]
    check += ["--trusted-key", summary.signer] if summary.signer else []
    lines = [
        f"{'prompts':<10} {counted(len(prompts), 'prompt')}{varying}, in {format_seconds(seconds)}",
        summary_text(summary),
        *(f"{'note':<10} {clip(note, 300)}" for note in notes),
        "",
        f"Check it:  kite bundle verify {shlex.join(check)}",
        f"Use it:    async with KiteEngine.open({', '.join([repr(os.path.abspath(model)), *options])}) as engine:",
        f"               await engine.preload({os.path.abspath(args.output)!r}{trust})",
    ]
    return "\n".join(lines)
