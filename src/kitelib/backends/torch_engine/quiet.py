"""Silence while transformers works: its progress bars and reports are for notebooks, not for a library's caller."""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["quiet_transformers"]

_lock = threading.Lock()
_users = 0
_undo: list[Callable[[], None]] = []


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turns transformers' progress bars and warnings off; the last one out puts back what the first one found."""
    global _users  # noqa: PLW0603 - what it changes is global in transformers
    with _lock:
        if _users == 0:
            _silence()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            while _users == 0 and _undo:
                _undo.pop()()


def _silence() -> None:
    from transformers.utils import logging as switches

    level = switches.get_verbosity()
    _undo.append(lambda: switches.set_verbosity(level))
    switches.set_verbosity(logging.ERROR)
    # The public switch of the bars would also change huggingface_hub's, and warn where the environment sets those.
    _replace(switches, "_tqdm_active", False)
    with contextlib.suppress(ImportError):  # an own bar, without a switch
        _replace(importlib.import_module("transformers.modeling_gguf_pytorch_utils"), "tqdm", _no_bar)


def _replace(module: Any, name: str, value: Any) -> None:
    if hasattr(module, name):
        before = getattr(module, name)
        _undo.append(lambda: setattr(module, name, before))
        setattr(module, name, value)


def _no_bar(items: Any, *_: Any, **__: Any) -> Any:
    return items
