"""What one forward pass computes, as tensors: which rows belong to which sequence, and where their KV lives."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from kitelib.backends.torch_engine.kernels.contract import AttentionKernel
    from kitelib.backends.torch_engine.pages import PagedCache

__all__ = ["StepPlan", "StepState", "current_step", "use_step"]


@dataclasses.dataclass(eq=False, slots=True)
class StepPlan:
    """Rows of one forward pass. Rows of a sequence are neighbours, sequences follow each other, padding comes last.

    All tensors are on the model's device. In a captured CUDA graph they are static buffers; rows and sequences beyond
    the real ones are padding.

    Attributes:
        num_rows: rows of the forward pass, padding included.
        num_sequences: sequences, those of padding excluded.
        max_rows: most rows of one sequence in this pass (1 in a decode step).
        max_context: tokens of the longest sequence, this pass included.
        row_starts: int32 (num_sequences + 1,): rows of sequence i are row_starts[i] .. row_starts[i + 1] - 1.
        contexts: int32 (num_sequences,): tokens of each sequence, this pass included; its last row has position
            contexts[i] - 1.
        tables: int32 (num_sequences, width): block numbers of each sequence in order; beyond its blocks anything.
        slots: int64 (num_rows,): block number * block tokens + offset where the row's KV goes; -1 for padding.
        positions: int64 (num_rows,): position of each row in its sequence; 0 for padding.
        history: int64 (sum of contexts,): slots of all tokens of all sequences in order; only for latent attention.
        num_real: rows that are no padding; only for latent attention.
        scratch: what a kernel keeps from layer to layer of this pass (pointers, split sizes); None at its start.
    """

    num_rows: int
    num_sequences: int
    max_rows: int
    max_context: int
    row_starts: torch.Tensor
    contexts: torch.Tensor
    tables: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    history: torch.Tensor | None = None
    num_real: int = 0
    scratch: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class StepState:
    """What the attention layers of the pass that runs on this thread need.

    Attributes:
        plan: whose rows they are.
        cache: memory of the KV.
        kernel: how attention is computed.
        wait_layer: makes the device wait until restored blocks have a layer's KV; None where nothing is on its way.
    """

    plan: StepPlan
    cache: PagedCache
    kernel: AttentionKernel
    wait_layer: Callable[[int], None] | None = None


class _Current(threading.local):
    state: StepState | None = None


_current = _Current()


@contextmanager
def use_step(state: StepState) -> Iterator[None]:
    """Makes `state` the one that attention layers on this thread use."""
    before, _current.state = _current.state, state
    try:
        yield
    finally:
        _current.state = before


def current_step() -> StepState:
    """The state of the pass that runs on this thread."""
    state = _current.state
    assert state is not None, "attention ran outside of a step"
    return state
