"""Steps that run on a device of their own while the thread that started them goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kitelib.abc import StepResult, StepWork, TokenDraw
from kitelib.backends.torch_engine.device_sampling import NUM_SETTINGS, DeviceSampling, pack_draws, sample_rows
from kitelib.backends.torch_engine.graphed import decode_batch
from kitelib.backends.torch_engine.graphs import DecodeGraphs
from kitelib.backends.torch_engine.lora import Segment
from kitelib.backends.torch_engine.packing import PackedStep, num_outputs, step_result
from kitelib.backends.torch_engine.runner import Runner
from kitelib.errors import BackendStepError

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceRunner"]

Rows = Sequence[npt.NDArray[np.float32]]


class DeviceRunner(Runner):
    """A runner that waits for its device once per step: for the tokens, or the logits, that were asked for.

    Attributes:
        graphs: captured decode steps; None runs every step kernel by kernel.
    """

    draws_tokens = True
    graphs: DecodeGraphs | None = None

    def step(self, work: Sequence[StepWork]) -> StepResult:
        return self.begin(work)()

    def begin(self, work: Sequence[StepWork]) -> Callable[[], StepResult]:
        """See `kitelib.abc.OverlappingBackend.begin_step`."""
        import torch

        packed = self.admit(work)
        draws: list[TokenDraw | None] = []
        for item in work:
            draws.extend(item.draws or [None] * num_outputs(item))
        try:
            with torch.inference_mode():
                finish = self._launch(packed, self.segments(work, packed), draws)
        except Exception as error:
            self.take_back(work)
            raise _failure(error, packed) from error

        def wait() -> StepResult:
            try:
                with torch.inference_mode():
                    rows, tokens = finish()
            except Exception as error:
                self.take_back(work)
                raise _failure(error, packed) from error
            return step_result(work, rows, tokens)

        return wait

    def _launch(
        self, packed: PackedStep, segments: Sequence[Segment], draws: Sequence[TokenDraw | None]
    ) -> Callable[[], tuple[Rows, list[int]]]:
        """Starts a step; the call that it gives waits for it.

        Args:
            packed: the step.
            segments: rows with an adapter.
            draws: per output, in order; None where the logits are wanted.

        Returns:
            Logits where they are wanted, and the tokens drawn.
        """
        drawing = any(draw is not None for draw in draws)
        graphs = self.graphs
        if graphs is not None and not segments and packed.is_decode and graphs.fits(len(draws), packed.max_context):
            self.transfer.wait()  # a captured pass can't wait layer by layer
            step = graphs.run(decode_batch(packed, draws if drawing else ()))
            return lambda: (_wanted(step.logits, draws), _drawn(step.tokens(), draws) if drawing else [])
        logits = self.run(packed, segments)
        if logits is None:
            return self._mark
        tokens = self._draw(logits[: len(draws)], draws) if drawing else None
        return lambda: (_wanted(logits, draws), [] if tokens is None else _drawn(tokens.tolist(), draws))

    def _mark(self) -> tuple[Rows, list[int]]:
        """Waits for a step that gives nothing, so that its failure is its own."""
        import torch

        if torch.device(self._device).type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return [], []

    def _draw(self, logits: torch.Tensor, draws: Sequence[TokenDraw | None]) -> torch.Tensor:
        import torch

        packed = torch.empty((NUM_SETTINGS, len(draws)), dtype=torch.float64)
        mode = pack_draws(draws, packed)
        return sample_rows(logits, DeviceSampling.from_packed(packed.to(self._device)), mode)


def _failure(error: Exception, packed: PackedStep) -> Exception:
    if isinstance(error, (RuntimeError, MemoryError)):
        return BackendStepError(f"the model failed on a step of {packed.num_rows} rows: {error}")
    return error


def _wanted(logits: torch.Tensor, draws: Sequence[TokenDraw | None]) -> Rows:
    """On the host, the rows that nothing was drawn from."""
    places = [place for place, draw in enumerate(draws) if draw is None]
    if not places:
        return []
    rows: Any = logits[: len(draws)] if len(places) == len(draws) else logits[places]
    return list(rows.float().cpu().numpy())


def _drawn(tokens: Sequence[int], draws: Sequence[TokenDraw | None]) -> list[int]:
    """Without the tokens of rows that are only drawn from because others are."""
    return [token for token, draw in zip(tokens, draws, strict=True) if draw is not None]
