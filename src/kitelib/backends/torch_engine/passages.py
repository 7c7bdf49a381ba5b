"""Copies the KV of tokens from one sequence to another place in another one: keys are turned to their new positions, values
stay as they are. What the tokens would have seen before them there is missing, so the result is approximate.

Part of it can be repaired as CacheBlend does (Yao et al. 2024): the tokens whose KV in the second layer differs most from
what the whole text before them gives are computed again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from kitelib.abc import SequenceId
from kitelib.backends.torch_engine.lora import Segment
from kitelib.backends.torch_engine.packing import PackedStep
from kitelib.backends.torch_engine.rope import KeyRotation, RecordKeys, find_rotations, model_frequencies
from kitelib.errors import BackendError, BackendStepError, UnsupportedOptionError

if TYPE_CHECKING:
    import torch

    from kitelib.backends.torch_engine.plan import StepPlan
    from kitelib.backends.torch_engine.runner import Runner

__all__ = ["PassageKV"]

_COPIED_TOKENS: Final = 1024  # at once: bounds the memory of the copies
_PROBED_TOKENS: Final = 6
_SEED: Final = 3


class PassageKV:
    """Moves KV between the sequences of one runner. For the thread that runs the model.

    Args:
        runner: whose sequences they are.
        context_tokens: most tokens of a sequence.
    """

    def __init__(self, runner: Runner, context_tokens: int) -> None:
        self._runner = runner
        self._context_tokens = context_tokens
        self._found: tuple[KeyRotation, ...] | str | None = None

    @property
    def checked(self) -> bool:
        """Whether `refusal` knows; then any thread may ask."""
        return self._found is not None

    def refusal(self) -> str | None:
        """Why this model's KV can't be moved; None if it can. The first call computes a few tokens to find out."""
        found = self._rotations()
        return found if isinstance(found, str) else None

    def splice(
        self,
        sequence: SequenceId,
        token_ids: Sequence[int],
        moves: Sequence[tuple[SequenceId, int, int, int]],
        share: float,
    ) -> int:
        """Appends tokens to a sequence, the KV of some of them moved from others, and computes the rest in their places.

        All that is moved is there before anything is computed, so what is computed needs one pass, wherever it stands.

        Args:
            sequence: what to extend.
            token_ids: what with.
            moves: (source, first, count, place): the KV of tokens first .. first + count - 1 of `source` is that of
                token_ids[place : place + count]. They don't overlap.
            share: of the moved tokens, those that are computed again; rounded up.

        Returns:
            How many of the moved tokens were computed again.

        Raises:
            UnsupportedOptionError: this model's KV can't be moved.
            BackendError: a source does not hold the tokens, there is no room, or the model failed; nothing has changed.
        """
        import torch

        rotations = self._rotations()
        if isinstance(rotations, str):
            raise UnsupportedOptionError(f"passages can't be reused with this model: {rotations}")
        tables, missing = self._runner.tables, np.ones(len(token_ids), np.bool_)
        for source, first, count, place in moves:
            held = tables[source].num_tokens
            if count < 1 or first < 0 or first + count > held or not 0 <= place <= len(token_ids) - count:
                raise BackendError(
                    f"sequence {source} holds {held} tokens; {count} from {first} on can't be moved to {place} of "
                    f"{len(token_ids)}"
                )
            missing[place : place + count] = False
        start = tables[sequence].num_tokens
        tables.extend(sequence, len(token_ids))
        try:
            with torch.inference_mode():
                self._runner.transfer.wait()  # restored blocks may still be on their way
                for source, first, count, place in moves:
                    for offset in range(0, count, _COPIED_TOKENS):
                        length = min(_COPIED_TOKENS, count - offset)
                        here = self._slots(source, first + offset, length)
                        there = self._slots(sequence, start + place + offset, length)
                        self._copy(rotations, here, there, start + place - first)
                return self._compute(sequence, start, token_ids, missing, share)
        except Exception as error:
            tables.shrink(sequence, start)
            if isinstance(error, (RuntimeError, MemoryError)):
                raise BackendStepError(f"the model failed on {len(token_ids)} tokens with passages: {error}") from error
            raise

    def _compute(
        self,
        sequence: SequenceId,
        first: int,
        token_ids: Sequence[int],
        missing: npt.NDArray[np.bool_],
        share: float,
    ) -> int:
        """Computes the tokens that are missing, and of the others those whose KV differs most from what the text before them
        gives; returns how many these are. `first` is the position of the first token."""
        chosen, again = missing.copy(), 0
        if share > 0 and len(self._runner.cache.layers) > 1:  # the first layer's KV hangs on nothing before
            moved = np.flatnonzero(~missing)
            again = min(len(moved), math.ceil(share * len(moved)))
            deviations = self._deviations(sequence, first, token_ids)[moved]
            chosen[moved[np.argsort(-deviations, kind="stable")[:again]]] = True
        places, most = np.flatnonzero(chosen), self._runner.rows.max_rows
        for start in range(0, len(places), most):
            part = places[start : start + most]
            ids = np.array([token_ids[place] for place in part], np.int64)
            self._run(self._pack_alone(sequence, ids, first + part), sequence)
        return again

    # Finding out how keys are turned

    def _rotations(self) -> tuple[KeyRotation, ...] | str:
        if self._found is None:
            try:
                self._found = self._probe()
            except (RuntimeError, MemoryError) as error:
                self._found = f"the model failed when it was checked how keys are turned ({error})"
        return self._found

    def _probe(self) -> tuple[KeyRotation, ...] | str:
        import torch

        layers = self._runner.cache.layers
        if any(layer.latent for layer in layers):
            return "it keeps latents instead of keys and values (multi-head latent attention)"
        frequencies = model_frequencies(self._runner.model)
        if not frequencies:
            return "the model keeps no rotary frequencies (RoPE), so its positions can't be told from its keys"
        last = self._context_tokens - 1
        positions = sorted({position for position in (0, 1, 17, 255, last // 2, last) if position <= last})
        if len(positions) < 2:
            return f"its context of {self._context_tokens} tokens is too short to check how keys are turned"
        recorder = RecordKeys()
        with torch.inference_mode():
            self._runner.run(self._pack_probe(positions), (), recorder)
            places = [self._runner.cache.keys(layer).data_ptr() for layer in range(len(layers))]
            found = [recorder.found[place] for place in places if place in recorder.found]
            if len(found) < len(layers):
                return "some of its layers attend in a way of their own"
            count = len(positions)
            keys, values = (
                [
                    rows[part][: count * _PROBED_TOKENS].view(count, _PROBED_TOKENS, *rows[part].shape[1:])
                    for rows in found
                ]
                for part in (0, 1)
            )
            precision = torch.finfo(self._runner.cache.arena.dtype).eps
            return find_rotations(keys, values, positions, frequencies, precision)

    def _pack_probe(self, positions: Sequence[int]) -> PackedStep:
        """The same tokens at each of the positions, each alone in its sequence; no row has a slot."""
        vocab_size = int(self._runner.model.config.get_text_config().vocab_size)
        rng = np.random.Generator(np.random.PCG64(_SEED))
        tokens = rng.integers(
            vocab_size // 16, max(vocab_size // 16 + 1, vocab_size - vocab_size // 16), _PROBED_TOKENS
        )
        ids = np.tile(tokens, len(positions)).astype(np.int64)
        count = len(ids)
        return self._packed(
            ids,
            np.repeat(np.array(positions, np.int64), _PROBED_TOKENS),
            np.full(count, -1, np.int64),
            np.arange(count + 1, dtype=np.int32),
            np.ones(count, np.int32),
            np.zeros((count, 1), np.int32),
        )

    # Copying

    def _slots(self, sequence: SequenceId, first: int, count: int) -> npt.NDArray[np.int64]:
        """Where the KV of tokens first .. first + count - 1 lies: block number * block tokens + offset."""
        table, size = self._runner.tables[sequence], self._runner.tables.block_tokens
        positions = np.arange(first, first + count, dtype=np.int64)
        found: npt.NDArray[np.int64] = table.blocks[positions // size] * np.int64(size) + positions % size
        return found

    def _copy(
        self,
        rotations: Sequence[KeyRotation],
        here: npt.NDArray[np.int64],
        there: npt.NDArray[np.int64],
        distance: int,
    ) -> None:
        import torch

        cache, size = self._runner.cache, self._runner.tables.block_tokens
        device = cache.arena.device
        source, target = (torch.from_numpy(slots).to(device) for slots in (here, there))
        places, sources = (target // size, target % size), (source // size, source % size)
        for layer, rotation in enumerate(rotations):
            keys, values = cache.keys(layer), cache.values(layer)
            keys.index_put_(places, rotation.move(keys[sources], distance))
            values.index_put_(places, values[sources])

    # Computing again

    def _deviations(self, sequence: SequenceId, first: int, token_ids: Sequence[int]) -> npt.NDArray[np.float64]:
        """How much each token's KV in the second layer differs from what the text before it gives: float64 (tokens,)."""
        measure, most = _Deviation(self._runner), self._runner.rows.max_rows
        for offset in range(0, len(token_ids), most):
            ids = np.array(token_ids[offset : offset + most], np.int64)
            try:
                self._run(self._pack_rows(sequence, ids, first + offset), sequence, measure)
            except _Measured:
                continue
        return np.concatenate(measure.found)

    def _run(self, packed: PackedStep, sequence: SequenceId, kernel: Any = None) -> None:
        adapter = self._runner.tables[sequence].adapter
        segments = [] if adapter is None else [Segment(0, int(packed.row_starts[-1]), adapter)]
        self._runner.run(packed, segments, kernel)

    def _pack_rows(self, sequence: SequenceId, ids: npt.NDArray[np.int64], first: int) -> PackedStep:
        """Consecutive tokens from position `first` on, as rows of one sequence that ends with them."""
        table, count = self._runner.tables[sequence], len(ids)
        return self._packed(
            ids,
            np.arange(first, first + count, dtype=np.int64),
            self._slots(sequence, first, count),
            np.array([0, count], np.int32),
            np.array([first + count], np.int32),
            table.blocks[None, : table.num_blocks].copy(),
        )

    def _pack_alone(
        self, sequence: SequenceId, ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> PackedStep:
        """Tokens at any positions, ascending, each as a sequence of its own that has the same blocks and ends with it. A
        kernel writes the KV of all rows of a layer before any row attends, so each sees what the others have new."""
        table, count = self._runner.tables[sequence], len(ids)
        size = self._runner.tables.block_tokens
        return self._packed(
            ids,
            positions.astype(np.int64),
            table.blocks[positions // size] * np.int64(size) + positions % size,
            np.arange(count + 1, dtype=np.int32),
            (positions + 1).astype(np.int32),
            np.repeat(table.blocks[None, : table.num_blocks], count, axis=0),
        )

    def _packed(
        self,
        ids: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int64],
        row_starts: npt.NDArray[np.int32],
        contexts: npt.NDArray[np.int32],
        tables: npt.NDArray[np.int32],
    ) -> PackedStep:
        missing = self._runner.rows.padded(len(ids)) - len(ids)
        return PackedStep(
            ids=np.pad(ids, (0, missing)),
            positions=np.pad(positions, (0, missing)),
            slots=np.pad(slots, (0, missing), constant_values=-1),
            row_starts=row_starts,
            contexts=contexts,
            tables=tables,
            select=np.zeros(0, np.int64),
            num_outputs=0,
            max_rows=int(np.diff(row_starts).max()),
            block_tokens=self._runner.tables.block_tokens,
        )


class _Measured(Exception):  # noqa: N818 - no error: ends a pass whose later layers nobody needs
    """The layer that was to be measured has been."""


class _Deviation:
    """An `AttentionKernel` that computes the first layer, and in the second one compares the rows' KV with what their slots
    hold; then it ends the pass.

    Attributes:
        found: of each pass, the deviation of each row, float64 (rows,).
    """

    name = "deviation"
    row_invariant = False

    def __init__(self, runner: Runner) -> None:
        self._kernel = runner.kernel
        self._second = runner.cache.keys(1).data_ptr()
        self.found: list[npt.NDArray[np.float64]] = []

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        plan: StepPlan,
        **options: Any,
    ) -> torch.Tensor:
        """See `AttentionKernel.attend`."""
        if key_pages.data_ptr() != self._second:
            return self._kernel.attend(query, key, value, key_pages, value_pages, plan, **options)
        count, size = plan.num_real, key_pages.shape[1]
        places = (plan.slots[:count] // size, plan.slots[:count] % size)
        deviation = _distance(key[:count], key_pages[places]) + _distance(value[:count], value_pages[places])
        self.found.append(deviation.double().cpu().numpy())
        raise _Measured


def _distance(fresh: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """Squared distance of each row, in units of what a row has on average."""
    squares = fresh.float().square().sum((1, 2))
    return (fresh.float() - held.float()).square().sum((1, 2)) / squares.mean().clamp_min(1e-30)
