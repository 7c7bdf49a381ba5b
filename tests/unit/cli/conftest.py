"""The command `kite`, run as a person runs it: in a process of its own."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kitelib.cli import main as cli
from kitelib.engine.results import Choice, Generation, ReuseReport, Timing, Usage

Kite = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def kite() -> Kite:
    """``kite(*arguments, stdin="")``: runs the command and returns the finished process."""

    def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "kitelib.cli.main", *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=150,
            check=False,
        )

    return run


@pytest.fixture
def kite_here(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """``kite_here("lint", ...)``: the command in this process; gives exit code, standard output and error."""

    def command(*arguments: Any) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = cli.main([*map(str, arguments)])
        except SystemExit as error:  # argparse
            code = int(error.code or 0)
        return code, *capsys.readouterr()

    return command


@pytest.fixture
def kite_pool(
    kite_here: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """``kite_pool("stats", ...)``: as `kite_here`, with an empty folder as the user's cache."""
    monkeypatch.delenv("KITE_REDIS_URL", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return functools.partial(kite_here, "pool")


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for digests and self-test results of models, kept for the session."""
    return tmp_path_factory.mktemp("kite-model-cache")


@pytest.fixture
def kite_bundle(
    kite_here: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, model_cache: Path
) -> Callable[..., tuple[int, str, str]]:
    """``kite_bundle("build", ...)``: as `kite_here`, with `model_cache` as the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(model_cache))
    return functools.partial(kite_here, "bundle")


@pytest.fixture(scope="session")
def finished() -> Callable[..., Generation]:
    """Makes a Generation with the given figures."""

    def make(
        *,
        prompt: int = 650,
        cached: int = 0,
        completion: int = 3,
        ttft_s: float = 0.5,
        total_s: float = 1.5,
        tokens: tuple[int, ...] = (1, 2, 3),
        **reuse: Any,
    ) -> Generation:
        report: dict[str, Any] = {
            "exactness": "bitwise",
            "tiers": {},
            "computed_tokens": prompt - cached,
            "zero_prefill": False,
            "divergence": None,
            "note": "",
        }
        return Generation(
            text="text",
            token_ids=list(tokens),
            finish_reason="stop",
            logprobs=None,
            usage=Usage(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion),
            reuse=ReuseReport(**{**report, **reuse}),
            timing=Timing(ttft_s=ttft_s, queue_s=0.0, total_s=total_s),
            choices=[Choice("text", list(tokens), "stop", None)],
            prompt_token_ids=[],
        )

    return make
