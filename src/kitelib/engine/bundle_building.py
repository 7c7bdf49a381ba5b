"""Making a bundle: computes prompts with an engine and writes what they leave behind."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from kitelib.config import ReusePolicy, SamplingParams
from kitelib.engine.bundle_collecting import ComputedPrompt, compute, units_of
from kitelib.engine.bundle_prompts import BundlePrompt, as_bundle_prompt
from kitelib.engine.bundle_templates import FILLERS, fill, stable_prefix
from kitelib.engine.calls import check_adapter, check_policy
from kitelib.errors import (
    BackendError,
    ConfigError,
    EmptyPromptError,
    InvalidRequestError,
    KiteError,
    PromptTooLongError,
    UnsupportedOptionError,
)
from kitelib.fingerprint import BlockChain
from kitelib.runtime.threads import to_the_end
from kitelib.upcycle.bundle.manifest import BundleRoot, ModelIdentity
from kitelib.upcycle.bundle.signing import public_key_of
from kitelib.upcycle.bundle.writer import BundleSummary, BundleWriter, Compression
from kitelib.upcycle.unit import RecyclableUnit
from kitelib.yoco.completions import sampling_key

if TYPE_CHECKING:
    from kitelib.engine.engine import KiteEngine
    from kitelib.engine.results import Generation

__all__ = ["build_bundle", "tokenized"]

Progress = Callable[[str, float], None]

_WRITING: Final = 0.05  # the share of writing in all that is done


async def build_bundle(
    engine: KiteEngine,
    prompts: Sequence[Any],
    path: str | os.PathLike[str],
    *,
    completions: int = 0,
    compression: Compression = "none",
    max_bytes: int | None = None,
    sign_key: str | os.PathLike[str] | None = None,
    hmac_key: bytes | None = None,
    labels: Mapping[str, str] | None = None,
    reuse: ReusePolicy | None = None,
    epoch: int | None = None,
    created_at: float | None = None,
    progress: Progress | None = None,
) -> BundleSummary:
    """Computes prompts one after the other and writes their units to a new bundle.

    Kept of each prompt: the KV of its full blocks and of its tail, and the logits after its last token; of a template
    (`BundlePrompt.varying`) only the KV of what is the same in every call. A completion is computed greedily and kept
    twice: as a guess, which drafts of any request with this prompt start from, and as the answer that requests with
    ``ReusePolicy(completions=True)`` get without a model step if their sampling options are the defaults of
    `SamplingParams`, but for `max_tokens`, `n` and `seed`, that is greedy ones without stop texts, penalties, biases,
    constraints or logprobs.

    Other requests may run meanwhile and go first. A cancelled build leaves no file.

    Args:
        engine: opened with the numerics that the bundle is for: "standard" for one that other machines are to use.
        prompts: `BundlePrompt`s, or texts, token ids, and lists of messages.
        path: the bundle to be; replaced at once, and only when it is complete.
        completions: most tokens of a completion for prompts that don't say it themselves; 0 (default) for none.
        compression: "none" (default; using it needs no decoding), "zstd", or "entropy" (the smallest).
        max_bytes: most bytes of the file; what saves most tokens per byte and hit is kept.
        sign_key: PEM file of an Ed25519 private key to sign with; needs the extra ``sign``.
        hmac_key: to authenticate with; None (default) takes the pool's own, if it has one.
        labels: free-form texts by name.
        reuse: its `namespace` is whose units these are; its other fields but `numerics` don't matter here.
        epoch: freshness epoch of the units; None (default) is that of the engine's pool.
        created_at: when bundle and units say that they were made, seconds since 1970, UTC; None (default) is the time
            at which they are. Given a time, an engine that computes the same prompts again makes the same bundle.
        progress: called with what is being done and the done share of all, 0 to 1; also from threads.

    Raises:
        InvalidRequestError: a prompt makes no sense, is empty, is too long, or is a template that begins with a varying
            part. All of them are looked at before any is computed; the message says which one.
        UnsupportedOptionError: blocks of this model's state can't be cut out, so that a bundle could not hold all parts
            of it.
        ConfigError: the engine keeps nothing, an option is wrong, or the file can't be written.
        MissingExtraError: signing without `cryptography`.
        BackendError: a unit was computed and could not be kept, or the pool was invalidated meanwhile.
    """
    policy = _policy(engine, reuse)
    _check_options(engine, completions, epoch)
    await engine.pool.freshen()  # what was invalidated elsewhere while no request came
    door, serving = engine._door, engine._current
    if sign_key is not None:
        await door.run(lambda: public_key_of(sign_key))
    notify = progress or _say_nothing
    pool_epoch = engine.pool.epoch
    todo = await tokenized(engine, prompts, policy)
    model = ModelIdentity.of(serving.backend.info)
    unit_epoch = pool_epoch if epoch is None else epoch
    said: dict[str, Any] = {"epoch": unit_epoch, "labels": labels, "created_at": created_at}
    writer = await _unwanted_closed(engine, lambda: BundleWriter(path, model, compression=compression, **said))
    try:
        builder = _Builder(engine, writer, unit_epoch, completions, created_at)
        total = sum(len(each.tokens) for _, each in todo)
        done = 0
        for number, (prompt, computed) in enumerate(todo, 1):
            notify(f"prompt {number} of {len(todo)}", (1 - _WRITING) * done / total)
            await builder.add(prompt, computed)
            done += len(computed.tokens)
        if engine.pool.epoch != pool_epoch:
            raise BackendError("the pool was invalidated while the bundle was built from it; build it again")
        key = engine._pool_config.hmac_key if hmac_key is None else hmac_key

        def written(done_bytes: int, all_bytes: int) -> None:
            notify("writing", 1 - _WRITING + _WRITING * (done_bytes / all_bytes if all_bytes else 1.0))

        return await door.run(
            lambda: writer.finish(max_bytes=max_bytes, sign_key=sign_key, hmac_key=key, progress=written)
        )
    finally:
        await to_the_end(writer.abandon)


async def tokenized(
    engine: KiteEngine, prompts: Sequence[Any], policy: ReusePolicy
) -> list[tuple[BundlePrompt, ComputedPrompt]]:
    """Prompts with the token ids of what is to be kept of each, all checked.

    Raises:
        InvalidRequestError: there are none, or one is wrong; the message says which.
    """
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Sequence) or not prompts:
        raise InvalidRequestError("a bundle is made from a list with at least one prompt; put a single one into a list")
    todo = []
    for index, value in enumerate(prompts):
        try:
            prompt = as_bundle_prompt(value)
        except InvalidRequestError as error:
            raise _located(error, f"prompts[{index}]") from None
        try:
            todo.append((prompt, await _computed_prompt(engine, prompt, policy)))
        except (InvalidRequestError, UnsupportedOptionError) as error:
            raise _located(error, prompt.source or f"prompts[{index}]") from None
    return todo


async def _computed_prompt(engine: KiteEngine, prompt: BundlePrompt, policy: ReusePolicy) -> ComputedPrompt:
    serving, info = engine._current, engine._current.backend.info
    check_adapter(serving, prompt.adapter)
    root = serving.root(policy, prompt.adapter)

    def work() -> ComputedPrompt:
        tokens = _token_ids(serving.backend, prompt)
        return ComputedPrompt(tokens, BlockChain(root, info.block_tokens, tokens), policy, prompt.adapter)

    computed = await engine._door.run(work)
    tokens, limit = computed.tokens, info.context_tokens - 1
    if not tokens and prompt.varying:
        raise InvalidRequestError("the template begins with what varies, so nothing of it is the same in every call")
    if not tokens:
        raise EmptyPromptError("the prompt is empty; give at least one token")
    if len(tokens) > limit:
        raise PromptTooLongError(len(tokens), limit)
    unknown = next((token for token in tokens if token >= info.vocab_size), None)
    if unknown is not None:
        raise InvalidRequestError(f"the prompt holds token id {unknown}; this model has 0 to {info.vocab_size - 1}")
    return computed


def _token_ids(backend: Any, prompt: BundlePrompt) -> list[int]:
    """What of a prompt is to be computed. In a thread."""
    if not prompt.varying:
        return _rendered(backend, prompt.prompt, prompt.messages, prompt.tools)
    renderings = (
        _rendered(
            backend,
            None if prompt.prompt is None else fill(prompt.prompt, filler),
            None if prompt.messages is None else fill(prompt.messages, filler),
            prompt.tools,
        )
        for filler in FILLERS
    )
    return stable_prefix(renderings, lambda token_id: bytes(backend.detokenize([token_id])))


def _rendered(backend: Any, prompt: Any, messages: Any, tools: Any) -> list[int]:
    if messages is not None:
        return list(backend.tokenize(backend.render_chat(messages, tools), add_special=False))
    return list(backend.tokenize(prompt, add_special=True)) if isinstance(prompt, str) else [*map(int, prompt)]


def _located(error: KiteError, where: str) -> KiteError:
    """The same error, saying where."""
    error.args = (f"{where}: {error}",)
    return error


def _policy(engine: KiteEngine, reuse: ReusePolicy | None) -> ReusePolicy:
    """How the prompts are computed: exactly, and to the last token."""
    own = check_policy(reuse, engine.reuse)
    return ReusePolicy(drafts=False, zero_prefill=False, numerics=own.numerics, namespace=own.namespace)


def _check_options(engine: KiteEngine, completions: Any, epoch: Any) -> None:
    info = engine._current.backend.info
    if not info.reuse_blocks:
        reason = "; ".join(info.notes) or "its backend can't cut KV blocks out"
        raise UnsupportedOptionError(f"no bundle can be made with the model {info.name!r}: {reason}")
    if not engine.pool.enabled:
        raise ConfigError("the engine keeps nothing (memory_bytes=0), so no bundle can be made; give its pool memory")
    if engine._pool_config.logits_codec != "raw" and info.numerics != "bitwise":
        raise ConfigError(
            f"the engine rounds the logits that it keeps (PoolConfig.logits_codec={engine._pool_config.logits_codec!r}), and "
            "those of a bundle are exact; open one with logits_codec='raw' to build it"
        )
    for name, value in (("completions", completions), ("epoch", 0 if epoch is None else epoch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{name} is {value!r}; give a whole number of at least 0")


def _say_nothing(stage: str, share: float) -> None:
    """Progress that nobody wants to see."""
    del stage, share


async def _unwanted_closed(engine: KiteEngine, make: Callable[[], BundleWriter]) -> BundleWriter:
    """A writer; one whose caller was cancelled meanwhile leaves no scratch file."""
    return await engine._door.run(make, discard=lambda writer: writer.abandon())


class _Builder:
    """Computes prompts one at a time and hands their units to a writer."""

    def __init__(
        self, engine: KiteEngine, writer: BundleWriter, epoch: int, completions: int, created_at: float | None
    ) -> None:
        self._engine = engine
        self._writer = writer
        self._same: dict[str, Any] = {"epoch": epoch}  # what all units say
        if created_at is not None:
            self._same["created_at"] = float(created_at)
        self._completions = completions
        self._roots: dict[bytes, BundleRoot] = {}

    async def add(self, prompt: BundlePrompt, computed: ComputedPrompt) -> None:
        length = self._completions if prompt.completion is None else prompt.completion
        length = 0 if prompt.varying else length
        generation = await compute(self._engine, computed, max(1, length))
        root = self._root(computed)
        async for units in units_of(self._engine, computed, logits=not prompt.varying):
            await self._write(units, root, prompt.hits)
        if length and generation.token_ids:
            await self._write(self._answers(computed, generation), root, prompt.hits)

    def _answers(self, computed: ComputedPrompt, generation: Generation) -> list[RecyclableUnit]:
        """The completion as a guess, and as the answer that default options give."""
        make = self._engine._current.completions.unit
        ended = generation.finish_reason == "stop"
        keys = (None, sampling_key(SamplingParams()))
        tokens = generation.token_ids
        return [make(computed.chain, key, tokens, ended=ended, epoch=self._same["epoch"]) for key in keys]

    async def _write(self, units: Sequence[RecyclableUnit], root: BundleRoot, hits: float) -> None:
        def write() -> None:
            for unit in units:
                differs = any(getattr(unit, name) != value for name, value in self._same.items())
                self._writer.add(dataclasses.replace(unit, **self._same) if differs else unit, root, hits=hits)

        await self._engine._door.run(write)

    def _root(self, computed: ComputedPrompt) -> BundleRoot:
        root = computed.chain.root
        if root not in self._roots:
            serving = self._engine._current
            self._roots[root] = BundleRoot(
                root=root,
                execution_path=serving.execution_path,
                namespace=computed.policy.namespace,
                adapter=None if computed.adapter is None else serving.backend.adapter_states[computed.adapter],
            )
        return self._roots[root]
