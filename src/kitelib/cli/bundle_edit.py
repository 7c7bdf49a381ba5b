"""`kite bundle sign | keygen | merge`: what makes a bundle from other bundles, and the keys for it."""

from __future__ import annotations

import argparse
import json
import os
import sys

from kitelib.cli.bundle_options import (
    labels_of,
    percent_progress,
    read_key_file,
    summary_fields,
    summary_text,
    trusted_keys_of,
)
from kitelib.errors import ConfigError
from kitelib.upcycle.bundle import Bundle
from kitelib.upcycle.bundle.editing import merge_bundles, sign_bundle
from kitelib.upcycle.bundle.signing import new_key, public_key_of

__all__ = ["run_keygen", "run_merge", "run_sign"]


def run_keygen(args: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code. The public key alone is on standard output, so that it can be kept."""
    if args.public:
        print(public_key_of(args.key))
        return 0
    pem, public_key = new_key()
    try:
        # Created with its mode, not changed to it: nobody can open it in between.
        descriptor = os.open(args.key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise ConfigError(f"there is a file {args.key!r}; a key is never overwritten, give another name") from error
    except OSError as error:
        raise ConfigError(f"the file {args.key!r} can't be written: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(pem)
    except OSError as error:
        os.unlink(args.key)  # half a key would be in the way of a whole one
        raise ConfigError(f"the file {args.key!r} can't be written: {error.strerror}") from error
    print(f"The private key is in {args.key}: keep it secret. The public key, for engines to trust:", file=sys.stderr)
    print(public_key)
    return 0


def run_sign(args: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code.

    Raises:
        KiteError: see `kitelib.cli.main` for what becomes of it.
    """
    signer = sign_bundle(args.file, args.key, args.output)
    print(f"{args.output or args.file}: signed with {signer}")
    return 0


def run_merge(args: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code.

    Raises:
        KiteError: see `kitelib.cli.main` for what becomes of it.
    """
    if len(args.files) < 2:
        raise ConfigError(f"merge takes two or more bundles, and {args.files[0]!r} is the only one")
    signed = args.sign_key is None and any(_is_signed(file) for file in args.files)  # before one of them is replaced
    progress, moved = percent_progress("Writing")
    try:
        summary = merge_bundles(
            args.files,
            args.output,
            max_bytes=args.max_bytes,
            labels=labels_of(args),
            sign_key=args.sign_key,
            hmac_key=read_key_file(args.hmac_key_file),
            trusted_keys=trusted_keys_of(args),
            trusted_hmac_key=read_key_file(args.trusted_hmac_key_file),
            progress=moved,
        )
    finally:
        progress.clear()
    print(json.dumps(summary_fields(summary)) if args.json else summary_text(summary))
    if signed:
        print(
            f"Parts were signed, and {args.output} is not: sign it with `kite bundle sign`, or give --sign-key.",
            file=sys.stderr,
        )
    return 0


def _is_signed(path: str) -> bool:
    with Bundle.open(path) as bundle:
        return bundle.signed_by is not None
