"""The engine that `kite bundle build` and `kite bundle verify` open: its options, and what of them a bundle decides."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from kitelib.cli.options import Progress, positive_count
from kitelib.cli.pool_options import file_bytes
from kitelib.config import PoolConfig, ReusePolicy
from kitelib.errors import ConfigError

if TYPE_CHECKING:
    from kitelib import KiteEngine

__all__ = ["add_bundle_engine_options", "adapters_of", "open_bundle_engine"]


def add_bundle_engine_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `KiteEngine.open` that matter for a bundle."""
    group = parser.add_argument_group("engine")
    group.add_argument("--threads", type=positive_count, metavar="N", help="CPU threads (default: chosen for you)")
    group.add_argument(
        "--ctx", "--n-ctx", type=positive_count, metavar="TOKENS", help="context length (default: chosen for you)"
    )
    group.add_argument("--backend", default="auto", metavar="NAME", help="llama_cpp or torch (default: auto)")
    group.add_argument("--device", default="auto", metavar="NAME", help="cpu, cuda or cuda:N (default: auto)")
    group.add_argument(
        "--dtype", default="auto", metavar="TYPE", help="bfloat16, float16 or float32, for torch (default: auto)"
    )
    group.add_argument(
        "--adapter", action="append", default=[], type=_adapter, metavar="NAME=PATH", help="a LoRA adapter; repeatable"
    )
    group.add_argument(
        "--namespace-secret-file", metavar="FILE", help="file with the bytes of PoolConfig.namespace_secret"
    )


def _adapter(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not name or not equals or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is no adapter; give NAME=PATH, like de=german.gguf")
    return name, path


def adapters_of(args: argparse.Namespace) -> dict[str, str]:
    """The adapters by name.

    Raises:
        ConfigError: a name is given twice.
    """
    found: dict[str, str] = {}
    for name, path in args.adapter:
        if name in found:
            raise ConfigError(f"--adapter {name} is given twice; leave one out")
        found[name] = path
    return found


def open_bundle_engine(
    args: argparse.Namespace,
    model: str,
    progress: Progress,
    *,
    numerics: Any,
    hmac_key: bytes | None,
    pool: Mapping[str, Any] | None = None,
    **options: Any,
) -> AbstractAsyncContextManager[KiteEngine]:
    """The engine, not yet loaded; entering it loads the model. It keeps units in this process's memory only.

    Args:
        args: with what `add_bundle_engine_options` added.
        model: path of the model.
        progress: shows how far loading is.
        numerics: of `ReusePolicy`.
        hmac_key: of `PoolConfig`.
        pool: further fields of `PoolConfig`.
        **options: of `KiteEngine.open`, instead of those in `args`.

    Raises:
        ConfigError: an option is wrong, or its file can't be read.
    """
    from kitelib import KiteEngine

    secret = None
    if args.namespace_secret_file is not None:
        secret = file_bytes(args.namespace_secret_file, "namespace-secret-file")
    chosen: dict[str, Any] = {
        "backend": args.backend,
        "threads": args.threads,
        "n_ctx": args.ctx,
        "device": args.device,
        "dtype": args.dtype,
        **options,
    }
    return KiteEngine.open(
        model,
        adapters=adapters_of(args),
        reuse=ReusePolicy(numerics=numerics),
        pool=PoolConfig(hmac_key=hmac_key, namespace_secret=secret, **(pool or {})),
        progress=progress,
        **chosen,
    )
