"""Which releases of vLLM the connector runs on, and what of their interfaces it needs.

The interface that vLLM offers to connectors changes from release to release. What the connector needs of it is looked
for at the start, and a release that lacks it, or that nobody has tried, is refused by name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any, Final

from kitelib.errors import ConfigError, UnsupportedOptionError

__all__ = ["OLDEST", "NEWEST", "check_config", "check_interface", "engine_release"]

OLDEST: Final = (0, 27)
"""Oldest release that the connector is tested with."""
NEWEST: Final = (0, 32)
"""Newest release that the connector is tested with."""

_NEEDED: Final = {
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
    "build_connector_meta": ("scheduler_output",),
    "update_connector_output": ("connector_output",),
    "request_finished": ("request", "block_ids"),
    "register_kv_caches": ("kv_caches",),
    "start_load_kv": ("forward_context",),
    "wait_for_save": (),
    "get_finished": ("finished_req_ids",),
    "get_block_ids_with_load_errors": (),
    "get_handshake_metadata": (),
    "set_xfer_handshake_metadata": ("metadata",),
    "reset_cache": (),
}


def engine_release() -> tuple[str, tuple[int, int]]:
    """The version of vLLM as text, and its first two numbers."""
    import vllm

    version = str(vllm.__version__)
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return version, (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def check_interface(base: type, *, allow_untested: bool = False) -> None:
    """Compares vLLM's class of connectors with what is needed of it.

    Raises:
        UnsupportedOptionError: the release is too old or too new, or lacks something; the message says what.
    """
    version, release = engine_release()
    known = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    if not allow_untested and not OLDEST <= release <= NEWEST:
        raise UnsupportedOptionError(
            f"this vLLM is {version}, and KiteConnector is tested with {known}; install one of those, or set "
            '"allow_untested_version": true in kv_connector_extra_config to try it'
        )
    lacking = [name for name, parameters in _NEEDED.items() if not _takes(getattr(base, name, None), parameters)]
    if lacking:
        raise UnsupportedOptionError(
            f"this vLLM ({version}) has no {', '.join(lacking)} as KiteConnector needs it; install {known}"
        )


def _takes(method: Any, parameters: Iterable[str]) -> bool:
    if method is None:
        return False
    names = list(inspect.signature(method).parameters)[1:]
    return names[: len(list(parameters))] == list(parameters)


def check_config(vllm_config: Any) -> None:
    """Refuses what would make a failed load fail its request, or whose KV the connector does not understand.

    Raises:
        ConfigError: an option has to be changed; the message names it and the value it needs.
        UnsupportedOptionError: the connector does not have it.
    """
    transfer = vllm_config.kv_transfer_config
    if getattr(transfer, "kv_load_failure_policy", "recompute") != "recompute":
        raise ConfigError(
            f'kv_load_failure_policy is {transfer.kv_load_failure_policy!r}; set it to "recompute" in the '
            "kv_transfer_config, so that a tier that fails costs time and not requests"
        )
    if transfer.kv_role != "kv_both":
        raise ConfigError(f'kv_role is {transfer.kv_role!r}; set it to "kv_both": KITE both reads and writes')
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            raise UnsupportedOptionError(
                f"{name} is {getattr(parallel, name)}: blocks whose tokens are spread over ranks can't be stored; set "
                "it to 1"
            )
    dtype = str(vllm_config.cache_config.cache_dtype)
    if dtype not in ("auto", "bfloat16", "float16"):
        raise UnsupportedOptionError(
            f"kv_cache_dtype is {dtype!r}: quantized KV depends on scales that the pool does not know; use 'auto'"
        )
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is not None and getattr(speculative, "method", None) != "ngram":
        raise UnsupportedOptionError(
            f"the speculative method {getattr(speculative, 'method', None)!r} keeps KV of a second model in the cache; "
            "use 'ngram', or none"
        )
