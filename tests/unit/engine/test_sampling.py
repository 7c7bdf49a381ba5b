from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kitelib.config import SamplingParams
from kitelib.engine.sampling import Sampler
from kitelib.errors import BackendStepError, InvalidSamplingError

INF = float("inf")


def make(vocab_size: int, *, prompt_ids: Any = (), choice: int = 0, seed: int = 1, **options: Any) -> Sampler:
    return Sampler(SamplingParams(**options), vocab_size, prompt_ids=prompt_ids, choice=choice, seed=seed)


def array(*values: float) -> npt.NDArray[np.float32]:
    logits = np.array(values, dtype=np.float32)
    logits.setflags(write=False)  # a sampler that writes to shared logits fails loudly
    return logits


def random_logits(vocab_size: int, seed: int = 0, spread: float = 3.0) -> npt.NDArray[np.float32]:
    return array(*np.random.default_rng(seed).normal(0, spread, vocab_size))


def adjusted(
    params: SamplingParams, prompt_ids: list[int], generated: list[int], logits: npt.NDArray[np.float32]
) -> list[np.float32]:
    """Steps 1 to 3, one token after the other, in the precision of the logits."""
    scores = list(logits)
    for token, bias in params.logit_bias.items():
        scores[token] = np.float32(-INF) if scores[token] == -INF else scores[token] + np.float32(bias)
    for token in set(prompt_ids) | set(generated):
        factor = np.float32(params.repetition_penalty)
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in set(generated):
        scores[token] -= np.float32(params.presence_penalty)
        scores[token] -= np.float32(params.frequency_penalty) * np.float32(generated.count(token))
    return scores


def reference(
    params: SamplingParams, scores: list[np.float32], mask: npt.NDArray[np.bool_] | None
) -> tuple[dict[int, float], float]:
    """Steps 4 to 8 by sorting everything: token -> probability, and how near the closest decision was."""
    tokens = [t for t in range(len(scores)) if (mask is None or mask[t]) and scores[t] > -INF]
    ranking = sorted(tokens, key=lambda t: (-scores[t], t))
    if params.temperature < 1e-5:
        return {ranking[0]: 1.0}, INF
    ranking = ranking[: params.top_k or None]
    peak = float(scores[ranking[0]])
    weight = {t: math.exp((float(scores[t]) - peak) / params.temperature) for t in ranking}
    closest = INF
    if params.min_p > 0:
        closest = min((abs(weight[t] - params.min_p) for t in ranking if weight[t] != params.min_p), default=INF)
        ranking = [t for t in ranking if weight[t] >= params.min_p]
    total = sum(weight[t] for t in ranking)
    if params.top_p < 1:
        kept, mass = [], 0.0
        for token in ranking:
            kept.append(token)
            mass += weight[token] / total
            closest = min(closest, abs(mass - params.top_p))
            if mass >= params.top_p:
                break
        ranking = kept
    total = sum(weight[t] for t in ranking)
    return {t: weight[t] / total for t in ranking if weight[t] > 0}, closest


def assert_same(sampler: Sampler, logits: npt.NDArray[np.float32], mask: Any, expected: dict[int, float]) -> None:
    ids, chances = sampler.probabilities(logits, mask)
    assert ids.tolist() == sorted(expected)
    np.testing.assert_allclose(chances, [expected[t] for t in ids.tolist()], rtol=2e-4, atol=1e-9)
    assert chances.sum() == pytest.approx(1.0)


@st.composite
def cases(draw: st.DrawFn) -> tuple[SamplingParams, list[int], list[int], npt.NDArray[np.float32], Any]:
    size = draw(st.integers(1, 30))
    # A coarse grid makes equal logits common.
    grid = st.integers(-40, 40).map(lambda i: i / 4) | st.just(-INF)
    logits = array(*draw(st.lists(grid, min_size=size, max_size=size)))
    ids = st.lists(st.integers(0, size - 1), max_size=12)
    mask = draw(st.none() | hnp.arrays(np.bool_, size))
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-7, 0.3, 0.8, 1.0, 2.0, 50.0])),
        top_k=draw(st.sampled_from([0, 0, 1, 2, 5, 29, 100])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.01, 0.5, 0.77, 0.95, 0.999])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.001, 0.11, 0.5, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.7, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, -1.5, 0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, -0.25, 2.0])),
        logit_bias=draw(st.dictionaries(st.integers(0, size - 1), st.sampled_from([-INF, -2.5, 1.0, 3.0]), max_size=3)),
    )
    return params, draw(ids), draw(ids), logits, mask


@settings(max_examples=600, deadline=None)
@given(cases())
def test_distribution_equals_a_reference_that_sorts_everything(case: Any) -> None:
    params, prompt_ids, generated, logits, mask = case
    assume(logits.max() > -INF)
    sampler = Sampler(params, logits.size, prompt_ids=prompt_ids, choice=0, seed=3)
    for token in generated:
        sampler.record(token)
    scores = adjusted(params, prompt_ids, generated, logits)
    if all(scores[t] == -INF for t in range(logits.size) if mask is None or mask[t]):
        with pytest.raises(InvalidSamplingError):
            sampler.sample(logits, mask)
        return
    expected, closest = reference(params, scores, mask)
    assume(closest > 1e-6)  # nearer than that, rounding may decide either way
    assert_same(sampler, logits, mask, expected)
    assert sampler.sample(logits, mask).token_id in expected


