"""Choosing the next token from logits, on the CPU, for any backend.

Order of operations, as in vLLM's sampler (`vllm/v1/sample/sampler.py`) unless said otherwise:

1. logit_bias is added.
2. repetition penalty over prompt and generated tokens: positive logits divided by it, negative ones multiplied
   (Keskar et al. 2019, "CTRL", section 4.1).
3. presence and frequency penalty over generated tokens only: ``logit -= presence * (count > 0) + frequency * count``
   (OpenAI API reference, "Frequency and presence penalties").
4. mask: only allowed tokens stay.
5. temperature; below 1e-5 the most likely token is taken and nothing is drawn, lowest id first among equals.
6. top_k: exactly k tokens stay, lowest ids first among equals (vLLM keeps all equals, llama.cpp exactly k).
7. min_p: tokens with at least min_p times the highest probability stay (Nguyen et al. 2024, "Min-p sampling").
   It commutes with top_k, because both keep the head of the same ranking, so vLLM's order gives the same set.
8. top_p: of what is left, renormalised, the smallest head with a mass of at least top_p (Holtzman et al. 2020,
   "The curious case of neural text degeneration").
9. Draw by inverting the cumulative distribution, tokens in order of id, with one uniform number per token.

Per-token cost matters: this runs in the model's thread. Nothing here sorts the vocabulary; see `_top_indices` and
`_nucleus` for how a cheap, exact bound cuts it down first.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kitelib.abc import TokenDraw
from kitelib.config import SamplingParams
from kitelib.errors import BackendStepError, InvalidSamplingError

__all__ = ["Sampled", "Sampler"]

_Floats = npt.NDArray[np.floating[Any]]
_Indices = npt.NDArray[np.intp]

# Beyond it every logit difference is zero anyway, and float32 could not hold much more.
_MAX_TEMPERATURE = 1e30
_DRAW_BLOCK = 512
_FOLD = 32
_NUM_INTERVALS = 512


@dataclasses.dataclass(frozen=True, slots=True)
class Sampled:
    """One chosen token.

    Attributes:
        token_id: the token.
        logprobs: None, or token id -> natural-log probability: the most likely tokens in falling order, then the
            chosen one if it is not among them. They are those of the model, before any sampling option.
    """

    token_id: int
    logprobs: dict[int, float] | None


class Sampler:
    """Chooses the tokens of one choice of one request.

    The result depends on the logits, the parameters, the pair (seed, choice) and the number of tokens drawn before,
    and on nothing else. Not thread-safe.

    Args:
        params: options; `params.seed` is not looked at.
        vocab_size: length of the logits.
        prompt_ids: token ids of the prompt; only read during construction.
        choice: index among the n choices of the request.
        seed: resolved seed of the request.

    Raises:
        InvalidSamplingError: a token id in the options or the prompt is outside the vocabulary.
    """

    __slots__ = (
        "_adjusts",
        "_ahead",
        "_bias_ids",
        "_bias_values",
        "_greedy",
        "_params",
        "_random",
        "_seen",
        "_temperature",
        "_vocab_size",
    )

    def __init__(
        self, params: SamplingParams, vocab_size: int, *, prompt_ids: Sequence[int], choice: int, seed: int
    ) -> None:
        _check_ids("logit_bias", params.logit_bias, vocab_size)
        _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
        self._params = params
        self._vocab_size = vocab_size
        self._temperature = min(float(params.temperature), _MAX_TEMPERATURE)
        self._greedy = params.greedy
        # Seeding costs more than a greedy step, which never draws.
        self._random = (
            None if self._greedy else np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, choice])))
        )
        self._ahead: deque[float] = deque()  # random numbers that were given to a backend and are not used up yet
        self._bias_ids: _Indices | None = None
        if params.logit_bias:
            self._bias_ids = np.fromiter(params.logit_bias.keys(), np.intp, len(params.logit_bias))
            values = np.fromiter(params.logit_bias.values(), np.float64, len(params.logit_bias))
            with np.errstate(over="ignore"):
                self._bias_values = values.astype(np.float32)
        self._seen: _TokenCounts | None = None
        if params.repetition_penalty != 1.0:
            _check_ids("prompt_ids", prompt_ids, vocab_size)
            self._seen = _TokenCounts(np.unique(np.asarray(prompt_ids, dtype=np.intp)))
        elif params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            self._seen = _TokenCounts(np.empty(0, dtype=np.intp))
        self._adjusts = self._bias_ids is not None or self._seen is not None

    @property
    def needs_logprobs(self) -> bool:
        """Whether `Sampled.logprobs` will be set."""
        return self._params.logprobs is not None

    def sample(self, logits: npt.NDArray[np.float32], mask: npt.NDArray[np.bool_] | None = None) -> Sampled:
        """Chooses the next token and records it.

        Args:
            logits: shape (vocab_size,); neither changed nor kept. -inf excludes a token.
            mask: shape (vocab_size,), True where a token is allowed; None allows all.

        Raises:
            BackendStepError: the logits hold NaN or +inf, nothing above -inf, or have the wrong length.
            InvalidSamplingError: the options and the mask together allow no token.
        """
        best, peak = self._peak(logits, mask)
        token = best if self._greedy and not self._adjusts and mask is None else self._choose(logits, mask)
        num_logprobs = self._params.logprobs
        logprobs = None if num_logprobs is None else _logprobs(logits, peak, num_logprobs, token)
        self.record(token)
        return Sampled(token, logprobs)

    def draws(self, count: int) -> tuple[TokenDraw, ...]:
        """What a backend needs to draw the next `count` tokens itself: the same ones, up to the rounding of its sums.
        Empty if these options need the logits here. Uses nothing up: `drawn` does, token by token."""
        if self._adjusts or self.needs_logprobs:
            return ()
        params = self._params
        options = (self._temperature, max(0, params.top_k), params.top_p, params.min_p)
        if self._random is None:
            return (TokenDraw(*options, 0.0),) * count
        while len(self._ahead) < count:
            self._ahead.append(float(self._random.random()))
        return tuple(TokenDraw(*options, self._ahead[place]) for place in range(count))

    def drawn(self, token_id: int) -> Sampled:
        """Takes a token that was chosen elsewhere: that a backend drew, or that is known from an earlier answer.

        Raises:
            BackendStepError: it is none of the vocabulary; a backend says so with -1 where the logits are not numbers.
        """
        if not 0 <= token_id < self._vocab_size:
            raise BackendStepError(f"the model gave unusable logits: the token drawn is {token_id}")
        if self._random is not None:
            self._uniform(self._random)
        self.record(token_id)
        return Sampled(token_id, None)

    def _uniform(self, random: np.random.Generator) -> float:
        """The next random number."""
        return self._ahead.popleft() if self._ahead else float(random.random())

    def record(self, token_id: int) -> None:
        """Counts a token that was not sampled here (a forced or a restored one) for the penalties; draws nothing."""
        if self._seen is not None:
            self._seen.add(token_id)

    def probabilities(
        self, logits: npt.NDArray[np.float32], mask: npt.NDArray[np.bool_] | None = None
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
        """The distribution that `sample` would draw from now; changes nothing.

        Returns:
            Ids of the tokens that can be drawn, ascending, shape (num_tokens,), and their probabilities.

        Raises:
            BackendStepError, InvalidSamplingError: as `sample`.
        """
        self._peak(logits, mask)
        if self._greedy:
            return np.array([self._choose(logits, mask)], dtype=np.intp), np.ones(1)
        with np.errstate(over="ignore", invalid="ignore"):
            ids, weights = self._filter(*self._allowed_scores(logits, mask))
        possible = np.flatnonzero(weights)
        chances = weights[possible].astype(np.float64)
        return possible if ids is None else ids[possible], chances / chances.sum()

    def _peak(self, logits: npt.NDArray[np.float32], mask: npt.NDArray[np.bool_] | None) -> tuple[int, float]:
        """Index and value of the largest logit, once both arrays were found usable."""
        if logits.shape != (self._vocab_size,):
            raise BackendStepError(f"the logits have shape {logits.shape}, the vocabulary {self._vocab_size} tokens")
        if mask is not None and mask.shape != logits.shape:
            raise InvalidSamplingError(f"the mask has shape {mask.shape}, the vocabulary {self._vocab_size} tokens")
        # argmax stops at a NaN, so that looking at the maximum alone finds every NaN.
        best = int(logits.argmax())
        peak = float(logits[best])
        if not math.isfinite(peak):
            raise BackendStepError(f"the model gave unusable logits: the largest, of token {best}, is {peak}")
        return best, peak

    def _choose(self, logits: npt.NDArray[np.float32], mask: npt.NDArray[np.bool_] | None) -> int:
        with np.errstate(over="ignore", invalid="ignore"):
            if self._random is not None:
                ids, weights = self._filter(*self._allowed_scores(logits, mask))
                index = _invert(weights, self._uniform(self._random))
                return index if ids is None else int(ids[index])
            if mask is not None and not self._adjusts and mask[best := int(logits.argmax())]:
                return best  # what the model wants is mostly allowed
            scores, allowed = self._allowed_scores(logits, mask)
            best = int(scores.argmax())
            return best if allowed is None else int(allowed[best])

    def _allowed_scores(
        self, logits: npt.NDArray[np.float32], mask: npt.NDArray[np.bool_] | None
    ) -> tuple[npt.NDArray[np.float32], _Indices | None]:
        """Logits after bias, penalties and mask, and the token ids they belong to (None: all)."""
        scores = self._adjust(logits) if self._adjusts else logits
        allowed: _Indices | None = None
        if mask is not None:
            # Indices and `take`: several times faster than `where` on a mask that is neither empty nor full.
            allowed = np.flatnonzero(mask)
            if allowed.size == 0:
                raise InvalidSamplingError("the constraint allows no token here; check the json_schema or regex")
            scores = scores.take(allowed)
        if scores.max() == -np.inf:
            raise InvalidSamplingError(
                "every token that the constraint allows is ruled out by logit_bias or by the model; allow at least one"
            )
        return scores, allowed

    def _adjust(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        scores: npt.NDArray[np.float32] = logits.copy()
        if self._bias_ids is not None:
            biased = scores[self._bias_ids] + self._bias_values
            # -inf + inf: what the model rules out stays out.
            biased[np.isnan(biased)] = -np.inf
            scores[self._bias_ids] = biased
        if self._seen is not None:
            params = self._params
            ids, counts = self._seen.arrays()
            seen = scores[ids]
            if params.repetition_penalty != 1.0:
                factor = np.float32(params.repetition_penalty)
                seen = np.where(seen > 0, seen / factor, seen * factor)
            if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
                seen -= np.float32(params.presence_penalty) * (counts > 0)
                seen -= np.float32(params.frequency_penalty) * counts
            scores[ids] = seen
        return scores

    def _filter(self, scores: npt.NDArray[np.float32], ids: _Indices | None) -> tuple[_Indices | None, _Floats]:
        """Temperature, top_k, min_p and top_p: ids of the tokens left (None: all), and unnormalised probabilities."""
        params = self._params
        peak = float(scores.max())
        if peak == math.inf:  # an infinite logit_bias: an even choice among those tokens
            scores, peak = np.where(scores == np.inf, np.float32(0), np.float32(-np.inf)), 0.0
        values: _Floats = scores
        if 0 < params.top_k < values.size:
            ids, values = _narrow(_top_indices(values, params.top_k), ids, values)
        elif params.min_p > 0:
            # A little lower than the true limit, so that float32 rounding can't lose a token; exact below.
            limit = peak + self._temperature * math.log(params.min_p)
            limit -= 1e-5 * (1.0 + abs(limit) + abs(peak))
            ids, values = _narrow(np.flatnonzero(values >= np.float32(limit)), ids, values)
        weights = _weights(values, peak, self._temperature)
        if params.min_p > 0:
            ids, values, weights = _narrow(np.flatnonzero(weights >= params.min_p), ids, values, weights)
        if params.top_p < 1.0:
            ids, weights = _narrow(_nucleus(values, weights, params.top_p), ids, weights)
        return ids, weights


class _TokenCounts:
    """Distinct token ids and how often each was generated, as arrays that grow by doubling."""

    __slots__ = ("_counts", "_ids", "_size", "_slots")

    def __init__(self, initial_ids: _Indices) -> None:
        self._size = initial_ids.size
        self._ids = np.zeros(max(64, 2 * self._size), dtype=np.intp)
        self._ids[: self._size] = initial_ids
        self._counts = np.zeros(self._ids.size, dtype=np.float32)
        self._slots = {token: slot for slot, token in enumerate(initial_ids.tolist())}

    def add(self, token_id: int) -> None:
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._size
            if slot == self._ids.size:
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[slot] = token_id
            self._slots[token_id] = slot
            self._size += 1
        self._counts[slot] += 1

    def arrays(self) -> tuple[_Indices, npt.NDArray[np.float32]]:
        """Views of ids and counts, shape (num_distinct,)."""
        return self._ids[: self._size], self._counts[: self._size]


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidSamplingError(f"{name} holds token id {token}; the vocabulary has ids 0 to {vocab_size - 1}")


def _narrow(chosen: _Indices, ids: _Indices | None, *arrays: _Floats) -> tuple[Any, ...]:
    """`ids` (None: all) and `arrays`, cut down to the chosen indices."""
    return chosen if ids is None else ids.take(chosen), *(array.take(chosen) for array in arrays)


def _weights(scores: _Floats, peak: float, temperature: float) -> _Floats:
    """Unnormalised probabilities, the largest 1. float64 for short arrays; float32, several times faster, for whole
    vocabularies, where its relative error of about 1e-6 moves no one's odds."""
    wide = np.float32 if scores.size > 4096 else np.float64
    weights: _Floats = np.subtract(scores, wide(peak), dtype=wide)
    if temperature != 1.0:
        weights *= wide(1.0 / temperature)
    np.exp(weights, out=weights)
    return weights


