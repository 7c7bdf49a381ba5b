"""`kite bundle verify`: whether every unit of a bundle is whole, and whether it is what the model computes."""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Final

import anyio

from kitelib.cli.bundle_engine import add_bundle_engine_options, open_bundle_engine
from kitelib.cli.bundle_options import add_trust_options, clip, percent_progress, read_key_file, trusted_keys_of
from kitelib.cli.options import resolve_model
from kitelib.cli.pool_filters import format_bytes
from kitelib.cli.screen import LoadProgress, is_terminal
from kitelib.cli.table import counted, format_seconds, format_table
from kitelib.errors import BundleError

if TYPE_CHECKING:
    from kitelib import KiteEngine
    from kitelib.engine.bundle_proof import BundleProof, RunProof
    from kitelib.upcycle.bundle import Bundle, BundleUnit

__all__ = ["add_verify_options", "run_verify"]

_MOST_SHOWN: Final = 50  # problems and rows; the JSON has all
_CONTEXT_STEP: Final = 256
_BACKENDS: Final = ("llama_cpp", "torch")


def add_verify_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the subcommand."""
    parser.add_argument("file", metavar="FILE", help="the bundle")
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="restore every prompt of the bundle with this model, compute it cold as well, and compare tokens, KV and "
        "logits; takes longer than the build did",
    )
    parser.add_argument("--require-signature", action="store_true", help="the bundle must be signed by a --trusted-key")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    add_trust_options(parser)
    add_bundle_engine_options(parser)


def run_verify(args: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code: 1 if a unit is bad, or not what the model computes.

    Raises:
        KiteError: see `kitelib.cli.main` for what becomes of it.
    """
    from kitelib.upcycle.bundle import Bundle

    keys, hmac_key = trusted_keys_of(args), read_key_file(args.hmac_key_file)
    trust: dict[str, Any] = {"require_signature": args.require_signature or bool(keys), "trusted_keys": keys}
    model = None if args.model is None else resolve_model(args.model)
    with Bundle.open(args.file, hmac_key=hmac_key, **trust) as bundle:
        bad, seconds = _check(bundle)
        proof = None
        if model is not None and not bad:
            proof = _proof(args, model, bundle, trust, hmac_key)
        print(
            json.dumps(_fields(bundle, bad, seconds, proof)) if args.json else _text(args, bundle, bad, seconds, proof)
        )
    return 1 if bad or (proof is not None and not proof.ok) else 0


def _check(bundle: Bundle) -> tuple[list[tuple[BundleUnit, str]], float]:
    """Reads every unit; gives the bad ones, and how many seconds it took."""
    total = max(1, sum(unit.stop - unit.start for unit in bundle.units))
    progress, move = percent_progress("reading")
    begun = time.perf_counter()
    try:
        bad = bundle.check(lambda done: move(done, total))
    finally:
        progress.clear()
    return bad, time.perf_counter() - begun


