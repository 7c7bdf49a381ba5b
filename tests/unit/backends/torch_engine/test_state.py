"""The model state of torch models: what changes it and what does not."""

from __future__ import annotations

from typing import Any

import pytest

from kitelib.backends.torch_engine.state import torch_model_state
from kitelib.errors import ModelFormatError

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rms_norm_eps": 1e-5,
    "_name_or_path": "somebody/model",
    "torch_dtype": "float32",
    "text_config": {"head_dim": 8, "_name_or_path": "inner"},
}


def state(weights: bytes = b"w" * 32, config: dict[str, Any] | None = None, **changes: Any) -> bytes:
    """The state of the model above, with changes."""
    arguments = {"weights_dtype": "bfloat16", "kv_dtype": "bfloat16", "settings": {}, **changes}
    return torch_model_state(weights, CONFIG if config is None else config, **arguments)


def test_the_same_model_has_the_same_state() -> None:
    """Order and names don't count."""
    again = dict(reversed(list(CONFIG.items())))
    named = {**CONFIG, "_name_or_path": "other", "transformers_version": "5.0", "torch_dtype": "bfloat16"}
    nested = {**CONFIG, "text_config": {"head_dim": 8}}
    assert len(state()) == 32
    assert state() == state(config=again) == state(config=named) == state(config=nested)


@pytest.mark.parametrize(
    "changed",
    [
        {"weights": b"v" * 32},
        {"weights_dtype": "float32"},
        {"kv_dtype": "float16"},
        {"settings": {"rope_longrope_limit": 4096}},
        {"config": {**CONFIG, "hidden_size": 65}},
        {"config": {**CONFIG, "rms_norm_eps": 1e-6}},
        {"config": {**CONFIG, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}},
        {"config": {**CONFIG, "text_config": {"head_dim": 16}}},
        {"config": {**CONFIG, "something_new": True}},
    ],
    ids="-".join,
)
def test_whatever_shapes_numbers_counts(changed: dict[str, Any]) -> None:
    """Other weights, types or settings are another model; so is a setting that nobody knows yet."""
    assert state(**changed) != state()


def test_settings_without_a_form_are_refused() -> None:
    """What JSON can't express is no setting of a model."""
    with pytest.raises(ModelFormatError, match=r"config\.json"):
        state(config={"hidden_size": {1, 2}})
