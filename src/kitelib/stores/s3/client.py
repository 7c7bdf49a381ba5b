"""Settings of the S3 client: from a URL and options to clients of obstore, and from their errors to safe sentences."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import random
import re
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from kitelib.config_file import unknown_name
from kitelib.errors import ConfigError, MissingExtraError, StoreError

__all__ = [
    "MIN_CONNECT_S",
    "MIN_READ_S",
    "PART_BYTES",
    "Clients",
    "Settings",
    "open_clients",
    "parse_settings",
    "sentence",
]

MIN_CONNECT_S: Final = 2.0
"""Least seconds for opening a connection. TCP and TLS take three round trips, up to 0.2 s each across a continent, and
the name has to be looked up; what suits a Redis next door would fail on every first request here."""
MIN_READ_S: Final = 2.0
"""Least seconds without a byte before a read is tried again. S3 answers the first byte within some 100 to 200 ms, but
now and then only after a second; shorter would double the requests of a slow day and gain nothing."""
PART_BYTES: Final = 8 * 2**20
"""Values above it are uploaded in parts of this size, bytes."""

_MAX_RETRIES: Final = 2
_WRITE_S: Final = 30.0  # per request: a part at 0.3 MB/s
_WHOLE_READ_S: Final = 600.0  # silence and the call's own deadline end a read long before
_MAX_TEXT: Final = 400

_CONFIG: Final = (
    "access_key_id",
    "checksum_algorithm",
    "container_authorization_token_file",
    "container_credentials_full_uri",
    "container_credentials_relative_uri",
    "default_region",
    "disable_bulk_delete",
    "disable_tagging",
    "endpoint",
    "endpoint_url_sts",
    "imdsv1_fallback",
    "metadata_endpoint",
    "region",
    "request_payer",
    "role_arn",
    "role_session_name",
    "s3_express",
    "secret_access_key",
    "server_side_encryption",
    "session_token",
    "skip_signature",
    "sse_bucket_key_enabled",
    "sse_customer_key_base64",
    "sse_kms_key_id",
    "unsigned_payload",
    "virtual_hosted_style_request",
    "web_identity_token_file",
)
_CLIENT: Final = (
    "allow_http",
    "allow_invalid_certificates",
    "proxy_ca_certificate",
    "proxy_excludes",
    "proxy_url",
    "root_certificate",
    "user_agent",
)
_FLAGS: Final = ("allow_http", "allow_invalid_certificates")
_CA_BUNDLE: Final = "ca_bundle"  # a file, as AWS_CA_BUNDLE
_ALIASES: Final = {
    "endpoint_url": "endpoint",
    "endpoint_url_s3": "endpoint",
    "sts_endpoint": "endpoint_url_sts",
    "token": "session_token",
}
_SECRET_OPTIONS: Final = ("access_key_id", "secret_access_key", "session_token", "sse_customer_key_base64", "proxy_url")
_SECRET_VARIABLES: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_TOKEN",
    "AWS_SSE_CUSTOMER_KEY_BASE64",
)
# In the order in which the client looks at them.
_ENDPOINT_VARIABLES: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
_PREFIX_PART: Final = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9!_.'()@=+,-]{1,100}")
_NOISE: Final = re.compile(
    r"Generic S3 error: |Object at location \S+ not found: |The operation lacked .* for path \S+: |Error performing "
)
_ERROR_CODE: Final = re.compile(r"<Code>([^<]{1,100})</Code>")
_ERROR_TEXT: Final = re.compile(r"<Message>([^<]{1,200})</Message>")


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """What the clients are built from.

    Attributes:
        bucket: name of the bucket.
        root: what every object's name starts with, without a slash at the end.
        connect_s, read_s: as the options of the store, seconds, not below `MIN_CONNECT_S` and `MIN_READ_S`.
        config, client: settings by the names that obstore uses.
        ca_bundle: file of certificates to trust besides the system's, or None.
        secrets: what no message may show.
    """

    bucket: str
    root: str
    connect_s: float
    read_s: float
    config: Mapping[str, str] = dataclasses.field(repr=False)
    client: Mapping[str, str | bool] = dataclasses.field(repr=False)
    ca_bundle: str | None
    secrets: tuple[str, ...] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Clients:
    """Two clients of one bucket: reading gives up on silence; an upload is silent until it is complete, so it has a
    limit for the whole request instead."""

    api: Any
    read: Any
    write: Any


def parse_settings(url: str, options: Mapping[str, str], connect_timeout: float, socket_timeout: float) -> Settings:
    """Checks the URL and the options. Looks at the environment, does no I/O.

    Raises:
        ConfigError: something in them is wrong; never shows a value that may be a secret.
        MissingExtraError: obstore is not installed.
    """
    bucket, prefix = _parse_url(url)
    known = _known_options(options)
    flags: dict[str, bool] = {name: _flag(name, known[name]) for name in _FLAGS if name in known}
    allow_http = flags.get("allow_http", os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true")
    config = {name: value for name, value in known.items() if name in _CONFIG}
    _check_endpoints(config, allow_http=allow_http)
    _check_keys(config)
    if "endpoint" in config and _variable(_ENDPOINT_VARIABLES[0]):
        config["aws_endpoint_url_s3"] = config["endpoint"]  # the client prefers this variable, but an option must win
    client: dict[str, str | bool] = {name: value for name, value in known.items() if name in _CLIENT}
    client.update({**flags, "allow_http": allow_http})
    if "obstore" not in sys.modules and importlib.util.find_spec("obstore") is None:
        raise MissingExtraError("obstore", "s3", "the S3 tier")
    secrets = [known.get(name) for name in _SECRET_OPTIONS] + [_variable(name) for name in _SECRET_VARIABLES]
    return Settings(
        bucket=bucket,
        root=f"{prefix}/v1" if prefix else "v1",
        connect_s=max(connect_timeout, MIN_CONNECT_S),
        read_s=max(socket_timeout, MIN_READ_S),
        config=config,
        client=client,
        ca_bundle=known.get(_CA_BUNDLE) or _variable("AWS_CA_BUNDLE"),
        secrets=tuple(secret for secret in secrets if secret),
    )


def open_clients(settings: Settings) -> Clients:
    """Builds the clients; reads certificates, connects to nothing. Blocks for some 20 ms.

    Raises:
        StoreError: the client refuses a setting, or the file of certificates can't be read.
    """
    try:
        obstore: Any = importlib.import_module("obstore")
        build: Any = importlib.import_module("obstore.store").S3Store
    except ImportError as error:
        raise StoreError(f"the S3 tier can't load obstore: {error}; install it anew") from None
    options: dict[str, Any] = dict(settings.client)
    if settings.ca_bundle is not None:
        try:
            bundle = Path(settings.ca_bundle).read_text("ascii", "replace")
        except OSError as error:
            raise StoreError(f"the certificates in {settings.ca_bundle!r} can't be read: {error.strerror}") from None
        options["root_certificate"] = "\n".join([str(options.get("root_certificate", "")), bundle])
    options["connect_timeout"] = timedelta(seconds=settings.connect_s)
    first_wait = timedelta(seconds=random.uniform(0.03, 0.1))  # noqa: S311 - no secret
    retry: dict[str, Any] = {
        "max_retries": _MAX_RETRIES,
        # From the first attempt to the last retry. The client's first wait is `init_backoff`, each later one is random
        # between that and twice the one before; so the first is made to differ between processes here.
        "retry_timeout": timedelta(seconds=settings.connect_s + 2 * settings.read_s),
        "backoff": {"init_backoff": first_wait, "max_backoff": timedelta(seconds=1), "base": 2},
    }
    reading: dict[str, Any] = {
        "read_timeout": timedelta(seconds=settings.read_s),
        "timeout": timedelta(seconds=_WHOLE_READ_S),
    }
    writing: dict[str, Any] = {"timeout": timedelta(seconds=_WRITE_S)}
    try:
        read, write = (
            build(settings.bucket, config=dict(settings.config), client_options=options | times, retry_config=retry)
            for times in (reading, writing)
        )
    except Exception as error:  # noqa: BLE001 - obstore raises its own and built-in errors
        raise StoreError(f"the S3 client refuses its settings: {sentence(error, settings)}") from None
    return Clients(obstore, read, write)


def sentence(error: BaseException, settings: Settings) -> str:
    """What an error of the client says, in one line, without what a server echoed: of S3's own answer only code and
    message are kept, since some echo a session token, and known secrets are struck out wherever they are."""
    text = str(error).partition("\n\nDebug source")[0]
    head, mark, body = text.partition("<")
    if mark:
        said = [match[1] for match in (_ERROR_CODE.search(body), _ERROR_TEXT.search(body)) if match]
        text = f"{', '.join(said)} ({head.rstrip(' :')})" if said else head
    text = re.sub(r"://[^/@\s]*@", "://", _NOISE.sub("", text))
    for secret in settings.secrets:
        text = text.replace(secret, "***")
    text = " ".join(text.split())
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."


def _parse_url(url: str) -> tuple[str, str]:
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError("the URL of the S3 store is malformed; give s3://bucket/prefix") from None
    if parts.scheme != "s3":
        raise ConfigError(f"the URL of the S3 store has the scheme {parts.scheme!r}; give s3://bucket/prefix")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(
            "the URL of the S3 store holds more than s3://bucket/prefix; keys and other settings go into the options "
            "or the AWS_... variables"
        )
    if not _BUCKET.fullmatch(parts.netloc):
        raise ConfigError(
            f"the URL of the S3 store names the bucket {parts.netloc!r}; a bucket has 3 to 63 letters, digits, dots "
            "and dashes"
        )
    prefix = parts.path.strip("/")
    if (prefix and not all(map(_PREFIX_PART.fullmatch, prefix.split("/")))) or len(prefix) > 300:
        raise ConfigError(
            f"the URL of the S3 store has the prefix {prefix[:80]!r}; use letters, digits and !_.'()@=+,- between the "
            "slashes, 300 characters at most"
        )
    return parts.netloc, prefix


def _known_options(options: Mapping[str, str]) -> dict[str, str]:
    valid = sorted([*_CONFIG, *_CLIENT, _CA_BUNDLE])
    known: dict[str, str] = {}
    for given, value in options.items():
        name = str(given).lower().removeprefix("aws_")
        name = _ALIASES.get(name, name)
        if name not in valid:
            raise ConfigError(f"the S3 store has no option {given!r}; {unknown_name(given, valid)}")
        if name in known:
            raise ConfigError(f"the S3 option {name!r} is given twice, under two names; leave one out")
        if not isinstance(value, str | bool):
            raise ConfigError(f"the S3 option {given!r} is of type {type(value).__name__}; give a text")
        known[name] = str(value).lower() if isinstance(value, bool) else value
    return known


def _flag(name: str, value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ConfigError(f"the S3 option {name!r} is {value!r}; give 'true' or 'false'")
    return value.lower() == "true"


def _check_keys(config: Mapping[str, str]) -> None:
    for one, other in (("access_key_id", "secret_access_key"), ("secret_access_key", "access_key_id")):
        if one in config and other not in config and not _variable(f"AWS_{other.upper()}"):
            raise ConfigError(f"the S3 option {one!r} is given without {other!r}; give both, or none")


def _check_endpoints(config: Mapping[str, str], *, allow_http: bool) -> None:
    if "endpoint" in config:
        given = {"the S3 option 'endpoint'": config["endpoint"]}
    else:
        given = {f"the variable {name}": _variable(name) or "" for name in _ENDPOINT_VARIABLES if _variable(name)}
    for place, endpoint in given.items():
        try:
            parts = urlsplit(endpoint)
        except ValueError:
            parts = SplitResult("", "", "", "", "")
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise ConfigError(f"{place} is no endpoint; give https://host or https://host:port")
        if parts.scheme == "http" and not allow_http:
            raise ConfigError(
                f"{place} is {endpoint!r}: plain http, so keys and units would cross the network unencrypted; use "
                "https, or set the S3 option allow_http to 'true'"
            )


def _variable(name: str) -> str | None:
    return os.environ.get(name) or None
