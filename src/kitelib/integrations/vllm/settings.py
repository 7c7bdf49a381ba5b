"""What the user says about the pool, in vLLM's ``kv_connector_extra_config``."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Final

from kitelib.config import KiteConfig, PoolConfig
from kitelib.config_file import check_seconds, section, shown
from kitelib.errors import ConfigError

__all__ = ["ConnectorSettings", "read_settings"]

_SECRETS: Final = {"hmac_key_file": "hmac_key", "namespace_secret_file": "namespace_secret"}
_PLACE: Final = "kv_connector_extra_config"


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """Options of the connector.

    Attributes:
        pool: the tiers: the fields of `PoolConfig`, but for its two secrets.
        config: YAML file with the tiers, instead of `pool`; see `KiteConfig`.
        hmac_key_file, namespace_secret_file: files that hold `PoolConfig.hmac_key` and `namespace_secret`; default none.
        patience_seconds: least seconds that a request may wait until the tiers have said what they have; default 0:
            as long as measurements say that it pays. The engine serves others meanwhile.
        allow_untested_version: run on a release of vLLM that nobody has tried; default False.
    """

    pool: PoolConfig = dataclasses.field(default_factory=PoolConfig)
    config: str | None = None
    hmac_key_file: str | None = None
    namespace_secret_file: str | None = None
    patience_seconds: float = 0.0
    allow_untested_version: bool = False

    def __post_init__(self) -> None:
        if self.patience_seconds != 0:
            check_seconds("patience_seconds", self.patience_seconds)
        if not isinstance(self.allow_untested_version, bool):
            raise ConfigError(f"allow_untested_version is {shown(self.allow_untested_version)}; give true or false")

    def to_pool_config(self) -> PoolConfig:
        """The tiers, with the secrets from their files.

        Raises:
            ConfigError: a file is not there, or holds nothing.
        """
        pool = self.pool if self.config is None else KiteConfig.from_yaml(self.config).to_pool_config()
        return dataclasses.replace(
            pool,
            hmac_key=_read_secret("hmac_key_file", self.hmac_key_file),
            namespace_secret=_read_secret("namespace_secret_file", self.namespace_secret_file),
        )


def read_settings(extra: Mapping[str, Any]) -> ConnectorSettings:
    """The options from vLLM's ``kv_connector_extra_config``.

    Raises:
        ConfigError: a key or value is wrong; the message names its place and, for a key, the nearest there is.
    """
    if "pool" in extra and "config" in extra:
        raise ConfigError(f'{_PLACE} has both "pool" and "config"; give one of them')
    values = dict(extra)
    tiers = values.get("pool")
    if isinstance(tiers, Mapping):  # the files may stand beside the tiers they belong to
        values["pool"] = {key: value for key, value in tiers.items() if key not in _SECRETS}
        values.update({key: value for key, value in tiers.items() if key in _SECRETS})
    return section(ConnectorSettings, values, _PLACE, {"pool": _pool})


def _pool(value: Any, place: str) -> PoolConfig:
    if isinstance(value, Mapping):
        for name in _SECRETS.values():
            if name in value:
                raise ConfigError(f"{place}.{name} would put a secret into a configuration; give {place}.{name}_file")
    return section(PoolConfig, value, place)


def _read_secret(name: str, path: Any) -> bytes | None:
    if path is None:
        return None
    try:
        secret = pathlib.Path(os.fspath(path)).read_bytes().strip()
    except (OSError, TypeError) as error:
        raise ConfigError(f"{_PLACE}.{name} is {shown(path)}, which can't be read: {error}") from error
    if not secret:
        raise ConfigError(f"{_PLACE}.{name} is {shown(path)}, an empty file; put random bytes into it")
    return secret
