"""Redis URLs: where the servers are and how to log in, checked before anything connects."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final, Literal
from urllib.parse import parse_qsl, unquote, urlsplit

from kitelib.errors import ConfigError

__all__ = ["Address", "RedisTarget", "parse_address", "parse_redis_url"]

Address = tuple[str, int]
"""Host and port; the path and 0 for a unix socket."""

_SCHEMES: Final[Mapping[str, tuple[Literal["standalone", "cluster", "sentinel"], bool, int]]] = {
    "redis": ("standalone", False, 6379),
    "rediss": ("standalone", True, 6379),
    "unix": ("standalone", False, 0),
    "redis+cluster": ("cluster", False, 6379),
    "rediss+cluster": ("cluster", True, 6379),
    "redis+sentinel": ("sentinel", False, 26379),
    "rediss+sentinel": ("sentinel", True, 26379),
}
# As redis-py names them.
_TLS_TEXTS: Final = (
    "ssl_ca_certs",
    "ssl_ca_path",
    "ssl_ca_data",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_password",
    "ssl_ciphers",
)
_TRUTH: Final = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@dataclasses.dataclass(frozen=True, slots=True)
class RedisTarget:
    """What a Redis URL says.

    Attributes:
        kind: how the servers belong together.
        scheme: scheme of the URL.
        addresses: the servers to begin with; for "sentinel" the sentinels.
        username: ACL user; None means the default user.
        password: its password; None means no login.
        db: database number; 0 on a cluster.
        service: what the sentinels call the primary.
        tls: keyword arguments of redis-py's TLS connection; None means no TLS.
        sentinel_username: ACL user at the sentinels.
        sentinel_password: its password; the servers' own login is never sent to sentinels.
    """

    kind: Literal["standalone", "cluster", "sentinel"]
    scheme: str
    addresses: tuple[Address, ...]
    username: str | None = None
    password: str | None = dataclasses.field(default=None, repr=False)
    db: int = 0
    service: str = ""
    tls: Mapping[str, str | bool] | None = dataclasses.field(default=None, repr=False)
    sentinel_username: str | None = None
    sentinel_password: str | None = dataclasses.field(default=None, repr=False)

    def __str__(self) -> str:
        """The URL without the login and the options."""
        if self.scheme == "unix":
            return f"unix://{self.addresses[0][0]}"
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.addresses)
        tail = f"/{self.service}/{self.db}" if self.kind == "sentinel" else f"/{self.db}" if self.db else ""
        return f"{self.scheme}://{hosts}{tail}"


def parse_redis_url(url: str) -> RedisTarget:
    """Reads a Redis URL.

    User and password are percent-encoded where they hold special characters. Options after ``?``: ``db``; for TLS
    ``ssl_cert_reqs`` (required, optional, none), ``ssl_check_hostname``, ``ssl_ca_certs``, ``ssl_ca_path``,
    ``ssl_ca_data``, ``ssl_certfile``, ``ssl_keyfile``, ``ssl_password``, ``ssl_ciphers`` as in redis-py; for sentinels
    ``sentinel_username`` and ``sentinel_password``.

    Raises:
        ConfigError: something in it is wrong; the message never shows the login or an option's value.
    """
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        raise ConfigError(
            f"the Redis URL begins with {scheme[:20] if separator else '?'!r}; use one of {sorted(_SCHEMES)}"
        )
    kind, tls, default_port = _SCHEMES[scheme]
    try:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:
        raise ConfigError(
            f"the {scheme} URL can't be read; percent-encode special characters in the password"
        ) from None
    if parts.fragment:
        raise ConfigError(f"the {scheme} URL has a part after '#'; percent-encode '#' in the password as %23")
    login, _, hosts = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    if scheme == "unix":
        addresses: tuple[Address, ...] = ((unquote(parts.path), 0),)
        service, db_text = "", options.pop("db", "0")
        if not parts.path or hosts:
            raise ConfigError("the unix URL has no path; write unix:///path/to/redis.sock")
    else:
        addresses = tuple(parse_address(text, default_port, scheme) for text in hosts.split(","))
        service, db_text = _path(kind, scheme, parts.path)
        db_text = options.pop("db", db_text)
    if kind == "standalone" and len(addresses) > 1:
        raise ConfigError(f"the {scheme} URL names {len(addresses)} servers; for a cluster write {scheme}+cluster://")
    target = RedisTarget(
        kind=kind,
        scheme=scheme,
        addresses=addresses,
        username=unquote(user) or None,
        password=unquote(password) or None,
        db=_database(db_text, kind, scheme),
        service=service,
        tls=_tls(options, scheme) if tls else None,
        sentinel_username=options.pop("sentinel_username", None) if kind == "sentinel" else None,
        sentinel_password=options.pop("sentinel_password", None) if kind == "sentinel" else None,
    )
    if options:
        hint = "; TLS options need rediss" if any(name.startswith("ssl_") for name in options) else ""
        raise ConfigError(f"the {scheme} URL has the unknown option {min(options)!r}{hint}")
    return target


def parse_address(text: str, default_port: int, scheme: str) -> Address:
    """Host and port of ``host``, ``host:port``, ``[v6]:port``.

    Raises:
        ConfigError: it is neither.
    """
    host, _, port = text.rpartition(":") if text.rfind(":") > text.rfind("]") else (text, "", "")
    host = host.removeprefix("[").removesuffix("]")
    if not host:
        raise ConfigError(f"the {scheme} URL has an empty host; write {scheme}://host:port")
    if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(
            f"the {scheme} URL has a port that is no number from 1 to 65535; write / : @ # ? in a password as %2F %3A %40 "
            "%23 %3F"
        )
    return host, int(port) if port else default_port


def _path(kind: str, scheme: str, path: str) -> tuple[str, str]:
    names = [unquote(name) for name in path.strip("/").split("/")] if path.strip("/") else []
    if kind == "sentinel":
        if not 1 <= len(names) <= 2:
            raise ConfigError(f"the {scheme} URL has no service; write {scheme}://host:port,host:port/service/db")
        return names[0], names[1] if len(names) == 2 else "0"
    if len(names) > 1:
        raise ConfigError(
            f"the {scheme} URL has {len(names)} parts in its path; only the database number may stand there"
        )
    return "", names[0] if names else "0"


def _database(text: str, kind: str, scheme: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise ConfigError(f"the {scheme} URL has the database {text[:20]!r}; give a number")
    if kind == "cluster" and int(text):
        raise ConfigError(f"the {scheme} URL has database {int(text)}; a cluster has only database 0")
    return int(text)


def _tls(options: dict[str, str], scheme: str) -> Mapping[str, str | bool]:
    settings: dict[str, str | bool] = {"ssl_cert_reqs": options.pop("ssl_cert_reqs", "required")}
    if settings["ssl_cert_reqs"] not in ("required", "optional", "none"):
        raise ConfigError(f"the {scheme} URL has a bad ssl_cert_reqs; give required, optional or none")
    check = options.pop("ssl_check_hostname", "true").lower()
    if check not in _TRUTH:
        raise ConfigError(f"the {scheme} URL has a bad ssl_check_hostname; give true or false")
    settings["ssl_check_hostname"] = _TRUTH[check]
    settings.update({name: options.pop(name) for name in _TLS_TEXTS if name in options})
    return settings
