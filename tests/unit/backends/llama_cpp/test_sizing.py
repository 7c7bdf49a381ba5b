"""The context and the KV cache that a model gets where nobody says, from the memory the device has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kitelib.backends.llama_cpp import backend as module
from kitelib.backends.llama_cpp.backend import LlamaCppBackend, LlamaCppOptions
from kitelib.errors import BackendError

MIB = 2**20
TOKEN_BYTES = 2 * 30 * 192 * 2  # SmolLM2-135M: K and V, 30 layers, 3 heads of 64 values of 2 bytes
WEIGHTS = 92 * MIB


@pytest.fixture
def sized(monkeypatch: pytest.MonkeyPatch, smollm2: Path, tmp_path: Path) -> Any:
    """`sized(available_mib, **options)`: context and capacity in tokens, and the notes, of a model on such a device."""

    def load(available_mib: int, **options: Any) -> tuple[int, int, tuple[str, ...]]:
        monkeypatch.setattr(module, "available_memory_bytes", lambda: available_mib * MIB)
        chosen = {"threads": 1, "numerics": "standard", "cache_dir": tmp_path, **options}
        backend = LlamaCppBackend.load(smollm2, LlamaCppOptions(**chosen))
        try:
            return backend.info.context_tokens, backend.info.capacity_tokens, backend.info.notes
        finally:
            backend.close()

    return load


def test_with_memory_to_spare_it_is_4096_tokens_four_times(sized: Any) -> None:
    context, capacity, notes = sized(4096)
    assert context == 4096
    assert 4 * 4096 <= capacity <= 4 * 4096 + 512
    assert not any("n_ctx" in note for note in notes)


@pytest.mark.parametrize("available_mib", [150, 200, 300, 400])
def test_on_a_small_device_the_kv_takes_a_quarter_of_what_the_weights_leave(sized: Any, available_mib: int) -> None:
    context, capacity, notes = sized(available_mib)
    room = max(available_mib * MIB - WEIGHTS, available_mib * MIB // 2)
    assert 512 < context < 4096
    assert context % 256 == 0
    assert context * TOKEN_BYTES <= 1.01 * room / 4 < (context + 256) * TOKEN_BYTES * 1.02
    assert context <= capacity <= context + 512
    assert any(f"n_ctx is {context} and not 4096" in note for note in notes)


def test_it_never_gets_less_than_512_tokens(sized: Any) -> None:
    assert sized(30)[0] == 512


def test_not_even_512_tokens_fit_is_an_error_with_the_remedy(sized: Any) -> None:
    with pytest.raises(BackendError, match="smaller n_ctx"):
        sized(8)


def test_a_context_that_was_asked_for_is_what_it_is(sized: Any) -> None:
    assert sized(150, n_ctx=3000)[0] == 3000
    with pytest.raises(BackendError, match="n_ctx=8000"):
        sized(150, n_ctx=8000)


def test_a_cache_that_was_asked_for_holds_the_default_context(sized: Any) -> None:
    context, capacity, _ = sized(400, kv_tokens=4096)
    assert context <= 4096 <= capacity
