"""How many KV blocks fit: on CUDA from what a profile run left free, on the CPU from what the process may still use; and
how many rows of logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from kitelib.errors import BackendError
from kitelib.runtime.limits import available_memory_bytes

if TYPE_CHECKING:
    import torch

__all__ = ["CudaMemory", "DeviceMemory", "KvBudget", "kv_blocks", "most_outputs"]

_RESERVE: Final = 512 * 2**20  # graphs, library handles, and what other processes take meanwhile
_LOGITS_BYTES: Final = 128 * 2**20
"""Of the logits of one step in float32, unless so many sequences run at once that these alone have more. Up to 256 rows of
128 Ki tokens."""


class DeviceMemory(Protocol):
    """What sizing asks of an accelerator's memory; all figures in bytes."""

    def free_and_total(self) -> tuple[int, int]:
        """What the whole device has free and has, other processes counted."""
        ...

    def reserved(self) -> int:
        """What this process's allocator holds, in use or not."""
        ...

    def in_use(self) -> int:
        """What live tensors of this process take."""
        ...

    def peak(self) -> int:
        """The most that live tensors took since `reset`."""
        ...

    def reset(self) -> None:
        """Waits for the device, gives cached memory back to it, and starts a new peak."""
        ...


class CudaMemory:
    """`DeviceMemory` of one CUDA device, as PyTorch's allocator sees it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_and_total(self) -> tuple[int, int]:
        import torch

        free, total = torch.cuda.mem_get_info(self._device)
        return int(free), int(total)

    def reserved(self) -> int:
        import torch

        return int(torch.cuda.memory_reserved(self._device))

    def in_use(self) -> int:
        import torch

        return int(torch.cuda.memory_allocated(self._device))

    def peak(self) -> int:
        import torch

        return int(torch.cuda.max_memory_allocated(self._device))

    def reset(self) -> None:
        import torch

        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)


@dataclasses.dataclass(frozen=True, slots=True)
class KvBudget:
    """Result of sizing.

    Attributes:
        blocks: how many blocks fit, at least 1.
        bytes: what they take.
        available_bytes: what there was to share when nothing but the weights was held.
        activation_bytes: the most that the profile run took beside what was held before it; 0 where not measured.
    """

    blocks: int
    bytes: int
    available_bytes: int
    activation_bytes: int

    def sentence(self) -> str:
        """For people: one sentence for `ModelInfo.notes`."""
        return (
            f"{self.blocks} KV blocks of together {self.bytes / 2**20:,.0f} MiB, of "
            f"{self.available_bytes / 2**20:,.0f} MiB that were available; a step takes up to "
            f"{self.activation_bytes / 2**20:,.0f} MiB beside them"
        )


def most_outputs(vocab_size: int, sequences: int) -> int:
    """Rows of a step that logits may be wanted of, drafts included: one of every sequence at least.

    Args:
        vocab_size: length of a row.
        sequences: most sequences in a step.
    """
    return max(sequences, _LOGITS_BYTES // (4 * vocab_size))


def kv_blocks(
    device: torch.device,
    block_bytes: int,
    profile: Callable[[], None],
    *,
    share: float = 0.9,
    reserve: int | None = None,
    most: int | None = None,
    memory: DeviceMemory | None = None,
) -> KvBudget:
    """How many blocks the KV cache may have.

    On CUDA, `share` of what is free once the weights are loaded goes to the steps' largest intermediate results, as
    measured by `profile`, to `reserve`, and the rest to blocks. On the CPU, where nothing tells the peak of a step,
    `profile` still runs (what it leaves allocated counts) and `share` is what the caller dares to take.

    Args:
        device: where the cache will be.
        block_bytes: bytes of one block, all layers.
        profile: runs the largest step there can be, against a cache just large enough for it, which it frees.
        share: fraction of the available memory to use at all, above 0 and at most 1.
        reserve: bytes kept free beside; None means 512 MiB.
        most: blocks worth having, e.g. what all sequences together may hold; None means no bound.
        memory: counters of the device; None means those of `device`. Only looked at where it isn't the CPU.

    Raises:
        BackendError: not even one block fits.
    """
    assert block_bytes > 0
    assert 0 < share <= 1
    reserve = _RESERVE if reserve is None else reserve
    if device.type == "cpu":
        profile()
        available, activations = available_memory_bytes(), 0
    else:
        available, activations = _profiled(memory or CudaMemory(device), profile)
    room = int(available * share) - activations - reserve
    blocks = room // block_bytes
    if most is not None:
        blocks = min(blocks, most)
    if blocks < 1:
        raise BackendError(
            f"no KV block of {block_bytes / 2**20:,.1f} MiB fits on {device}: {available / 2**20:,.0f} MiB are "
            f"available beside the weights, of which a share of {share} may be used, a step needs "
            f"{activations / 2**20:,.0f} MiB and {reserve / 2**20:,.0f} MiB stay in reserve. Free memory of the device, "
            "allow fewer tokens per step, or take a smaller model."
        )
    return KvBudget(blocks, blocks * block_bytes, available, activations)


def _profiled(memory: DeviceMemory, profile: Callable[[], None]) -> tuple[int, int]:
    """Bytes that were available to this process before `profile` ran, and the most it took at once."""
    memory.reset()
    before = memory.in_use()
    free_before, _ = memory.free_and_total()
    profile()
    activations = max(0, memory.peak() - before)
    memory.reset()
    free_after, _ = memory.free_and_total()
    kept = max(0, memory.in_use() - before)
    # What the run left behind outside the allocator (kernels' code, workspaces of libraries) is gone for good; free
    # memory that another process gave back meanwhile may be taken again, so the smaller figure counts.
    return min(free_before, free_after + kept), activations
