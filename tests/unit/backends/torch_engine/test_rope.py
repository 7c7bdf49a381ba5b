"""Keys at another position: found for every kind of RoPE from the loaded model alone, as transformers computes them there,
and refused where no rotation does it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kitelib.backends.torch_engine.passages import PassageKV
from kitelib.backends.torch_engine.rope import KeyRotation, find_rotations, model_frequencies
from tests.support.answers import prompt_of
from tests.support.hf_folders import reference_model
from tests.support.torch_parts import compute, open_parts

THETA = 10000.0
PASSAGE = prompt_of(21, 5, 512)  # shorter than every window
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("llama", {}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": THETA}}),
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
                "rope_theta": THETA,
            }
        },
    ),
    "yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 512,
                "rope_theta": THETA,
            }
        },
    ),
    "key norms": ("qwen3", {}),
    "partial": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.5}},
    ),
    "pairs, partial": ("glm", {"head_dim": 32, "partial_rotary_factor": 0.5}),
    "pairs": ("cohere", {}),
    "per layer": ("gemma3_text", {}),
    "no positions in one layer": ("smollm3", {"no_rope_layers": [1, 0]}),
    "experts": ("mixtral", {}),
}


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    from tests.support.hf_folders import write_model

    architecture, settings = KINDS[request.param]
    return write_model(tmp_path / "model", architecture, seed=3, **settings)


def pages_of(runner: Any, sequence: Any, first: int, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per layer keys and values of tokens, (tokens, heads, channels)."""
    table, size = runner.tables[sequence], runner.tables.block_tokens
    places = np.arange(first, first + count)
    blocks, offsets = table.blocks[places // size], places % size
    layers = range(len(runner.cache.layers))
    return [
        (runner.cache.keys(i)[blocks, offsets].float().numpy(), runner.cache.values(i)[blocks, offsets].float().numpy())
        for i in layers
    ]


@pytest.mark.parametrize("start", [1, 300, 1900])
def test_moved_keys_are_those_that_transformers_computes_there(folder: Path, tmp_path: Path, start: int) -> None:
    """The reference computes the passage at positions from `start` on without anything before it, all layers."""
    runner = open_parts(folder, tmp_path).runner(num_blocks=160)
    passages = PassageKV(runner, 2048)
    assert passages.refusal() is None
    alone, target = runner.tables.create(None), runner.tables.create(None)
    compute(runner, alone, PASSAGE)
    compute(runner, target, prompt_of(start, 6, 512), piece=256)
    passages.splice(target, PASSAGE, [(alone, 0, len(PASSAGE), 0)], 0.0)
    assert runner.tables[target].num_tokens == start + len(PASSAGE)

    model = reference_model(folder)
    positions = torch.arange(start, start + len(PASSAGE))[None]
    with torch.inference_mode():
        cache = model(torch.tensor([PASSAGE]), position_ids=positions, use_cache=True).past_key_values
    for layer, (keys, values) in enumerate(pages_of(runner, target, start, len(PASSAGE))):
        wanted = cache.layers[layer]
        assert np.abs(keys - wanted.keys[0].transpose(0, 1).numpy()).max() < 2e-3, f"layer {layer}"
        assert np.abs(values - wanted.values[0].transpose(0, 1).numpy()).max() < 1e-3, f"layer {layer}"
        if layer == 0:  # a step further on is another key, by far
            moved = cache.layers[0].keys[0].transpose(0, 1)
            rotation = passages._rotations()[0]  # type: ignore[index]
            assert (rotation.move(moved, 1) - moved).abs().max() > 0.1  # type: ignore[union-attr]


def test_moving_there_and_back_and_in_two_moves(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    frequencies = model_frequencies(open_parts(hf_model("llama"), tmp_path).forward.model)
    assert len(frequencies) == 1
    keys = torch.randn(5, 2, 40, generator=torch.Generator().manual_seed(1))  # 8 channels behind the rotary ones
    for form in ("halves", "pairs"):
        rotation = KeyRotation(form, frequencies[0])
        assert rotation.move(keys, 0) is keys
        moved = rotation.move(keys, 700)
        assert torch.equal(moved[..., 32:], keys[..., 32:])
        assert (moved.norm(dim=-1) - keys.norm(dim=-1)).abs().max() < 1e-5
        assert (rotation.move(moved, -700) - keys).abs().max() < 1e-5
        assert (rotation.move(rotation.move(keys, 300), 400) - moved).abs().max() < 1e-5
        half = rotation.move(keys.bfloat16(), 700)
        assert half.dtype == torch.bfloat16
        assert (half.float() - moved).abs().max() < 0.05
    assert KeyRotation("none").move(keys, 9) is keys


@pytest.mark.parametrize(
    ("architecture", "settings", "reason"),
    [
        ("deepseek_v3", {}, "latent"),
        ("gpt2", {"n_inner": 192}, "no rotary frequencies"),
        ("opt", {"ffn_dim": 192, "word_embed_proj_dim": 128}, "no rotary frequencies"),
        ("hunyuan_v1_dense", {"head_dim": 32}, "no rotation"),  # weighs the channels of keys after turning them
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_models_whose_keys_can_not_be_moved_are_refused(
    tmp_path: Path, architecture: str, settings: dict[str, Any], reason: str
) -> None:
    from kitelib.errors import UnsupportedOptionError
    from tests.support.hf_folders import write_model

    runner = open_parts(write_model(tmp_path / "model", architecture, **settings), tmp_path).runner()
    passages = PassageKV(runner, 2048)
    refusal = passages.refusal()
    assert refusal is not None
    assert reason in refusal
    source, target = runner.tables.create(None), runner.tables.create(None)
    compute(runner, source, PASSAGE)
    with pytest.raises(UnsupportedOptionError, match=reason):
        passages.splice(target, PASSAGE[:5], [(source, 0, 5, 0)], 0.0)
    assert runner.tables[target].num_tokens == 0


def observed(turn: Callable[[torch.Tensor, int], torch.Tensor], positions: list[int]) -> list[torch.Tensor]:
    keys = torch.randn(4, 2, 16, generator=torch.Generator().manual_seed(2))
    return [torch.stack([turn(keys, position) for position in positions])]


def test_proof_takes_the_right_frequencies_and_no_others() -> None:
    positions = [0, 1, 90, 2047]
    right = torch.tensor([1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003], dtype=torch.float64)
    keys = observed(KeyRotation("pairs", right).move, positions)
    values = [torch.ones(4, 4, 2, 16)]
    found = find_rotations(keys, values, positions, [right * 1.01, right], 1e-7)
    assert not isinstance(found, str)
    assert (found[0].form, found[0].frequencies) == ("pairs", right)
    refused = find_rotations(keys, values, positions, [right * 1.01, right[:4]], 1e-7)
    assert isinstance(refused, str)
    assert "no rotation" in refused


def test_proof_refuses_values_that_move_and_keys_that_never_do() -> None:
    positions = [0, 1, 90]
    values = [torch.ones(3, 4, 2, 16) + 0.1 * torch.arange(3.0)[:, None, None, None]]
    still = observed(lambda keys, _: keys, positions)
    refused = find_rotations(still, values, positions, [], 1e-7)
    assert "position embeddings" in refused
    refused = find_rotations(still, [torch.ones(3, 4, 2, 16)], positions, [], 1e-7)
    assert "ALiBi" in refused
    broken = [torch.full((3, 4, 2, 16), float("nan"))]
    assert isinstance(find_rotations(broken, [torch.ones(3, 4, 2, 16)], positions, [], 1e-7), str)
