"""Tokens drawn on the device are those that the host's sampler draws."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from kitelib.abc import TokenDraw
from kitelib.backends.torch_engine.device_sampling import (
    NUM_SETTINGS,
    DeviceSampling,
    SamplingMode,
    pack_draws,
    sample_rows,
)
from kitelib.config import SamplingParams
from kitelib.engine.sampling import Sampler

_MARGIN = 2e-6  # the host adds float32 weights where the vocabulary is large


def _sample(logits: torch.Tensor, draws: list[TokenDraw | None], mode: SamplingMode | None = None) -> list[int]:
    packed = torch.full((NUM_SETTINGS, logits.shape[0]), math.nan, dtype=torch.float64)
    least = pack_draws(draws, packed)
    return sample_rows(logits, DeviceSampling.from_packed(packed), least if mode is None else mode).tolist()


def _sampler(params: SamplingParams, size: int, seed: int) -> Sampler:
    return Sampler(params, size, prompt_ids=(), choice=0, seed=seed)


def _is_clear(params: SamplingParams, logits: np.ndarray, uniform: float) -> bool:
    """Whether no boundary is so near that the last bits of a sum decide."""
    size = logits.size
    ids, chances = _sampler(params, size, 0).probabilities(logits)
    if np.abs(np.cumsum(chances) - uniform).min() < _MARGIN:
        return False
    for factor in (1 - _MARGIN, 1 + _MARGIN):
        for name in ("top_p", "min_p"):
            value = getattr(params, name)
            if value == 1.0 and name == "top_p":
                continue  # nothing is cut, whatever the rounding
            moved = dataclasses.replace(params, **{name: min(1.0, value * factor)})
            if not np.array_equal(_sampler(moved, size, 0).probabilities(logits)[0], ids):
                return False
    return True


_OPTIONS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=40.0),
    SamplingParams(temperature=0.8, min_p=0.1),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.2, top_k=7),
    SamplingParams(temperature=1.0, top_p=0.7),
    SamplingParams(temperature=2.0, top_p=0.9),
    SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=5.0, top_k=3, top_p=0.01, min_p=1.0),
    SamplingParams(temperature=1.0, top_k=10_000),
]


@pytest.mark.parametrize("size", [1, 2, 50, 3000, 9001])
@pytest.mark.parametrize("params", _OPTIONS, ids=lambda each: f"{each.temperature}-{each.top_k}-{each.top_p}")
def test_the_host_draws_the_same_token(size: int, params: SamplingParams) -> None:
    """Wherever no boundary is within rounding of the draw; that must be nearly everywhere."""
    random = np.random.default_rng([size, int(params.temperature * 10)])
    rows = 12
    logits = (random.standard_normal((rows, size)) * random.choice([0.5, 3.0], (rows, 1))).astype(np.float32)
    draws = [_sampler(params, size, seed).draws(1)[0] for seed in range(rows)]
    drawn = _sample(torch.from_numpy(logits), draws)
    clear = 0
    for seed, draw in enumerate(draws):
        assert draw is not None
        if _is_clear(params, logits[seed], draw.uniform):
            clear += 1
            assert _sampler(params, size, seed).sample(logits[seed]).token_id == drawn[seed]
    assert clear >= rows - 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", list(SamplingMode))
def test_greedy_rows_take_the_lowest_id_among_equals(dtype: torch.dtype, mode: SamplingMode) -> None:
    """In every mode, also where other rows draw; whatever else the options say."""
    logits = torch.randint(0, 4, (64, 500), generator=torch.Generator().manual_seed(1)).to(dtype)
    draws: list[TokenDraw | None] = [TokenDraw(0.0, 5, 0.5, 0.1, 0.9), None] * 32
    expected = [row.tolist().index(max(row.tolist())) for row in logits]
    assert _sample(logits, draws, mode) == expected


def test_top_k_keeps_the_lowest_ids_among_equals() -> None:
    """Exactly k tokens stay, and the draw runs over them in order of id."""
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 1.0]]).repeat(4, 1)
    draws: list[TokenDraw | None] = [TokenDraw(1e6, 4, 1.0, 0.0, uniform) for uniform in (0.1, 0.3, 0.6, 0.9)]
    assert _sample(logits, draws) == [0, 1, 2, 3]


def test_the_last_uniform_number_gives_the_last_token_with_a_weight() -> None:
    """Rounding must not push the draw beyond the distribution, or onto a token that is excluded."""
    logits = torch.tensor([[0.5, -math.inf, 0.1, -math.inf]])
    last = math.nextafter(1.0, 0.0)
    for draw in (TokenDraw(1.0, 0, 1.0, 0.0, last), TokenDraw(1.0, 3, 0.999, 0.0, last)):
        assert _sample(logits, [draw]) == [2]
    assert _sample(logits, [TokenDraw(1.0, 0, 1.0, 0.0, 0.0)]) == [0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("mode", list(SamplingMode))
def test_unusable_logits_give_no_token(bad: float, mode: SamplingMode) -> None:
    """The row says so, and its neighbours are not disturbed."""
    logits = torch.zeros((3, 20))
    logits[0, 7] = 30.0
    logits[1, 5] = bad
    logits[2] = -math.inf
    draw = TokenDraw(0.5, 4, 0.9, 0.0, 0.5)
    assert _sample(logits, [draw, draw, draw], mode) == [7, -1, -1]


def test_a_batch_mixes_options() -> None:
    """Each row gets the token it would get alone."""
    logits = torch.randn((8, 300), generator=torch.Generator().manual_seed(3))
    draws: list[TokenDraw | None] = [
        None,
        TokenDraw(1.0, 0, 1.0, 0.0, 0.42),
        TokenDraw(1.0, 5, 1.0, 0.0, 0.99),
        TokenDraw(1.0, 0, 0.5, 0.0, 0.7),
        TokenDraw(0.0, 5, 0.5, 0.0, 0.7),
        TokenDraw(1.0, 0, 1.0, 0.3, 0.7),
        TokenDraw(3.0, 50, 0.9, 0.01, 0.2),
        TokenDraw(1e9, 0, 1.0, 0.0, 0.5),
    ]
    alone = [_sample(logits[row : row + 1], [draw])[0] for row, draw in enumerate(draws)]
    assert _sample(logits, draws) == alone
    assert abs(alone[7] - 150) <= 1  # the middle of an even distribution


def test_the_least_mode_that_serves_all_rows() -> None:
    """Sorting costs the most, so it must not happen where nobody needs it."""
    packed = torch.empty((NUM_SETTINGS, 4), dtype=torch.float64)
    greedy, plain = TokenDraw(0.0, 5, 0.5, 0.1, 0.0), TokenDraw(1.0, 0, 1.0, 0.2, 0.3)
    assert pack_draws([None, greedy], packed) is SamplingMode.GREEDY
    assert pack_draws([greedy, plain], packed) is SamplingMode.DRAW
    assert packed[:, 1].tolist() == [1.0, 0.0, 1.0, 0.2, 0.3]
    assert packed[:, 3].tolist() == [0.0, 0.0, 1.0, 0.0, 0.0]
    assert pack_draws([TokenDraw(1.0, 3, 1.0, 0.0, 0.3), plain], packed) is SamplingMode.RANK
    assert pack_draws([TokenDraw(1.0, 0, 0.9, 0.0, 0.3)], packed) is SamplingMode.RANK


def test_a_large_vocabulary_does_not_overflow() -> None:
    """Even weights over 2**18 tokens: the count of each is a power of two, so the quantiles are exact."""
    size = 2**18
    logits = torch.zeros((3, size))
    draws: list[TokenDraw | None] = [TokenDraw(1.0, 0, 1.0, 0.0, uniform) for uniform in (0.25, 0.5, 0.75)]
    assert _sample(logits, draws) == [size // 4, size // 2, size // 4 * 3]
