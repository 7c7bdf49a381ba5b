"""The KV cache gets what a profile run left, and a sentence says how much."""

from __future__ import annotations

import pytest
import torch

from kitelib.backends.torch_engine import sizing
from kitelib.backends.torch_engine.sizing import kv_blocks, most_outputs
from kitelib.errors import BackendError

_MIB = 2**20
_CUDA = torch.device("cuda:0")
_CPU = torch.device("cpu")


class _Memory:
    """A device of 10,000 MiB of which other processes hold 1,000; figures in MiB."""

    def __init__(self, weights: int) -> None:
        self.live = weights
        self.outside = 0
        self.cached = 300
        self.highest = weights + 5000
        self.others = 1000

    def use(self, amount: int) -> None:
        self.live += amount
        self.highest = max(self.highest, self.live)

    def free_and_total(self) -> tuple[int, int]:
        return (10_000 - self.others - self.live - self.cached - self.outside) * _MIB, 10_000 * _MIB

    def reserved(self) -> int:
        return (self.live + self.cached) * _MIB

    def in_use(self) -> int:
        return self.live * _MIB

    def peak(self) -> int:
        return self.highest * _MIB

    def reset(self) -> None:
        self.cached = 0
        self.highest = self.live


def _profile(memory: _Memory, peak: int, kept: int = 0, outside: int = 0) -> None:
    memory.use(peak)
    memory.use(kept - peak)
    memory.cached = peak
    memory.outside += outside


def test_the_peak_of_a_step_and_the_reserve_are_left_free() -> None:
    """9,000 less 4,000 of weights: 90 % of 5,000, less 600 for a step and 100 in reserve, in blocks of 2."""
    memory = _Memory(weights=4000)
    budget = kv_blocks(_CUDA, 2 * _MIB, lambda: _profile(memory, 600), reserve=100 * _MIB, memory=memory)
    assert budget.blocks == (4500 - 600 - 100) // 2
    assert budget.bytes == budget.blocks * 2 * _MIB
    assert budget.available_bytes == 5000 * _MIB
    assert budget.activation_bytes == 600 * _MIB
    assert "1900 KV blocks of together 3,800 MiB, of 5,000 MiB" in budget.sentence()


def test_what_the_run_leaves_behind_is_not_counted_twice() -> None:
    """Tensors it keeps are part of its peak; code and workspaces outside of the allocator are gone besides."""
    memory = _Memory(weights=4000)
    budget = kv_blocks(
        _CUDA, _MIB, lambda: _profile(memory, 600, kept=200, outside=50), share=1.0, reserve=0, memory=memory
    )
    assert budget.blocks == 5000 - 50 - 600


def test_memory_that_others_give_back_during_the_run_is_not_taken() -> None:
    """They may want it again."""
    memory = _Memory(weights=4000)

    def profile() -> None:
        memory.others = 0

    assert kv_blocks(_CUDA, _MIB, profile, share=1.0, reserve=0, memory=memory).blocks == 5000


def test_no_more_blocks_than_are_worth_having() -> None:
    """The rest of the memory stays free."""
    memory = _Memory(weights=4000)
    assert kv_blocks(_CUDA, _MIB, lambda: None, most=12, memory=memory).blocks == 12


def test_the_cpu_shares_what_the_process_may_still_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read after the profile run, so that what it left counts."""
    available = [9000]
    monkeypatch.setattr(sizing, "available_memory_bytes", lambda: available[0] * _MIB)

    def profile() -> None:
        available[0] = 4000

    budget = kv_blocks(_CPU, 3 * _MIB, profile, share=0.5, reserve=500 * _MIB)
    assert budget.blocks == 500
    assert budget.activation_bytes == 0


@pytest.mark.parametrize("device", [_CPU, _CUDA])
def test_too_little_memory_says_what_takes_it(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the figures that a person needs to decide what to change."""
    monkeypatch.setattr(sizing, "available_memory_bytes", lambda: 700 * _MIB)
    memory = _Memory(weights=8300)
    with pytest.raises(BackendError, match=r"of 900\.0 MiB fits on .*700 MiB are available.*512 MiB stay in reserve"):
        kv_blocks(device, 900 * _MIB, lambda: None, reserve=512 * _MIB, memory=memory)


def test_logits_of_a_step_are_bounded_in_bytes() -> None:
    """128 MiB of float32, or one row for each sequence."""
    assert [most_outputs(vocabulary, 16) for vocabulary in (512, 49_152, 131_072, 262_144)] == [65_536, 682, 256, 128]
    assert most_outputs(262_144, 200) == 200
