"""Sequences over a paged cache, and the forward pass of a step: what `TorchBackend` and the self-test run on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kitelib.abc import BlockPayload, SequenceId, StepResult, StepWork
from kitelib.backends.torch_engine.blocks import BlockTables
from kitelib.backends.torch_engine.compiled import CompiledDecode, decode_step
from kitelib.backends.torch_engine.linear import RowTile
from kitelib.backends.torch_engine.lora import AdapterSet, Segment
from kitelib.backends.torch_engine.packing import PackedStep, RowPlan, num_outputs, pack, step_result
from kitelib.backends.torch_engine.payloads import PayloadLayout
from kitelib.backends.torch_engine.plan import StepState, use_step
from kitelib.backends.torch_engine.transfer import BlockTransfer
from kitelib.errors import BackendError, BackendStepError

if TYPE_CHECKING:
    import torch

    from kitelib.backends.torch_engine.forward import Forward
    from kitelib.backends.torch_engine.kernels.contract import AttentionKernel
    from kitelib.backends.torch_engine.pages import PagedCache

__all__ = ["Runner"]

Logits = npt.NDArray[np.float32]


class Runner:
    """Runs steps on one device. Used on one thread.

    Args:
        forward: the model.
        cache: memory of the KV.
        kernel: how attention is computed.
        rows: how passes are padded.
        max_sequences: sequences that may be alive, idle ones included.
        adapters: those of the model.
        compiled: a faster way to compute a step, where there is one.
        max_outputs: rows of a step that logits or tokens may be wanted of; None means all.
        tile: of the model's packed linears, which other runners of the same model set, too.

    Attributes:
        cache: memory of the KV.
        tables: who holds which block.
        transfer: copies blocks out and in.
        layout: form of the payloads.
        mixes_adapters: a step may have rows of several adapters.
        max_outputs: rows of a step that logits or tokens may be wanted of.
        draws_tokens: it can draw tokens itself.
    """

    draws_tokens = False

    def __init__(
        self,
        forward: Forward,
        cache: PagedCache,
        kernel: AttentionKernel,
        rows: RowPlan,
        max_sequences: int,
        *,
        adapters: AdapterSet | None = None,
        compiled: CompiledDecode | None = None,
        max_outputs: int | None = None,
        tile: RowTile | None = None,
    ) -> None:
        self.tables = BlockTables(cache.num_blocks, cache.block_tokens, max_sequences, self._copy_block)
        self.layout = PayloadLayout.of(cache)
        self._forward = forward
        self.cache = cache
        self._kernel = kernel
        self._rows = rows
        self.max_outputs = rows.max_rows if max_outputs is None else min(max_outputs, rows.max_rows)
        self._vocab_size = int(forward.model.config.get_text_config().vocab_size)
        self._latent = any(layer.latent for layer in cache.layers)
        self._adapters = adapters
        self.mixes_adapters = adapters is not None and adapters.mixable
        self._compiled = compiled
        self._tile = tile or RowTile()
        self.transfer = BlockTransfer(cache)
        self._overlaps = cache.arena.device.type != "cpu"
        self._device: Any = "cpu" if cache.arena.device.type == "cpu" else cache.arena.device

    @property
    def model(self) -> Any:
        """The ``...ForCausalLM`` module."""
        return self._forward.model

    @property
    def kernel(self) -> AttentionKernel:
        """How attention is computed."""
        return self._kernel

    @property
    def rows(self) -> RowPlan:
        """How passes are padded."""
        return self._rows

    def _copy_block(self, source: int, target: int) -> None:
        self.transfer.wait()  # restored blocks may still be on their way
        self.cache.arena[target].copy_(self.cache.arena[source])

    # Steps

    def step(self, work: Sequence[StepWork]) -> StepResult:
        """See `kitelib.abc.Backend.step`."""
        import torch

        packed = self.admit(work)
        try:
            with torch.inference_mode():
                logits = self.run(packed, self.segments(work, packed))
                rows = [] if logits is None else list(logits[: packed.num_outputs].float().numpy())
        except Exception as error:
            self.take_back(work)
            if isinstance(error, (RuntimeError, MemoryError)):
                raise BackendStepError(f"the model failed on a step of {packed.num_rows} rows: {error}") from error
            raise
        return step_result(work, rows)

    def admit(self, work: Sequence[StepWork]) -> PackedStep:
        """Checks a step and counts its tokens in the tables.

        Raises:
            BackendStepError: it does not fit; nothing has changed.
        """
        total = sum(len(item.token_ids) for item in work)
        if not work or not all(item.token_ids for item in work) or total > self._rows.max_rows:
            raise BackendStepError(
                f"a step takes 1 to {self._rows.max_rows} tokens, at least one per item; not {total}"
            )
        if len({item.sequence for item in work}) < len(work):
            raise BackendStepError("a sequence comes twice in one step; give all its tokens in one item")
        self._check_outputs(work)
        done = []
        try:
            for item in work:
                table = self.tables[item.sequence]
                if item.start != table.num_tokens:
                    raise BackendStepError(
                        f"sequence {item.sequence} holds {table.num_tokens} tokens, so position {item.start} can't follow"
                    )
                self._check_adapter(table.adapter, work)
                self.tables.extend(item.sequence, len(item.token_ids))
                done.append(item)
            packed = pack(self.tables, work, self._rows)
            if packed.ids.min() < 0 or packed.ids.max() >= self._vocab_size:  # on a GPU it would be fatal
                raise BackendStepError(f"a token id is outside 0 to {self._vocab_size - 1}")
            return packed
        except BackendError as error:
            self.take_back(done)
            raise error if isinstance(error, BackendStepError) else BackendStepError(str(error)) from error

    def _check_outputs(self, work: Sequence[StepWork]) -> None:
        for item in work:
            if not 0 <= item.drafts < len(item.token_ids):
                raise BackendStepError(
                    f"{item.drafts} of the {len(item.token_ids)} tokens of sequence {item.sequence} are called drafts; "
                    "give 0 or more, and fewer than there are tokens"
                )
            if item.draws and (item.logits or len(item.draws) != 1 + item.drafts or not self.draws_tokens):
                raise BackendStepError(
                    f"sequence {item.sequence} asks for {len(item.draws)} drawn tokens after {item.drafts} drafts; ask for "
                    "one more than there are drafts, not for logits as well, and only where draws_tokens says so"
                )
        outputs = sum(map(num_outputs, work))
        if outputs > self.max_outputs:
            raise BackendStepError(
                f"a step gives logits or tokens after {self.max_outputs} tokens at most, not {outputs}; send fewer drafts"
            )

    def _check_adapter(self, adapter: str | None, work: Sequence[StepWork]) -> None:
        first = self.tables[work[0].sequence].adapter
        if adapter != first and not self.mixes_adapters:
            raise BackendStepError(f"a step has one adapter; this one has {first!r} and {adapter!r}")

    def take_back(self, work: Sequence[StepWork]) -> None:
        """Undoes `admit`."""
        for item in work:
            self.tables.shrink(item.sequence, item.start)

    def truncate(self, sequence: SequenceId, num_tokens: int) -> None:
        """See `kitelib.abc.Backend.truncate`."""
        held = self.tables[sequence].num_tokens
        if not 0 <= num_tokens <= held:
            raise BackendError(f"sequence {sequence} holds {held} tokens, so it can't be taken back to {num_tokens}")
        self.tables.shrink(sequence, num_tokens)

    def segments(self, work: Sequence[StepWork], packed: PackedStep) -> list[Segment]:
        """The rows that have an adapter."""
        found = []
        for place, item in enumerate(work):
            adapter = self.tables[item.sequence].adapter
            if adapter is not None:
                found.append(Segment(int(packed.row_starts[place]), int(packed.row_starts[place + 1]), adapter))
        return found

    def run(
        self, packed: PackedStep, segments: Sequence[Segment], kernel: AttentionKernel | None = None
    ) -> torch.Tensor | None:
        """Logits (outputs, vocabulary) of a step, padding included; None if none are wanted. `kernel` stands in for the
        runner's own, in a step that wants none."""
        import torch

        plan = packed.plan(self._device, history=self._latent)
        wait = self.transfer.wait_layer if self._overlaps else None
        state = StepState(plan, self.cache, kernel or self._kernel, wait)
        self._tile.rows = self._rows.tile
        adapters = self._adapters if segments else None
        with use_step(state), nullcontext() if adapters is None else adapters.use(segments, packed.num_rows):
            if self._compiled is not None and adapters is None:
                logits = decode_step(self._compiled, packed)
                if logits is not None:
                    return logits
            ids = torch.from_numpy(packed.ids)[None].to(self._device)
            positions = plan.positions[None]
            if not len(packed.select):
                self._forward.compute(ids, positions)
                return None
            return self._forward.logits(ids, positions, torch.from_numpy(packed.select).to(self._device))

    # Blocks

    def export(self, sequence: SequenceId, first: int, count: int, end: int | None) -> list[BlockPayload]:
        """See `kitelib.abc.Backend.export_blocks`."""
        table, size = self.tables[sequence], self.tables.block_tokens
        last = min(table.num_tokens, (first + count) * size, end if end is not None else 2**62)
        blocks = [int(block) for block in table.blocks[first : -(-last // size)]] if last > first * size else []
        counts = [min(size, last - (first + place) * size) for place in range(len(blocks))]
        data = self.transfer.export(blocks, counts) if blocks else []
        return [self.layout.payload(each, tokens) for each, tokens in zip(data, counts, strict=True)]

    def restore(self, sequence: SequenceId, first: int, payloads: Sequence[BlockPayload]) -> None:
        """See `kitelib.abc.Backend.restore_blocks`."""
        table, size = self.tables[sequence], self.tables.block_tokens
        if table.num_tokens != first * size:
            raise BackendError(f"blocks from {first} on can't follow a sequence of {table.num_tokens} tokens")
        for place, payload in enumerate(payloads):
            self.layout.check(payload, full=place < len(payloads) - 1)
        held = table.num_tokens
        self.tables.extend(sequence, sum(payload.num_tokens for payload in payloads))
        try:
            blocks = [int(block) for block in table.blocks[first : table.num_blocks]]
            self.transfer.restore(blocks, [payload.data for payload in payloads])
        except Exception as error:
            self.tables.shrink(sequence, held)
            raise BackendError(f"{len(payloads)} blocks could not be restored: {error}") from error