@pytest.mark.parametrize("vocab_size", [3000, 4097, 49152])
@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 1},
        {"top_k": 40},
        {"top_k": 2000},
        {"top_p": 0.9},
        {"top_p": 0.999999},
        {"min_p": 0.02},
        {"top_k": 300, "top_p": 0.8, "min_p": 0.001},
    ],
)
def test_distribution_of_large_vocabularies(vocab_size: int, spread: float, options: dict[str, Any]) -> None:
    logits = random_logits(vocab_size, seed=vocab_size, spread=spread)
    params = SamplingParams(temperature=0.8, **options)
    expected, _ = reference(params, list(logits), None)
    sampler = make(vocab_size, temperature=0.8, **options)
    if params.top_p == 1:
        assert_same(sampler, logits, None, expected)
        return
    # Among so many tokens rounding may move the end of the nucleus by a few.
    ids, chances = sampler.probabilities(logits)
    assert len(set(ids.tolist()) ^ set(expected)) <= 2 + 2e-6 * vocab_size / (1 - params.top_p)
    np.testing.assert_allclose(chances, [expected.get(t, 0.0) for t in ids.tolist()], rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("vocab_size", [7, 1000, 20000])
def test_equal_logits_keep_the_lowest_ids(vocab_size: int) -> None:
    logits = array(*[0.5] * vocab_size)
    assert make(vocab_size).sample(logits).token_id == 0
    assert make(vocab_size, temperature=1.0, top_k=5).probabilities(logits)[0].tolist() == [0, 1, 2, 3, 4]
    half = make(vocab_size, temperature=1.0, top_p=0.5).probabilities(logits)[0]
    assert half.tolist() == list(range(math.ceil(vocab_size / 2)))
    assert make(vocab_size, temperature=1.0, min_p=1.0).probabilities(logits)[0].size == vocab_size


@pytest.mark.parametrize("vocab_size", [5, 1024, 1025, 5000, 49152])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 64}])
def test_one_uniform_number_per_token_inverts_the_distribution(vocab_size: int, options: dict[str, Any]) -> None:
    sampler = make(vocab_size, seed=2**63 + 5, choice=3, temperature=1.1, **options)
    random = np.random.Generator(np.random.Philox(np.random.SeedSequence([2**63 + 5, 3])))
    for step in range(20):
        logits = random_logits(vocab_size, seed=step)
        ids, chances = sampler.probabilities(logits)
        expected = ids[np.searchsorted(np.cumsum(chances), random.random(), side="right")]
        assert sampler.sample(logits).token_id == expected


def test_draws_depend_on_seed_choice_and_number_of_draws_only() -> None:
    logits = random_logits(500)

    def tokens(seed: int, choice: int) -> list[int]:
        sampler = make(500, seed=seed, choice=choice, temperature=1.0)
        return [sampler.sample(logits).token_id for _ in range(30)]

    assert tokens(7, 0) == tokens(7, 0)
    assert len({tuple(tokens(7, 0)), tuple(tokens(7, 1)), tuple(tokens(8, 0))}) == 3
    # Other logits, masks and forced tokens before do not move the generator; neither does asking for probabilities.
    sampler = make(500, seed=7, temperature=1.0)
    only = np.zeros(500, dtype=np.bool_)
    only[3] = True
    for step in range(10):
        sampler.record(step)
        sampler.probabilities(logits)
        assert sampler.sample(random_logits(500, seed=step), only).token_id == 3
    assert [sampler.sample(logits).token_id for _ in range(20)] == tokens(7, 0)[10:]


def test_frequencies_match_the_probabilities() -> None:
    logits = random_logits(40, spread=1.5)
    sampler = make(40, temperature=0.7, top_p=0.95)
    ids, chances = sampler.probabilities(logits)
    draws = 20000
    counts = np.bincount([sampler.sample(logits).token_id for _ in range(draws)], minlength=40)
    assert set(np.flatnonzero(counts).tolist()) <= set(ids.tolist())
    deviation = np.abs(counts[ids] - draws * chances) / np.sqrt(draws * chances * (1 - chances))
    assert deviation.max() < 5


def test_penalties_follow_what_was_sampled() -> None:
    logits = array(2.0, 1.9, 1.0, -1.0)
    sampler = make(4, frequency_penalty=0.25)
    assert [sampler.sample(logits).token_id for _ in range(5)] == [0, 1, 0, 1, 0]
    sampler = make(4, presence_penalty=0.5)
    assert [sampler.sample(logits).token_id for _ in range(4)] == [0, 1, 0, 0]
    assert make(4, presence_penalty=2.0, prompt_ids=[0, 1]).sample(logits).token_id == 0
    assert make(4, repetition_penalty=2.5, prompt_ids=[0, 1, 1]).sample(logits).token_id == 2
    # Negative logits are multiplied.
    assert make(2, repetition_penalty=2.0, prompt_ids=[0]).sample(array(-1.0, -1.5)).token_id == 1


