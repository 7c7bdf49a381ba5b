"""From a `PoolConfig` to the stores it names: disk, Redis, those of installed packages, S3."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from kitelib.abc import Clock, Store
from kitelib.config import PoolConfig
from kitelib.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    import importlib.metadata

__all__ = ["ENTRY_POINTS", "open_stores"]

ENTRY_POINTS: Final = "kitelib.stores"
"""Group of entry points by which a package registers a store: the name is the scheme of its URLs, the object a
function ``open_store(url: str, config: PoolConfig) -> Store`` that does no I/O."""

_OWN_NAMES: Final = ("memory", "bundle", "disk", "redis", "s3")
_OWN_SCHEMES: Final = {
    "redis": "redis",
    "rediss": "redis",
    "redis+cluster": "redis",
    "rediss+cluster": "redis",
    "redis+sentinel": "redis",
    "rediss+sentinel": "redis",
    "s3": "s3",
    "file": "disk",
}


def open_stores(config: PoolConfig, *, clock: Clock | None = None) -> list[tuple[str, Store]]:
    """The stores outside this process that are configured, fastest first, the archive last, each with its name:
    "disk", "redis", those of other packages by their scheme ("sqlite", "sqlite-2", ...), "s3".

    Opens nothing yet: the first call of a store does, or its `warm`. Looks at installed packages only if
    `PoolConfig.stores` names any, which reads files: call it in a thread then.

    Args:
        clock: time source of kitelib's own stores.

    Raises:
        ConfigError: a URL or an option is wrong, or a package can't give the store; the message names the field, and
            shows no user, password or query of a URL.
        MissingExtraError: a store needs a package that is not installed; names the extra.
    """
    stores: list[tuple[str, Store]] = []
    if config.disk is not None:
        stores.append(("disk", _named("PoolConfig.disk", lambda: _disk(config, clock))))
    if config.redis is not None:
        stores.append(("redis", _named("PoolConfig.redis", lambda: _redis(config, clock))))
    for position, url in enumerate(config.stores):
        scheme, store = _other(f"PoolConfig.stores[{position}]", url, config)
        stores.append((_free_name(scheme, [name for name, _ in stores]), store))
    if config.s3 is not None:
        stores.append(("s3", _named("PoolConfig.s3", lambda: _s3(config, clock))))
    elif config.s3_options:
        raise ConfigError("PoolConfig.s3_options is given, but PoolConfig.s3 is None; give s3://bucket/prefix too")
    return stores


def _disk(config: PoolConfig, clock: Clock | None) -> Store:
    from kitelib.stores.disk import DiskStore

    return DiskStore(str(config.disk), config.disk_bytes, ttl_s=config.ttl_seconds, clock=clock)


def _redis(config: PoolConfig, clock: Clock | None) -> Store:
    from kitelib.stores.redis import RedisStore

    return RedisStore(
        str(config.redis),
        ttl_s=config.ttl_seconds,
        connect_timeout=config.connect_timeout,
        socket_timeout=config.socket_timeout,
        replica_reads=config.replica_reads,
        clock=clock,
    )


def _s3(config: PoolConfig, clock: Clock | None) -> Store:
    from kitelib.stores.s3 import S3Store

    return S3Store(
        str(config.s3),
        options=config.s3_options,
        ttl_s=config.ttl_seconds,
        connect_timeout=config.connect_timeout,
        socket_timeout=config.socket_timeout,
        clock=clock,
    )


def _other(field: str, url: str, config: PoolConfig) -> tuple[str, Store]:
    scheme = _scheme(field, url)
    entry = _entry_point(field, scheme)
    package = _package(entry)
    try:
        store = entry.load()(url, config)
    except ConfigError as error:
        raise ConfigError(f"{field}: {_without_secrets(str(error), url)}") from None
    except MissingExtraError:
        raise
    except Exception as error:  # noqa: BLE001 - another package's code
        said = _without_secrets(f"{type(error).__name__}: {error}", url)
        raise ConfigError(
            f"{field} has the scheme {scheme!r}, but its package {package!r} failed: {said}; repair or remove it"
        ) from None
    if isinstance(store, type) or not isinstance(store, Store):
        raise ConfigError(
            f"{field} has the scheme {scheme!r}, but its package {package!r} gave a {type(store).__name__}, which is no "
            "kitelib.abc.Store; ask its authors"
        )
    return scheme, store


def _scheme(field: str, url: str) -> str:
    try:
        scheme = urlsplit(url).scheme
    except ValueError:
        scheme = ""
    if not scheme:
        raise ConfigError(f"{field} is no URL; give scheme://..., with the scheme that a package registers")
    if scheme in _OWN_SCHEMES:
        raise ConfigError(f"{field} has the scheme {scheme!r}; that belongs into PoolConfig.{_OWN_SCHEMES[scheme]}")
    return scheme


def _entry_point(field: str, scheme: str) -> importlib.metadata.EntryPoint:
    import importlib.metadata  # with all of email, zipfile and csv, which few need

    registered = list(importlib.metadata.entry_points(group=ENTRY_POINTS))
    # One package may be found twice, e.g. on two folders of the path: the first counts, as for imports.
    fitting = {_package(each): each for each in reversed(registered) if each.name == scheme}
    if not fitting:
        known = sorted({*_OWN_SCHEMES, *(each.name for each in registered)})
        raise ConfigError(
            f"{field} has the scheme {scheme!r}, which no installed package registers; known are {', '.join(known)}"
        )
    if len(fitting) > 1:
        raise ConfigError(
            f"{field} has the scheme {scheme!r}, which several packages register: {', '.join(sorted(fitting))}; "
            "remove all but one"
        )
    return next(iter(fitting.values()))


def _package(entry: importlib.metadata.EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value


def _free_name(scheme: str, taken: Collection[str]) -> str:
    names = {*taken, *_OWN_NAMES}
    name, number = scheme, 1
    while name in names:
        number += 1
        name = f"{scheme}-{number}"
    return name


def _named(field: str, build: Callable[[], Store]) -> Store:
    try:
        return build()
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from None


def _without_secrets(text: str, url: str) -> str:
    """The text without the URL's user, password and query, in case another package shows them."""
    parts: Any = urlsplit(url)
    secrets = [each for each in (parts.password, parts.username, parts.query) if each]
    if secrets:
        text = text.replace(url, f"{parts.scheme}://...")
    for secret in secrets:
        text = text.replace(secret, "***")
    return re.sub(r"://[^/@\s]*@", "://", text)
