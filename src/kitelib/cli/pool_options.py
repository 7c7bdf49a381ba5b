"""The options that name a pool, the same for `kite run`, `chat`, `demo` and `pool`, and the small files that options name."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from kitelib.config import KiteConfig, PoolConfig
from kitelib.config_sections import default_disk_folder
from kitelib.errors import ConfigError

__all__ = ["REDIS_VARIABLE", "add_pool_options", "file_bytes", "pool_choice"]

REDIS_VARIABLE = "KITE_REDIS_URL"
"""Environment variable with the URL of Redis: what stands on a command line can be seen by everybody on a machine."""


def add_pool_options(parser: argparse.ArgumentParser, *, disk_default: str) -> None:
    """Adds the options that name tiers; `disk_default` says what happens without them."""
    group = parser.add_argument_group("pool", "where recyclable units are kept, besides this process's memory")
    group.add_argument("--config", metavar="FILE", help="configuration file (YAML), instead of the options below")
    group.add_argument("--disk", metavar="DIR", help=f"folder of the disk tier, or none (default: {disk_default})")
    group.add_argument(
        "--redis",
        metavar="URL",
        help="redis://, rediss://, redis+cluster:// or redis+sentinel://. A command line can be read by others: "
        f"give a URL with a password in --redis-url-file or in the variable {REDIS_VARIABLE}",
    )
    group.add_argument("--redis-url-file", metavar="FILE", help="file whose first line is the URL of Redis")
    group.add_argument("--s3", metavar="URL", help="s3://bucket/prefix; credentials come from the AWS_... variables")
    group.add_argument(
        "--store",
        action="append",
        default=[],
        metavar="URL",
        help="a tier of an installed package, by its URL; may be repeated",
    )


def pool_choice(args: argparse.Namespace, *, default_disk: bool) -> KiteConfig | PoolConfig:
    """What the options name: a whole file, or single tiers.

    Args:
        args: the parsed options.
        default_disk: take the disk tier in the user's cache folder if no tier is named.

    Raises:
        ConfigError: the options contradict each other, or a file that they name can't be read.
    """
    named = [name for name in ("disk", "redis", "redis_url_file", "s3", "store") if getattr(args, name)]
    if args.config is not None:
        if named:
            option = named[0].replace("_", "-")
            raise ConfigError(f"--config names the tiers already; leave out --{option}, or write it into the file")
        return KiteConfig.from_yaml(args.config)
    if args.redis is not None and args.redis_url_file is not None:
        raise ConfigError("--redis and --redis-url-file are both given; leave one out")
    redis = args.redis or os.environ.get(REDIS_VARIABLE) or None
    if args.redis_url_file is not None:
        redis = _first_line(args.redis_url_file)
    disk = args.disk
    if disk is None and default_disk and not (redis or args.s3 or args.store):
        disk = default_disk_folder()
    return PoolConfig(
        disk=None if disk in (None, "none") else str(Path(disk).expanduser()),
        redis=redis,
        s3=args.s3,
        stores=tuple(args.store),
    )


def file_bytes(path: str, option: str) -> bytes:
    """The first 4 KiB of the file that ``--option`` names: that of a key or a secret.

    Raises:
        ConfigError: the file can't be read, or is empty.
    """
    try:
        with open(path, "rb") as file:
            raw = file.read(4096)
    except OSError as error:
        raise ConfigError(f"the file {path!r} of --{option} can't be read: {error.strerror}") from error
    if not raw:
        raise ConfigError(f"the file {path!r} of --{option} is empty; it must hold the bytes of the key")
    return raw


def _first_line(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            line = file.readline(4096).strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"the file {path!r} of --redis-url-file can't be read: {reason}") from error
    if not line:
        raise ConfigError(f"the file {path!r} of --redis-url-file has an empty first line; write the URL there")
    return line
