"""Fixtures that hand out model files and change how long is waited; enabled by ``pytest_plugins = ["tests.support.fixtures"]``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.gguf_files import write_lora, write_model
from tests.support.vocabulary import smollm2_gguf

__all__ = ["patient", "smollm2", "smollm2_lora", "tiny_model"]


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


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests wait for the tiers even on a machine that is busy with other things: what is tested is what they
    find, not how long they would wait."""
    monkeypatch.setattr("kitelib.yoco.planner.patience", lambda compute_s, measured: 60.0)