def _top_indices(values: _Floats, count: int) -> _Indices:
    """Indices of exactly `count` largest values (0 < count <= size), lowest indices first among equals; ascending.

    Long arrays are folded into columns first: the count-th largest column maximum is a lower bound of the count-th
    largest value, because each of those columns holds one value that large. Few values pass it.
    """
    pool: _Indices | None = None
    num_columns = values.size // _FOLD
    if count * 4 <= num_columns:
        maxima = values[: num_columns * _FOLD].reshape(_FOLD, num_columns).max(axis=0)
        bound = np.partition(maxima, num_columns - count)[num_columns - count]
        pool = np.flatnonzero(values >= bound)
        values = values.take(pool)
    limit = np.partition(values, values.size - count)[values.size - count]
    keep = values > limit
    equals = np.flatnonzero(values == limit)
    keep[equals[: count - np.count_nonzero(keep)]] = True
    chosen = np.flatnonzero(keep)
    return chosen if pool is None else pool.take(chosen)


def _nucleus(scores: _Floats, weights: _Floats, top_p: float) -> _Indices:
    """Indices, ascending, of the smallest head of the ranking by score whose weights sum to top_p of the total.

    Tokens below (1 - top_p) / size of the total together weigh less than 1 - top_p, so the head lies among the
    others. Those are counted into intervals of score, so that only the interval where the head ends is sorted.
    """
    total = float(weights.sum(dtype=np.float64))
    missing = top_p * total
    # The margin keeps the bound a bound after rounding to float32.
    pool = np.flatnonzero(weights >= weights.dtype.type(total * (1.0 - top_p) / weights.size * (1.0 - 1e-6)))
    pool_scores = scores.take(pool)
    sure = np.empty(0, dtype=np.intp)
    low, high = pool_scores.min(), pool_scores.max()
    if pool.size > 2 * _NUM_INTERVALS and high > low:
        # Distance from the top, so that interval 0 is the most likely; rounding keeps the order.
        interval = ((high - pool_scores) * ((_NUM_INTERVALS - 1) / (high - low))).astype(np.intp)
        masses = np.cumsum(np.bincount(interval, weights=weights.take(pool)))
        last = min(int(np.searchsorted(masses, missing)), masses.size - 1)
        missing -= float(masses[last - 1]) if last else 0.0
        sure = pool[interval < last]
        inside = interval == last
        pool, pool_scores = pool[inside], pool_scores[inside]
    ranked = pool[np.argsort(-pool_scores, kind="stable")]
    cumulative = np.cumsum(weights.take(ranked), dtype=np.float64)
    return np.sort(np.concatenate([sure, ranked[: int(np.searchsorted(cumulative, missing)) + 1]]))


