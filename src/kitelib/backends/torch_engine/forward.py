"""Calls a Hugging Face model on packed rows, and finds out what its layers keep per token."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from kitelib.backends.torch_engine.attention import LatentCache, record_shapes
from kitelib.backends.torch_engine.pages import LayerShape
from kitelib.errors import UnsupportedOptionError

if TYPE_CHECKING:
    import torch

__all__ = ["Forward", "probe_layers"]


class Forward:
    """The model as a function of packed rows. `latent` models are given a cache object to ask.

    Attributes:
        model: the ``...ForCausalLM`` module.
    """

    def __init__(self, model: Any, *, latent: bool) -> None:
        self.model = model
        self._decoder = model.get_decoder()
        # transformers renamed the argument after 5.19.
        name = "cache" if "cache" in _parameters(self._decoder) else "past_key_values"
        self._options: dict[str, Any] = {"use_cache": False}
        if latent:
            self._options[name] = LatentCache()

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, select: torch.Tensor) -> torch.Tensor:
        """Logits of some rows.

        Args:
            ids: int64 (1, rows).
            positions: int64 (1, rows).
            select: int64 (outputs,): the rows.

        Returns:
            (outputs, vocabulary), in the model's type.
        """
        found = self.model(input_ids=ids, position_ids=positions, logits_to_keep=select, **self._options)
        logits: torch.Tensor = found.logits[0]
        return logits

    def compute(self, ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Only writes the KV of the rows."""
        self._decoder(input_ids=ids, position_ids=positions, **self._options)


def probe_layers(model: Any, name: str) -> tuple[LayerShape, ...]:
    """What every layer keeps per token, found by running the model on two tokens.

    Raises:
        UnsupportedOptionError: a layer keeps something else than keys and values, so it can't be cut into blocks.
    """
    import torch

    device = next(model.parameters()).device
    with torch.inference_mode(), record_shapes() as shapes:
        ids = torch.zeros((1, 2), dtype=torch.int64, device=device)
        Forward(model, latent=True).compute(ids, torch.arange(2, device=device)[None])
    count = model.config.get_text_config().num_hidden_layers
    missing = sorted(set(range(count)) - shapes.keys())
    if missing:
        raise UnsupportedOptionError(
            f"layers {missing} of {name!r} keep no keys and values (a recurrent or linear attention), so they can't be "
            "cut into blocks; the torch backend does not serve such a model"
        )
    return tuple(shapes[layer] for layer in range(count))


def _parameters(module: Any) -> set[str]:
    return set(inspect.signature(module.forward).parameters)
