"""What the subcommands of `kite bundle` share: options for writing and for trusting a bundle, and the summary of one."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from kitelib.cli.pool_filters import format_bytes, printable
from kitelib.cli.pool_options import file_bytes
from kitelib.cli.screen import LoadProgress, is_terminal
from kitelib.cli.table import counted
from kitelib.errors import ConfigError

if TYPE_CHECKING:
    from kitelib.upcycle.bundle import BundleSummary

__all__ = [
    "add_compress_option",
    "add_trust_options",
    "add_write_options",
    "byte_count",
    "clip",
    "labels_of",
    "percent_progress",
    "read_key_file",
    "summary_fields",
    "summary_text",
    "trusted_keys_of",
]

_HEX_KEY: Final = re.compile(r"[0-9a-fA-F]{64}")
_SUFFIXES: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def add_write_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a command that writes a bundle: `output`, `max_bytes`, `label`, `sign_key`, `hmac_key_file`."""
    group = parser.add_argument_group("the new bundle")
    group.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="the bundle to write; replaced only when it is complete"
    )
    group.add_argument(
        "--max-bytes",
        type=byte_count,
        metavar="SIZE",
        help="most bytes of the file, like 200M or 1G; what saves the most tokens per byte is kept (default: no bound)",
    )
    group.add_argument(
        "--label", action="append", default=[], type=_label, metavar="NAME=TEXT", help="a label; may be repeated"
    )
    group.add_argument("--sign-key", metavar="KEY.pem", help="sign with this private key, see `kite bundle keygen`")
    group.add_argument(
        "--hmac-key-file", metavar="FILE", help="authenticate with the bytes in this file: PoolConfig.hmac_key"
    )


def add_compress_option(parser: argparse.ArgumentParser) -> None:
    """Adds `compress`: how a new bundle stores payloads."""
    parser.add_argument(
        "--compress",
        choices=("none", "zstd", "entropy"),
        default="none",
        help="none: used without decoding (default); entropy: the smallest file; zstd: where entropy is too slow to decode",
    )


def add_trust_options(parser: argparse.ArgumentParser, *, hmac: str = "--hmac-key-file") -> None:
    """Adds the options that say whose bundles to trust: `trusted_key`, and `hmac_key_file`, or `trusted_hmac_key_file` for
    a command whose `hmac_key_file` is that of the new bundle."""
    group = parser.add_argument_group("trust")
    group.add_argument(
        "--trusted-key",
        action="append",
        default=[],
        metavar="KEY",
        help="public key of a signer, as 64 hexadecimal digits or a file with them or with PEM: a bundle that is read "
        "must be signed by one of those given; may be repeated",
    )
    group.add_argument(
        hmac,
        metavar="FILE",
        help="a bundle that is read must carry the HMAC under the bytes in this file, or the signature of a trusted key",
    )


def trusted_keys_of(args: argparse.Namespace) -> tuple[str, ...]:
    """The public keys that the options name, each as 64 hexadecimal digits.

    Raises:
        ConfigError: one is no public key, or its file can't be read.
        MissingExtraError: one is PEM, and `cryptography` is not installed.
    """
    from kitelib.upcycle.bundle.signing import parse_public_key  # not above: showing the help needs no numpy

    return tuple(
        key.lower() if _HEX_KEY.fullmatch(key) else parse_public_key(file_bytes(key, "trusted-key").strip()).hex()
        for key in args.trusted_key
    )


def read_key_file(path: str | None) -> bytes | None:
    """The bytes of `--hmac-key-file`; None without the option.

    Raises:
        ConfigError: the file can't be read, or is empty.
    """
    return None if path is None else file_bytes(path, "hmac-key-file")


def byte_count(text: str) -> int:
    """A number of bytes, for argparse: ``1048576``, ``200M``, ``1.5GiB``; K, M and G are powers of 1024."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * _SUFFIXES[match[2].upper()]) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size of at least 1 byte; give a number and K, M or G, like 200M"
        )
    return size


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is no label; give NAME=TEXT, like fleet=cockpit")
    return name, value


def labels_of(args: argparse.Namespace) -> dict[str, str]:
    """The labels by name.

    Raises:
        ConfigError: a name is given twice with different texts.
    """
    labels: dict[str, str] = {}
    for name, value in args.label:
        if labels.setdefault(name, value) != value:
            raise ConfigError(f"--label {name} is given twice with different texts; leave one out")
    return labels


def percent_progress(stage: str) -> tuple[LoadProgress, Callable[[int, int], None]]:
    """A line on standard error, if that is a terminal, and the callback (done, all) that moves it; `clear` it at the end."""
    progress = LoadProgress(sys.stderr, enabled=is_terminal(sys.stderr))
    return progress, lambda done, total: progress(stage, done / total if total else 1.0)


def clip(text: str, width: int) -> str:
    """At most `width` printable characters of a text that may be anybody's, on one line: it can't steer a terminal."""
    shown = printable(text[: width + 1])
    return shown if len(shown) <= width else shown[: max(0, width - 3)] + "..."


def summary_fields(summary: BundleSummary) -> dict[str, object]:
    """What was written, as plain data for JSON."""
    fields = {field.name: getattr(summary, field.name) for field in dataclasses.fields(summary)}
    return {**fields, "units": dict(summary.units)}


def _numerics_text(numerics: str) -> str:
    if numerics == "standard":
        return "standard: for any machine, in engines opened with ReusePolicy(numerics='standard')"
    if numerics == "bitwise":
        return "bitwise: only for machines and options exactly like those of the engines that computed the units"
    return clip(numerics, 80)


def summary_text(summary: BundleSummary) -> str:
    """What was written, for people: a line per fact."""
    share = summary.num_bytes / summary.data_bytes if summary.data_bytes else 1.0
    lines: Mapping[str, str] = {
        "file": summary.path,
        "size": f"{format_bytes(summary.num_bytes)}, header {format_bytes(summary.header_bytes)}; "
        f"{share:.0%} of the units' own {format_bytes(summary.data_bytes)}",
        "units": ", ".join(f"{count:,} {kind}" for kind, count in sorted(summary.units.items())) or "none",
        "tokens": f"{summary.tokens:,} tokens of KV",
        "numerics": _numerics_text(summary.numerics),
        "left out": f"{counted(summary.left_out, 'unit')} that did not fit" if summary.left_out else "nothing",
        "signed by": summary.signer or "nobody",
        "digest": summary.digest,
    }
    return "\n".join(f"{name:<10} {value}" for name, value in lines.items())