def _invert(weights: _Floats, uniform: float) -> int:
    """First index at which the cumulative weight, float64, exceeds `uniform` (in [0, 1)) times the total."""
    start = 0
    if weights.size > 2 * _DRAW_BLOCK:
        # Two levels: a running sum in float64 over the whole vocabulary would cost more than the exponentials.
        num_blocks = weights.size // _DRAW_BLOCK
        covered = num_blocks * _DRAW_BLOCK
        sums = np.empty(num_blocks + 1)
        np.sum(weights[:covered].reshape(num_blocks, _DRAW_BLOCK), axis=1, dtype=np.float64, out=sums[:num_blocks])
        sums[num_blocks] = weights[covered:].sum(dtype=np.float64)
        cumulative = np.cumsum(sums)
        target = uniform * float(cumulative[-1])
        block = _first_above(cumulative, target)
        target -= float(cumulative[block - 1]) if block else 0.0
        start = block * _DRAW_BLOCK
        weights = weights[start : start + _DRAW_BLOCK]
        return start + _first_above(np.cumsum(weights, dtype=np.float64), target)
    cumulative = np.cumsum(weights, dtype=np.float64)
    return _first_above(cumulative, uniform * float(cumulative[-1]))


def _first_above(cumulative: npt.NDArray[np.float64], target: float) -> int:
    index = int(np.searchsorted(cumulative, target, side="right"))
    # Rounding can put the target on the total: then the last index with a weight.
    return index if index < cumulative.size else int(np.searchsorted(cumulative, cumulative[-1]))


def _logprobs(logits: npt.NDArray[np.float32], peak: float, count: int, token: int) -> dict[int, float]:
    with np.errstate(over="ignore"):
        exponentials = np.subtract(logits, np.float32(peak))
    np.exp(exponentials, out=exponentials)
    norm = peak + math.log(float(exponentials.sum(dtype=np.float64)))
    result: dict[int, float] = {}
    if count:
        top = _top_indices(logits, min(count, logits.size))
        values = logits.take(top)
        for index in np.argsort(-values, kind="stable").tolist():
            if values[index] > -np.inf:
                result[int(top[index])] = float(values[index]) - norm
    result.setdefault(token, float(logits[token]) - norm)
    return result
