"""Fixtures that hand out model files and change how long is waited; enabled by ``pytest_plugins = ["tests.support.fixtures"]``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import hf_folders
from tests.support.gguf_files import write_lora, write_model
from tests.support.vocabulary import smollm2_gguf

__all__ = ["hf_model", "patient", "smollm2", "smollm2_hf", "smollm2_lora", "tiny_model"]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The SmolLM2-135M-Instruct model file. Read only: it belongs to an installed package."""
    return smollm2_gguf()


@pytest.fixture(scope="session")
def smollm2_lora(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    """A random LoRA adapter for `smollm2` that changes its logits visibly."""
    return write_lora(tmp_path_factory.mktemp("lora") / "smollm2.gguf", smollm2, seed=1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_model(architecture, seed=1)``: a small random model file, written once per session. Read only."""
    folder = tmp_path_factory.mktemp("tiny")

    def path_of(architecture: str, seed: int = 1) -> Path:
        path = folder / f"{architecture}-{seed}.gguf"
        return path if path.exists() else write_model(path, architecture, seed=seed)

    return path_of


@pytest.fixture(scope="session")
def hf_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``hf_model(architecture, seed=1, **settings)``: a small random model folder, written once per session. Read only."""
    folder = tmp_path_factory.mktemp("hf")

    def path_of(architecture: str, seed: int = 1, **settings: Any) -> Path:
        marks = "".join(f"-{key}={value}" for key, value in sorted(settings.items()) if value is not None)
        path = folder / f"{architecture}-{seed}{marks}".replace("/", "_")
        return path if path.exists() else hf_folders.write_model(path, architecture, seed=seed, **settings)

    return path_of


@pytest.fixture(scope="session")
def smollm2_hf(pytestconfig: pytest.Config, smollm2: Path) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder in bfloat16, 270 MB. Made once in a few seconds, then kept in
    the cache of pytest. Read only."""
    cache = pytestconfig.cache
    assert cache is not None
    path = cache.mkdir("hf") / f"smollm2-{smollm2.stat().st_size}"
    if not path.exists():
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        hf_folders.smollm2_folder(partial)
        try:
            partial.rename(path)
        except OSError:  # another run was faster
            shutil.rmtree(partial)
    return path


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests wait for the tiers even on a machine that is busy with other things: what is tested is what they
    find, not how long they would wait."""
    monkeypatch.setattr("kitelib.yoco.planner.patience", lambda compute_s, measured: 60.0)
