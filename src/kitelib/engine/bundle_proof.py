"""Proof that a bundle is right: every prompt in it is restored and computed cold as well, and both are compared."""

from __future__ import annotations

import dataclasses
import functools
import os
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from kitelib.config import ReusePolicy, SamplingParams
from kitelib.engine.bundle_collecting import ComputedPrompt, units_of
from kitelib.engine.bundle_runs import BundleRun, runs_of
from kitelib.engine.results import Generation
from kitelib.errors import ConfigError, FormatError
from kitelib.fingerprint import BlockChain, Fingerprint, short
from kitelib.stores.pinned import PINNED
from kitelib.upcycle.bundle import Bundle, BundleUnit
from kitelib.upcycle.unit import RecyclableUnit
from kitelib.yoco.completions import sampling_key

if TYPE_CHECKING:
    from kitelib.engine.engine import KiteEngine

__all__ = ["KV_BOUND", "LOGITS_BOUND", "TIE", "BundleProof", "RunProof", "prove_bundle"]

# With standard numerics the same tokens give other low bits, depending on the kernels and on how a prompt was cut.
# Measured with SmolLM2-135M (weights of 4 bits, and bfloat16) and Gemma 3 270M (4 bits), prompts of 100 to 200 tokens
# computed at once and in five pieces: KV differs by up to 0.09 of its norm in the worst layer, a logit by up to 1.4. KV
# of other tokens differs by 1.3 of its norm and more in some layer, and KV of the same tokens just after another one by
# 0.5; logits of other prompts by 10 and more.
KV_BOUND: Final = 0.3
"""Largest difference of KV between a bundle and a cold run, as a share of the norm, per layer; standard numerics."""
LOGITS_BOUND: Final = 3.0
"""Largest difference of a logit, or of a log-probability; standard numerics."""
TIE: Final = 1.5
"""How much less likely the token that is chosen may be than the likeliest of the cold run; standard numerics."""

_LOGPROBS: Final = 100
_CHUNK: Final = 4096  # elements that are compared together where a layout doesn't tell the layers apart

Progress = Callable[[str, float], None]


@dataclasses.dataclass(frozen=True, slots=True)
class RunProof:
    """What was found out about one prompt of a bundle.

    Attributes:
        number: from 1.
        tokens: its tokens.
        namespace, adapter: whose it is; names, None for the engine's own and for none.
        cached_tokens: tokens that a request took from the bundle.
        expected_tokens: what that must be.
        kv_difference: largest difference of its KV from a cold run's, as a share of the norm; None if that can't be told.
        logits_difference: largest difference of a log-probability between a request that used the bundle and a cold one.
        stored_difference: largest difference between the stored logits and a cold run's; None if none are stored.
        answer_tokens: tokens of a stored answer that were checked.
        problems: what is wrong, one sentence each; empty if nothing is.
    """

    number: int
    tokens: int
    namespace: str | None
    adapter: str | None
    cached_tokens: int
    expected_tokens: int
    kv_difference: float | None
    logits_difference: float
    stored_difference: float | None
    answer_tokens: int
    problems: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class BundleProof:
    """What was found out about a bundle.

    Attributes:
        numerics: "bitwise": bits were compared; "standard": values, within the bounds of this module.
        runs: one per prompt.
        problems: what is wrong with the bundle as a whole, one sentence each.
        unchecked: stored completions that say nothing that could be checked: guesses, and answers to other sampling
            options than the default ones.
    """

    numerics: str
    runs: tuple[RunProof, ...]
    problems: tuple[str, ...]
    unchecked: int

    @property
    def ok(self) -> bool:
        """Whether everything is as it must be."""
        return not self.problems and not any(run.problems for run in self.runs)