def test_penalties_over_many_distinct_tokens() -> None:
    logits = random_logits(1000)
    sampler = make(1000, presence_penalty=2.0, frequency_penalty=2.0)
    tokens = [sampler.sample(logits).token_id for _ in range(300)]
    scores = list(logits)
    for token in tokens:
        assert token == int(np.argmax(scores))
        scores[token] -= np.float32(2.0 if scores[token] < logits[token] else 4.0)


def test_infinite_bias_forces_and_forbids() -> None:
    logits = array(1.0, 5.0, -INF, 2.0)
    assert make(4, logit_bias={1: -INF}).sample(logits).token_id == 3
    assert make(4, logit_bias={0: INF}).sample(logits).token_id == 0
    assert make(4, logit_bias={0: 1e300}).sample(logits).token_id == 0
    ids, chances = make(4, temperature=0.5, logit_bias={0: INF, 3: INF}, top_p=0.9).probabilities(logits)
    assert (ids.tolist(), chances.tolist()) == ([0, 3], [0.5, 0.5])
    # What the model rules out stays out.
    assert make(4, logit_bias={2: INF}).sample(logits).token_id == 1


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2, "top_p": 0.5}])
def test_mask_decides_and_may_leave_nothing(options: dict[str, Any]) -> None:
    logits = array(9.0, 1.0, -INF, 0.0)
    assert make(4, **options).sample(logits, np.array([False, False, True, True])).token_id == 3
    with pytest.raises(InvalidSamplingError, match="allows no token"):
        make(4, **options).sample(logits, np.zeros(4, dtype=np.bool_))
    with pytest.raises(InvalidSamplingError, match="ruled out"):
        make(4, **options).sample(logits, np.array([False, False, True, False]))
    with pytest.raises(InvalidSamplingError, match="shape"):
        make(4, **options).sample(logits, np.ones(3, dtype=np.bool_))


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0}, {"logit_bias": {0: 1.0}, "logprobs": 2}])
@pytest.mark.parametrize("vocab_size", [3, 50, 5003])
def test_unusable_logits_are_the_backends_fault(vocab_size: int, options: dict[str, Any]) -> None:
    sampler = make(vocab_size, **options)
    for position in {0, vocab_size // 2, vocab_size - 1}:
        for bad in (math.nan, INF):
            logits = random_logits(vocab_size).copy()
            logits[position] = bad
            with pytest.raises(BackendStepError, match=f"token {position}, is {bad}"):
                sampler.sample(logits)
    with pytest.raises(BackendStepError, match="is -inf"):
        sampler.sample(np.full(vocab_size, -INF, dtype=np.float32))
    with pytest.raises(BackendStepError, match="shape"):
        sampler.sample(random_logits(vocab_size + 1))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"logit_bias": {10: 1.0}}, "logit_bias"),
        ({"stop_token_ids": [3, 99]}, "stop_token_ids"),
        ({"prompt_ids": [1, 10], "repetition_penalty": 1.1}, "prompt_ids"),
        ({"prompt_ids": [-1], "repetition_penalty": 1.1}, "prompt_ids"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidSamplingError, match=rf"{name} holds token id .* 0 to 9"):
        make(10, **options)


@pytest.mark.parametrize("vocab_size", [12, 49152])
@pytest.mark.parametrize("count", [0, 1, 5, 100])
def test_logprobs_are_those_of_the_model(vocab_size: int, count: int) -> None:
    logits = random_logits(vocab_size).copy()
    logits[:3] = -INF
    wide = logits.astype(np.float64)
    exact = wide - wide.max() - math.log(np.exp(wide - wide.max()).sum())
    ranking = sorted(range(vocab_size), key=lambda t: (-logits[t], t))
    sampler = make(vocab_size, logprobs=count, logit_bias={ranking[7]: 100.0}, temperature=0.5, top_p=0.5)
    sampled = sampler.sample(logits)
    assert sampled.token_id == ranking[7]
    assert sampled.logprobs is not None
    top = [t for t in ranking[:count] if logits[t] > -INF]
    assert list(sampled.logprobs) == (top if ranking[7] in top else [*top, ranking[7]])
    for token, value in sampled.logprobs.items():
        assert value == pytest.approx(exact[token], abs=2e-6)


def test_logprobs_only_on_request() -> None:
    assert make(4, logprobs=0).needs_logprobs
    assert not make(4).needs_logprobs
    assert make(4).sample(array(1, 2, 3, 4)).logprobs is None
    assert make(4, logprobs=3).sample(array(0, -200, 0, -INF)).logprobs == pytest.approx(
        {0: -math.log(2), 2: -math.log(2), 1: -200 - math.log(2)}
    )


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1e3, 1e300])
def test_extreme_values_neither_warn_nor_fail(temperature: float) -> None:
    logits = array(3e38, -3e38, -INF, 3e38, 0.0)
    for options in ({}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 3, "frequency_penalty": 2.0}, {"logprobs": 5}):
        sampler = make(5, temperature=temperature, **options)
        assert all(sampler.sample(logits).token_id != 2 for _ in range(20))