def _proof(
    args: argparse.Namespace, model: str, bundle: Bundle, trust: dict[str, Any], hmac_key: bytes | None
) -> BundleProof:
    """What computing the bundle's prompts shows, with the engine that the bundle was made for as far as it tells."""
    from kitelib.engine.bundle_runs import runs_of

    manifest = bundle.manifest
    if not manifest.roots:
        raise BundleError(f"the bundle {args.file!r} has no units, so there is nothing to prove")
    path = manifest.roots[0].execution_path
    runs, _ = runs_of(manifest)
    answers = [unit.data_bytes // 4 for unit in bundle.units if unit.kind == "completion"]
    longest = max((run.num_tokens for run in runs), default=1) + max(answers, default=0) + 1
    options: dict[str, Any] = {
        "n_ctx": args.ctx or -(-longest // _CONTEXT_STEP) * _CONTEXT_STEP,
        "block_tokens": manifest.model.block_tokens,
    }
    if args.backend == "auto" and path.get("backend") in _BACKENDS:
        options["backend"] = path["backend"]
    if args.threads is None and isinstance(path.get("threads"), int):
        options["threads"] = path["threads"]
    numerics = "bitwise" if path.get("numerics") == "bitwise" else "standard"
    pool = {"kv_precision": "int8"} if path.get("kv_precision") == "int8" else {}
    progress = LoadProgress(sys.stderr, enabled=is_terminal(sys.stderr))
    opening = open_bundle_engine(args, model, progress, numerics=numerics, hmac_key=hmac_key, pool=pool, **options)
    return anyio.run(_prove, opening, progress, args.file, trust)


async def _prove(
    opening: AbstractAsyncContextManager[KiteEngine], progress: LoadProgress, path: str, trust: dict[str, Any]
) -> BundleProof:
    from kitelib.engine.bundle_proof import prove_bundle

    try:
        async with opening as engine:
            return await prove_bundle(engine, path, progress=progress, **trust)
    finally:
        progress.clear()


def _fields(
    bundle: Bundle, bad: list[tuple[BundleUnit, str]], seconds: float, proof: BundleProof | None
) -> dict[str, Any]:
    payload = sum(unit.stop - unit.start for unit in bundle.units)
    found: dict[str, Any] = {
        "path": bundle.path,
        "digest": bundle.digest,
        "signer": bundle.signer,
        "units": len(bundle.units),
        "bytes": bundle.num_bytes,
        "payload_bytes": payload,
        "seconds": round(seconds, 6),
        "bytes_per_s": round(payload / seconds) if seconds else None,
        "bad": [{"kind": unit.kind, "cf": unit.cf.hex(), "reason": reason} for unit, reason in bad],
        "ok": not bad and (proof is None or proof.ok),
    }
    if proof is not None:
        found["proof"] = {
            "numerics": proof.numerics,
            "ok": proof.ok,
            "problems": list(proof.problems),
            "unchecked_completions": proof.unchecked,
            "runs": [_run_fields(run) for run in proof.runs],
        }
    return found


def _run_fields(run: RunProof) -> dict[str, Any]:
    fields = {name: getattr(run, name) for name in run.__dataclass_fields__}
    for name, value in fields.items():  # JSON has no infinity
        if isinstance(value, float) and value == float("inf"):
            fields[name] = "inf"
    return {**fields, "problems": list(run.problems)}


def _text(
    args: argparse.Namespace,
    bundle: Bundle,
    bad: list[tuple[BundleUnit, str]],
    seconds: float,
    proof: BundleProof | None,
) -> str:
    payload = sum(unit.stop - unit.start for unit in bundle.units)
    rate = f", {payload / seconds / 1e6:,.0f} MB/s" if seconds else ""
    lines = [f"{unit.kind} {unit.cf.hex()[:16]}: {clip(reason, 300)}" for unit, reason in bad[:_MOST_SHOWN]]
    if len(bad) > _MOST_SHOWN:
        lines.append(f"... and {len(bad) - _MOST_SHOWN:,} more")
    lines.append(
        f"{clip(bundle.path, 300)}: {counted(len(bundle.units), 'unit')} checked, {len(bad):,} bad; "
        f"{format_bytes(payload)} in {format_seconds(seconds)}{rate}"
    )
    lines.append(f"signed by {bundle.signer}" if bundle.signer else _unsigned(bundle))
    if proof is not None:
        lines += ["", *_proof_lines(proof)]
    elif args.model is not None:
        lines.append("Nothing was computed, since units are bad.")
    return "\n".join(lines)


def _unsigned(bundle: Bundle) -> str:
    if bundle.signed_by is None:
        return "not signed"
    return f"a signature that says it is of {bundle.signed_by} was not checked: give --trusted-key"


def _proof_lines(proof: BundleProof) -> list[str]:
    header = ("#", "tokens", "cached", "must be", "KV differs", "log-probs", "logits", "answer", "")
    rows = [
        (
            str(run.number),
            f"{run.tokens:,}",
            f"{run.cached_tokens:,}",
            f"{run.expected_tokens:,}",
            _difference(run.kv_difference),
            _difference(run.logits_difference),
            _difference(run.stored_difference),
            str(run.answer_tokens or "-"),
            "wrong" if run.problems else "good",
        )
        for run in proof.runs[:_MOST_SHOWN]
    ]
    lines = [format_table(header, rows, left=(8,))]
    if len(proof.runs) > _MOST_SHOWN:
        lines.append(f"... and {len(proof.runs) - _MOST_SHOWN:,} more prompts")
    problems = [*proof.problems, *(f"prompt {run.number}: {each}" for run in proof.runs for each in run.problems)]
    lines += ["", *(clip(each, 300) for each in problems[:_MOST_SHOWN])]
    if len(problems) > _MOST_SHOWN:
        lines.append(f"... and {len(problems) - _MOST_SHOWN:,} more")
    wrong = sum(bool(run.problems) for run in proof.runs)
    how = "equal bits" if proof.numerics == "bitwise" else "equal values, within the bounds of standard numerics"
    lines.append(f"{counted(len(proof.runs), 'prompt')} restored and computed cold ({how}): {wrong:,} wrong")
    if proof.unchecked:
        lines.append(f"{counted(proof.unchecked, 'completion')} not checked: guesses, or answers to other options")
    return lines


def _difference(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"