async def prove_bundle(
    engine: KiteEngine,
    path: str | os.PathLike[str],
    *,
    require_signature: bool = False,
    trusted_keys: Sequence[str | bytes] = (),
    progress: Progress | None = None,
) -> BundleProof:
    """Loads a bundle and computes each of its prompts twice: with what the bundle has, and cold.

    It checks that a request takes exactly as many tokens from the bundle as it must, that the log-probabilities after
    the prompt are the same, that all KV and the logits in the bundle are those of the cold run, and that a stored answer
    to default options is what the model says. Equal means equal bits if the engine's numerics are bitwise, else within
    `KV_BOUND`, `LOGITS_BOUND` and `TIE`.

    Args:
        engine: opened for this only: it must have memory and no outer tiers, and is emptied between the runs.
        path: the bundle.
        require_signature, trusted_keys: as of `Bundle.open`.
        progress: called with what is being done and the done share of all, 0 to 1.

    Raises:
        ConfigError: the engine has outer tiers, or keeps nothing.
        BundleError: the bundle can't be loaded into this engine; see `KiteEngine.preload`.
        KiteError: computing failed.
    """
    if engine.pool.tiers.tiers or not engine.pool.memory.max_bytes:
        raise ConfigError("a bundle is proved by an engine with memory and without outer tiers; open one for it")
    trust: dict[str, Any] = {"require_signature": require_signature, "trusted_keys": trusted_keys}
    key = engine._pool_config.hmac_key
    bundle = await engine._door.run(
        lambda: Bundle.open(path, hmac_key=key, **trust), discard=lambda opened: opened.close()
    )
    try:
        loaded = await engine.preload(path, accept_stale=True, **trust)
        try:
            if loaded["digest"] != bundle.digest:
                raise FormatError(f"the bundle {bundle.path!r} was replaced while it was opened; try again")
            return await _Prover(engine, bundle).prove(progress)
        finally:
            await engine.unload(path)
    finally:
        bundle.close()


class _Prover:
    def __init__(self, engine: KiteEngine, bundle: Bundle) -> None:
        self._engine = engine
        self._bundle = bundle
        self._serving = engine._current
        self._info = self._serving.backend.info
        exact = engine._pool_config.kv_precision == "exact" and engine.reuse.numerics == "bitwise"
        self._bitwise = exact and self._info.numerics == "bitwise"
        self._units = {(unit.kind, bytes(unit.cf)): unit for unit in bundle.units}
        self._compared: dict[BundleUnit, float | None] = {}
        self._answers: set[BundleUnit] = set()

    async def prove(self, progress: Progress | None) -> BundleProof:
        runs, unreachable = await self._engine._door.run(lambda: runs_of(self._bundle.manifest))
        problems = [
            f"the {unit.kind} unit {short(unit.cf)} can't be proved: what comes before it is not in the bundle"
            for unit in unreachable
        ]
        usable = self._usable_roots()
        foreign = sum(1 for unit in self._bundle.units if unit.root not in usable)
        if foreign:
            problems.append(
                f"{foreign} units can't be proved: they are of adapters or namespaces that this engine does not have"
            )
        runs = [run for run in runs if run.root in usable]
        total, done, proofs = sum(run.num_tokens for run in runs), 0, []
        for number, run in enumerate(runs, 1):
            if progress is not None:
                progress(f"computing prompt {number} of {len(runs)}", done / max(1, total))
            proofs.append(await self._prove_run(number, run))
            done += run.num_tokens
        unchecked = sum(1 for unit in self._bundle.units if unit.kind == "completion" and unit not in self._answers)
        return BundleProof("bitwise" if self._bitwise else "standard", tuple(proofs), tuple(problems), unchecked)

    def _usable_roots(self) -> set[int]:
        roots = self._bundle.manifest.roots
        return {
            index
            for index, root in enumerate(roots)
            if self._serving.root_of(root.namespace, root.adapter) == root.root
        }

    async def _prove_run(self, number: int, run: BundleRun) -> RunProof:
        root = self._bundle.manifest.roots[run.root]
        adapter = next(
            (name for name, state in self._serving.backend.adapter_states.items() if state == root.adapter), None
        )
        check = _RunCheck(self, run, root.namespace, adapter)
        limit = self._info.context_tokens - 1
        if len(check.tokens) > limit:
            check.problems.append(f"the prompt has {len(check.tokens)} tokens, but {limit} fit; give a larger n_ctx")
        else:
            await check.run_all()
        return RunProof(
            number,
            len(check.tokens),
            root.namespace,
            adapter,
            check.cached,
            check.expected,
            check.kv_difference,
            check.logits_difference,
            check.stored_difference,
            check.answer_tokens,
            tuple(check.problems),
        )

    async def empty(self) -> None:
        """Nothing can be reused any more but the bundle."""
        await self._engine.flush()
        await self._serving.on_model_thread(self._serving.scheduler.invalidate)
        self._engine.pool.memory.clear()

    def read(self, unit: BundleUnit) -> RecyclableUnit:
        return self._bundle.read(unit, full=True)


