"""Decode steps of a loaded model through CUDA graphs: joins `Forward`, the cache and the kernel to `DecodeGraphs`.

A graph has one row per sequence. Drafts run in it as sequences of their own, which have the same blocks and end one token
later each: a kernel writes the KV of all rows of a layer before any row attends, so each sees those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kitelib.backends.torch_engine.graphs import (
    CudaGraphs,
    DecodeBatch,
    DecodeGraphs,
    GraphApi,
    PlainReplay,
    buckets_to,
)
from kitelib.backends.torch_engine.plan import StepPlan, StepState, use_step

if TYPE_CHECKING:
    import torch

    from kitelib.abc import TokenDraw
    from kitelib.backends.torch_engine.forward import Forward
    from kitelib.backends.torch_engine.kernels.contract import AttentionKernel
    from kitelib.backends.torch_engine.packing import PackedStep, RowPlan
    from kitelib.backends.torch_engine.pages import PagedCache

__all__ = ["capture", "decode_batch", "decode_graphs"]


def decode_graphs(
    forward: Forward,
    cache: PagedCache,
    kernel: AttentionKernel,
    rows: RowPlan,
    *,
    max_rows: int,
    max_context: int,
    api: GraphApi | None = None,
) -> DecodeGraphs | None:
    """Graphs for the decode steps of a model; nothing is captured yet.

    Args:
        forward: the model.
        cache: its cache; graphs write to this one and no other.
        kernel: one whose launches depend on the plan's sizes only.
        rows: numbers of rows that a pass may have; sizes of batch are rounded up to them.
        max_rows: rows of the largest step, one for each sequence and each draft.
        max_context: most tokens of a sequence.
        api: None means CUDA graphs on a CUDA device, else the model is just called again.

    Returns:
        None for a model with latent attention: the number of tokens that it expands in a step is no static size.
    """
    import torch

    if any(layer.latent for layer in cache.layers):
        return None
    model, device = forward.model, cache.arena.device
    if api is None:
        api = CudaGraphs(device) if device.type == "cuda" else PlainReplay()
    sizes = {rows.padded(size) for size in buckets_to(max_rows)}
    buckets = sorted(size for size in sizes if size <= rows.max_rows) or [rows.max_rows]
    every = torch.arange(buckets[-1], device=device)

    def compute(input_ids: torch.Tensor, positions: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        with use_step(StepState(plan, cache, kernel)):
            return forward.logits(input_ids, positions, every[: plan.num_rows])

    return DecodeGraphs(
        compute,
        max_blocks=-(-max_context // cache.block_tokens),
        max_context=max_context,
        vocab_size=int(model.config.get_text_config().vocab_size),
        logits_dtype=model.get_input_embeddings().weight.dtype,
        device=device,
        api=api,
        buckets=buckets,
    )


def decode_batch(packed: PackedStep, draws: Sequence[TokenDraw | None] = ()) -> DecodeBatch:
    """What `DecodeGraphs` needs of a packed decode step (`PackedStep.is_decode`); its padding is left out.

    Args:
        packed: the step.
        draws: per row; see `DecodeBatch.draws`.
    """
    count = int(packed.row_starts[-1])
    if packed.max_rows == 1:
        return DecodeBatch(packed.ids[:count], packed.contexts, packed.slots[:count], packed.tables, draws)
    contexts = (packed.positions[:count] + 1).astype(np.int32)
    tables = np.repeat(packed.tables, np.diff(packed.row_starts), axis=0)
    return DecodeBatch(packed.ids[:count], contexts, packed.slots[:count], tables, draws)


def capture(graphs: DecodeGraphs, progress: Callable[[int, int], None] | None = None) -> str:
    """Captures all graphs, as `DecodeGraphs.warm`. A model whose code waits for the device can't be captured: then the
    reason is given back, for people, and the graphs must not be used; "" if all is well."""
    try:
        graphs.warm(progress)
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        return f"decode steps run without CUDA graphs, which costs speed: {reason}"
    return ""
