"""KITE: asyncio LLM inference that never computes the same thing twice.

Every name below is loaded on first use, so ``import kitelib`` costs milliseconds and loads no model library::

    from kitelib import KiteEngine

    async with KiteEngine.open("model.gguf") as engine:
        gen = await engine.generate("Hello", max_tokens=32)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kitelib.config import AdapterConfig, KiteConfig, PoolConfig, ReusePolicy, SamplingParams
    from kitelib.engine.bundle_prompts import BundlePrompt
    from kitelib.engine.conversation import Conversation
    from kitelib.engine.engine import KiteEngine
    from kitelib.engine.passages import Passage
    from kitelib.engine.results import Choice, Chunk, Divergence, DraftCount, Generation, ReuseReport, Timing, Usage
    from kitelib.errors import (
        BackendError,
        BackendStepError,
        BundleError,
        BundleMismatchError,
        BundleNotFoundError,
        BundleSignatureError,
        ConfigError,
        DeadlineExceededError,
        EmptyPromptError,
        EngineClosedError,
        EngineOverloadedError,
        FormatError,
        InvalidRequestError,
        InvalidSamplingError,
        KiteError,
        MissingExtraError,
        ModelFormatError,
        ModelNotFoundError,
        PromptTooLongError,
        RequestError,
        StoreError,
        UnknownAdapterError,
        UnsupportedOptionError,
    )
    from kitelib.upcycle.bundle import Bundle

__version__ = "0.1.0"

__all__ = [
    "AdapterConfig",
    "BackendError",
    "BackendStepError",
    "Bundle",
    "BundleError",
    "BundleMismatchError",
    "BundleNotFoundError",
    "BundlePrompt",
    "BundleSignatureError",
    "Choice",
    "Chunk",
    "ConfigError",
    "Conversation",
    "DeadlineExceededError",
    "Divergence",
    "DraftCount",
    "EmptyPromptError",
    "EngineClosedError",
    "EngineOverloadedError",
    "FormatError",
    "Generation",
    "InvalidRequestError",
    "InvalidSamplingError",
    "KiteConfig",
    "KiteEngine",
    "KiteError",
    "MissingExtraError",
    "ModelFormatError",
    "ModelNotFoundError",
    "Passage",
    "PoolConfig",
    "PromptTooLongError",
    "RequestError",
    "ReusePolicy",
    "ReuseReport",
    "SamplingParams",
    "StoreError",
    "Timing",
    "UnknownAdapterError",
    "UnsupportedOptionError",
    "Usage",
    "__version__",
]

# Where the names come from; every other name of __all__ is an error class.
_MODULES = {
    "kitelib.config": ("AdapterConfig", "KiteConfig", "PoolConfig", "ReusePolicy", "SamplingParams"),
    "kitelib.engine.bundle_prompts": ("BundlePrompt",),
    "kitelib.engine.conversation": ("Conversation",),
    "kitelib.engine.engine": ("KiteEngine",),
    "kitelib.engine.passages": ("Passage",),
    "kitelib.engine.results": (
        "Choice",
        "Chunk",
        "Divergence",
        "DraftCount",
        "Generation",
        "ReuseReport",
        "Timing",
        "Usage",
    ),
    "kitelib.upcycle.bundle": ("Bundle",),
}
_ORIGIN = {name: module for module, names in _MODULES.items() for name in names}

if not TYPE_CHECKING:  # type checkers read the imports above, and report a name that does not exist

    def __getattr__(name: str) -> Any:
        """Loads a public name on first use (PEP 562)."""
        if name not in __all__:
            raise AttributeError(f"module 'kitelib' has no attribute {name!r}")
        value = getattr(importlib.import_module(_ORIGIN.get(name, "kitelib.errors")), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