class _RunCheck:
    """One prompt."""

    def __init__(self, prover: _Prover, run: BundleRun, namespace: str | None, adapter: str | None) -> None:
        self._prover = prover
        self._run = run
        self.tokens = run.tokens()
        self._adapter = adapter
        engine = prover._engine
        numerics = engine.reuse.numerics
        self._hot = ReusePolicy(drafts=False, zero_prefill=False, numerics=numerics, namespace=namespace)
        # A namespace that nobody has ever had is as good as mode="off", and its units can be compared.
        self._cold = dataclasses.replace(self._hot, namespace=f"kite.proof.{secrets.token_hex(16)}")
        self.problems: list[str] = []
        self.cached = 0
        self.expected = 0
        self.kv_difference: float | None = None
        self.logits_difference = 0.0
        self.stored_difference: float | None = None
        self.answer_tokens = 0

    async def run_all(self) -> None:
        cold = await self._compute_cold()
        await self._check_restored(cold)
        if self._run.logits is not None:
            await self._check_logits(cold)

    async def _generate(self, tokens: list[int], policy: ReusePolicy, **options: Any) -> Generation:
        engine = self._prover._engine
        return await engine.generate(tokens, max_tokens=1, reuse=policy, adapter=self._adapter, **options)

    async def _compute_cold(self) -> Generation:
        """Computes the prompt without the bundle, and compares what that leaves with what is in the bundle."""
        prover, run = self._prover, self._run
        engine, size = prover._engine, prover._info.block_tokens
        await prover.empty()
        cold = await self._generate(self.tokens, self._cold, logprobs=_LOGPROBS, ignore_eos=True)
        if cold.usage.cached_tokens:
            self.problems.append(f"the cold run reused {cold.usage.cached_tokens} tokens")
        await engine.flush()
        chain = BlockChain(prover._serving.root(self._cold, self._adapter), size, self.tokens)
        computed = ComputedPrompt(self.tokens, chain, self._cold, self._adapter)
        own = [*run.blocks, *([run.tail] if run.tail is not None else [])]
        units = iter(own)
        async for batch in units_of(engine, computed, logits=run.logits is not None):
            for fresh in batch:
                unit = run.logits if fresh.kind == "logits" else next(units, None)
                if unit is not None:
                    await engine._door.run(functools.partial(self._compare, unit, fresh))
        await self._check_answer(chain)
        return cold

    def _compare(self, unit: BundleUnit, fresh: RecyclableUnit) -> None:
        """Compares a unit of the bundle with that of the cold run. In a thread."""
        try:
            stored = self._prover.read(unit)
        except FormatError as error:
            self.problems.append(str(error))
            return
        if unit.kind == "logits":
            self._compare_logits(stored, fresh)
            return
        compared = self._prover._compared
        if unit not in compared:
            compared[unit] = _kv_difference(stored, fresh)
            equal = np.array_equal(stored.data, fresh.data)
            difference = compared[unit]
            wrong = not equal if self._prover._bitwise else difference is not None and not difference <= KV_BOUND
            if wrong:
                shown = "" if difference is None else f" by {difference:.3g} of its norm"
                self.problems.append(f"the kv unit {short(unit.cf)} differs from the cold run{shown}")
        known = compared[unit]
        if known is not None:
            self.kv_difference = max(known, self.kv_difference or 0.0)

    def _compare_logits(self, stored: RecyclableUnit, fresh: RecyclableUnit) -> None:
        one, other = stored.data.view(np.float32), fresh.data.view(np.float32)
        if one.shape != other.shape:
            self.problems.append(f"the logits have {len(one)} values, but the model has {len(other)}")
            return
        self.stored_difference = _largest(one - other)
        short_of_best = float(other.max() - other[int(one.argmax())])
        if not self._equal(np.array_equal(stored.data, fresh.data), self.stored_difference, short_of_best):
            self.problems.append(f"the stored logits differ from the cold run's by up to {self.stored_difference:.3g}")

    def _equal(self, bits: bool, difference: float, short_of_best: float) -> bool:
        if self._prover._bitwise:
            return bits
        return difference <= LOGITS_BOUND and short_of_best <= TIE

    async def _check_restored(self, cold: Generation) -> None:
        """A request gets all KV that the bundle has for it, and says the same as the cold one."""
        run, size = self._run, self._prover._info.block_tokens
        await self._prover.empty()
        hot = await self._generate(self.tokens, self._hot, logprobs=_LOGPROBS, ignore_eos=True)
        length = len(self.tokens)
        covered = len(run.blocks) * size + (len(run.tail.token_ids) if run.tail is not None else 0)
        self.cached, self.expected = hot.usage.cached_tokens, min(covered, length - 1)
        # Where the tail was left out, another unit that begins alike may be there in its place.
        more = covered < length and self.expected < self.cached < length
        if self.cached != self.expected and not more:
            self.problems.append(f"{self.cached} tokens of {length} were reused; it must be {self.expected}")
        self._check_source(hot)
        (one,), (other,) = hot.logprobs or [{}], cold.logprobs or [{}]
        self.logits_difference = max(
            (abs(one[token] - other[token]) for token in one.keys() & other.keys()), default=np.inf
        )
        best = max(other.values(), default=0.0)
        chosen = other.get(hot.token_ids[0], -np.inf)
        if not self._equal(one == other, self.logits_difference, best - chosen):
            self.problems.append(
                f"with the bundle log-probabilities differ from the cold run's by up to {self.logits_difference:.3g}"
            )

    async def _check_logits(self, cold: Generation) -> None:
        """The stored logits give the first token without a step."""
        await self._prover.empty()
        policy = dataclasses.replace(self._hot, zero_prefill=True)
        hot = await self._generate(self.tokens, policy, ignore_eos=True)
        if hot.usage.cached_tokens != len(self.tokens) or not hot.reuse.zero_prefill:
            self.problems.append(
                f"{hot.usage.cached_tokens} tokens of {len(self.tokens)} were reused although the logits are stored"
            )
        self._check_source(hot)
        if self._prover._bitwise and hot.token_ids != cold.token_ids:
            self.problems.append(f"the stored logits give token {hot.token_ids}, the cold run {cold.token_ids}")

    def _check_source(self, hot: Generation) -> None:
        others = {tier: count for tier, count in hot.reuse.tiers.items() if tier != PINNED}
        if others:
            self.problems.append(f"tokens came from elsewhere than the bundle: {others}")

    async def _check_answer(self, cold_chain: BlockChain) -> None:
        """A stored answer to default options is what the model says, token by token."""
        prover, run = self._prover, self._run
        root = prover._bundle.manifest.roots[run.root].root
        unit = prover._units.get(("completion", self._answer_cf(root)))
        if unit is None:
            return
        prover._answers.add(unit)
        try:
            first, *answer = prover.read(unit).data.view(np.uint32).tolist()
        except (FormatError, ValueError) as error:
            self.problems.append(f"the stored answer can't be read: {error}")
            return
        ends = prover._info.end_token_ids
        expected: list[frozenset[int]] = [frozenset({token}) for token in answer] + ([ends] if first else [])
        room = prover._info.context_tokens - 1 - cold_chain.num_tokens
        for index, tokens in enumerate(expected[: room + 1]):
            said = await self._generate(
                [*self.tokens, *answer[:index]], self._cold, logprobs=_LOGPROBS, ignore_eos=True
            )
            (known,) = said.logprobs or [{}]
            given = max((known.get(token, -np.inf) for token in tokens), default=-np.inf)
            if max(known.values(), default=0.0) - given > (0.0 if prover._bitwise else TIE):
                self.problems.append(f"the stored answer is not what the model says, from its token {index + 1} on")
                return
            self.answer_tokens += index < len(answer)

    def _answer_cf(self, root: Fingerprint) -> bytes:
        chain = BlockChain(root, self._prover._info.block_tokens, self.tokens)
        wanted = self._prover._serving.completions.wanted(chain, sampling_key(SamplingParams()))
        return bytes(wanted.expected.cf)


def _kv_difference(one: RecyclableUnit, other: RecyclableUnit) -> float | None:
    """Largest norm of the difference of two KV units per layer, as a share of the norm; None if the type has no values."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return np.inf
    values = [_values(unit) for unit in (one, other)]
    if values[0] is None or values[1] is None:
        return None
    if len(one.shape) == 3:
        parts = [each.reshape(one.shape[0], -1) for each in values if each is not None]
    else:
        count = max(1, len(values[0]) // _CHUNK)
        parts = [each[: len(each) // count * count].reshape(count, -1) for each in values if each is not None]
    norms = np.linalg.norm(parts[0] - parts[1], axis=1), np.linalg.norm(parts[1], axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(norms[0] == 0, 0.0, norms[0] / norms[1])
    return _largest(shares)


def _values(unit: RecyclableUnit) -> npt.NDArray[np.float32] | None:
    if unit.dtype == "bfloat16":
        return (unit.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if unit.dtype in ("float16", "float32"):
        return unit.data.view(unit.dtype).astype(np.float32)
    return None


def _largest(values: npt.NDArray[Any]) -> float:
    """Largest magnitude; infinite if one is no number."""
    found = float(np.abs(values).max(initial=0.0))
    return found if np.isfinite(found) else np.inf
