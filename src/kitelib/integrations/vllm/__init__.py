"""vLLM's KV cache in KITE's pool: give vLLM ``KiteConnector`` and this module's name in its ``kv_transfer_config``.

Importing this module imports nothing of vLLM; `KiteConnector` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kitelib.errors import MissingExtraError

if TYPE_CHECKING:
    from kitelib.integrations.vllm.connector import KiteConnector

__all__ = ["KiteConnector"]


def __getattr__(name: str) -> Any:
    if name != "KiteConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import vllm  # noqa: F401 - only whether it is there
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise MissingExtraError("vllm", "vllm", "KiteConnector") from error
    from kitelib.integrations.vllm.connector import KiteConnector

    return KiteConnector
