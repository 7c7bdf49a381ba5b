"""`KiteEngine`: the public asyncio API."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kitelib.abc import Message
from kitelib.config import AdapterConfig, KiteConfig, PoolConfig, ReusePolicy, SamplingParams
from kitelib.engine.calls import Call, Prompt, check_adapter, check_policy, tokenize_chat
from kitelib.engine.lifetime import Lifetime
from kitelib.engine.loading import Loader
from kitelib.engine.matching import check_encoder
from kitelib.engine.opening import Opening
from kitelib.engine.preheating import preheat
from kitelib.engine.results import Chunk, Generation
from kitelib.engine.streaming import ChatStream, Submitted
from kitelib.errors import (
    ConfigError,
    EngineClosedError,
)
from kitelib.runtime.streams import Mailbox
from kitelib.stores.pinned import PINNED
from kitelib.yoco.encoder import Encoder

if TYPE_CHECKING:
    from kitelib.engine.bundle_prompts import BundlePrompt
    from kitelib.engine.conversation import Conversation
    from kitelib.upcycle.bundle import BundleSummary

__all__ = ["KiteEngine"]

Progress = Callable[[str, float], None]


class KiteEngine(Lifetime):
    """Runs one model and reuses what its requests leave behind. Open it with `KiteEngine.open`.

    All methods belong to the event loop on which the engine was opened; `stats` may be called anywhere.

    Attributes:
        pool: the tiers; `await engine.pool.get_rus_by_cf(cf)` lists units for people and tools.
        reuse: the policy of calls that give none.
    """

    @classmethod
    def open(
        cls,
        model: str | os.PathLike[str],
        *,
        backend: str = "auto",
        pool: PoolConfig | None = None,
        reuse: ReusePolicy | None = None,
        n_ctx: int | None = None,
        threads: int | None = None,
        max_sequences: int | None = None,
        dtype: str = "auto",
        device: str = "auto",
        adapters: Mapping[str, str | AdapterConfig] | None = None,
        block_tokens: int | None = None,
        kv_tokens: int | None = None,
        max_queue: int = 1024,
        cache_dir: str | os.PathLike[str] | None = None,
        encoder: str | Encoder | None = None,
        config: KiteConfig | None = None,
        progress: Progress | None = None,
    ) -> Opening:
        """Opens an engine: ``async with KiteEngine.open(...) as engine`` or ``engine = await KiteEngine.open(...)``.

        Args:
            model: a ``.gguf`` file, or a Hugging Face model folder with safetensors weights.
            backend: "auto" (a folder: "torch", a file: "llama_cpp"), "llama_cpp", or "torch" (also for a file).
            pool: where recyclable units are kept; default `PoolConfig()`.
            reuse: policy for calls that give none; default `ReusePolicy()`.
            n_ctx: most tokens of one sequence; None takes what the model was trained for, at most 4096.
            threads: threads of a model step; None leaves one core to the application.
            max_sequences: requests computed at once; default 16, on CUDA 256.
            dtype: type of weights and KV: "auto" (as stored; llama_cpp: float16 KV), and with the torch backend
                "bfloat16", "float16" or "float32".
            device: "auto" or "cpu"; with the torch backend also "cuda" or "cuda:N", which "auto" takes if there is one.
            adapters: name -> LoRA adapter: a GGUF file, for torch a PEFT folder, or an `AdapterConfig` with a scale.
            block_tokens: tokens per KV block; None chooses by architecture.
            kv_tokens: most tokens of all sequences together; None takes four times n_ctx, on CUDA what is free.
            max_queue: requests that may wait; one more raises `EngineOverloadedError`.
            cache_dir: folder for digests and self-test results; None means the user's cache folder.
            encoder: finds near questions, for drafts and for `ReusePolicy.neighbours`: "use" (extra ``semantic``, 125 MB
                of memory), or an object like `kitelib.yoco.encoder.Encoder`; default None.
            config: a configuration file; gives the pool (so leave out `pool`), and block sizes where `block_tokens`
                does not.
            progress: called from a worker thread with what is being done and its share, 0 to 1.

        Raises:
            ModelNotFoundError, ModelFormatError, BackendError: the model can't be loaded.
            ConfigError, UnsupportedOptionError, MissingExtraError: an option does not fit.
        """
        if config is not None:
            if pool is not None:
                raise ConfigError("pool= and config= are both given, but config has the pool (ru_pool); leave one out")
            pool = config.to_pool_config()
        loader = Loader(
            model=os.fspath(model),
            backend=backend,
            dtype=dtype,
            device=device,
            n_ctx=n_ctx,
            kv_tokens=kv_tokens,
            threads=threads,
            max_sequences=max_sequences,
            block_tokens=block_tokens,
            block_table={} if config is None else config.ru_slicing,
            adapters=dict(adapters or {}),
            numerics=(reuse or ReusePolicy()).numerics or "bitwise",
            cache_dir=None if cache_dir is None else Path(cache_dir),
            progress=progress,
        )
        if isinstance(max_queue, bool) or not isinstance(max_queue, int) or max_queue < 0:
            raise ConfigError(f"max_queue is {max_queue!r}; give a whole number of requests, 0 or more")
        check_encoder(encoder)
        policy = reuse or ReusePolicy()
        return Opening(lambda: cls(loader, pool or PoolConfig(), policy, max_queue, encoder))

    # Generating

    async def generate(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        sampling: SamplingParams | None = None,
        reuse: ReusePolicy | None = None,
        adapter: str | None = None,
        deadline: float | None = None,
        priority: int = 0,
        **options: Any,
    ) -> Generation:
        """Generates a text.

        Args:
            prompt: a text, token ids, or a list of those with a `Passage` among them. Give this or `messages`.
            messages: a chat, rendered with the model's own template.
            tools: tools the template may offer to the model, as JSON-schema mappings; only with `messages`.
            sampling: all sampling options at once; or give them as keywords: ``max_tokens=32, temperature=0.7``.
            reuse: overrides the engine's policy for this call.
            adapter: name of a LoRA adapter the engine was opened with.
            deadline: seconds from now after which the call raises `DeadlineExceededError`.
            priority: higher is admitted first; default 0.
            **options: fields of `SamplingParams`.

        Raises:
            EmptyPromptError, PromptTooLongError, InvalidSamplingError, UnknownAdapterError, InvalidRequestError
            EngineClosedError, EngineOverloadedError, DeadlineExceededError
            BackendStepError: the model failed on this request; the engine goes on.

        Cancelling the call ends the request within one model step; what it computed stays reusable.
        """
        call = Call.of(prompt, messages, tools, sampling, options, reuse, self.reuse, adapter, deadline, priority)
        created = time.monotonic()
        async with self._gate.enter(call.deadline):
            mailbox: Mailbox[Any] = Mailbox()
            with await self._submit(call, mailbox, created) as submitted:
                generation = submitted.take(await mailbox.get())
        assert isinstance(generation, Generation)
        return generation

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Sequence[Message] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        sampling: SamplingParams | None = None,
        reuse: ReusePolicy | None = None,
        adapter: str | None = None,
        deadline: float | None = None,
        priority: int = 0,
        **options: Any,
    ) -> AsyncGenerator[Chunk, None]:
        """Like `generate`, but yields chunks as they come; the last chunk carries the whole `generation`.

        Leaving the loop early ends the request; with ``contextlib.aclosing`` it ends at once.
        """
        call = Call.of(prompt, messages, tools, sampling, options, reuse, self.reuse, adapter, deadline, priority)
        return self._stream(dataclasses.replace(call, streaming=True))

    async def _submit(self, call: Call, mailbox: Mailbox[Any], created: float) -> Submitted:
        await self.pool.freshen()
        serving = self._current
        with serving.scheduler.expecting():
            await self.pool.freshen()
            request = await call.request(serving, self._door, self.pool.epoch, mailbox.put, created)
            # Closed in between?
            submitted = Submitted(self._current.scheduler, request)
            serving.scheduler.submit(request)
            serving.submitted(request)
        return submitted

    async def _stream(self, call: Call) -> AsyncGenerator[Chunk, None]:
        created = time.monotonic()
        async with self._gate.enter(call.deadline):
            mailbox: Mailbox[Any] = Mailbox()
            held: Chunk | None = None
            with await self._submit(call, mailbox, created) as submitted:
                while not submitted.finished:
                    item = submitted.take(await mailbox.get())
                    if held is not None:
                        yield held if isinstance(item, Chunk) else dataclasses.replace(held, generation=item)
                    # Only a chunk that ends a choice can be the last one: it waits for what follows it.
                    held = item if isinstance(item, Chunk) and item.finish_reason is not None else None
                    if isinstance(item, Chunk) and held is None:
                        yield item

    def chat(self, messages: Sequence[Message], *, stream: bool = False, **options: Any) -> Any:
        """Generates the assistant's next message.

        ``await engine.chat(messages)`` gives a `Generation`; ``async for chunk in engine.chat(messages, stream=True)``
        (with or without ``await``) gives chunks. Options are those of `generate`.
        """
        if stream:
            return ChatStream(self.stream(messages=messages, **options))
        return self.generate(messages=messages, **options)

    def conversation(
        self, system: str | None = None, *, tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> Conversation:
        """An append-only chat that keeps token ids, so that every turn continues the cached run of the last.

        `options` are those of `generate` and hold for every turn.
        """
        from kitelib.engine.conversation import Conversation

        return Conversation(self, system, tools=tools, **options)

    # Tokens

    async def tokenize_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of a rendered chat, up to where the assistant's answer starts."""
        return await tokenize_chat(self._current, self._door, messages, tools)

    async def tokenize(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a plain text; see `Backend.tokenize`."""
        backend = self._current.backend
        return await self._door.run(lambda: list(backend.tokenize(text, add_special=add_special)))

    async def render_chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """A chat as the model's template renders it."""
        backend = self._current.backend
        return await self._door.run(lambda: str(backend.render_chat(messages, tools)))

    def fingerprint_configs(
        self, *, reuse: ReusePolicy | None = None, adapter: str | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """`model_config` and `runtime_config` for `kitelib.yoco.compute_computation_fingerprint`, for requests with
        this policy and this adapter. They hold until the model is reloaded.

        Raises:
            UnknownAdapterError: the engine was not opened with that adapter.
        """
        check_adapter(self._current, adapter)
        return self._current.fingerprint_configs(check_policy(reuse, self.reuse), adapter)

    # Managing what is kept

    async def preheat(self, prompts: Sequence[Prompt | Sequence[Message]], **options: Any) -> dict[str, int]:
        """Computes prompts and keeps what they leave behind, so that the first request that starts like one of them
        finds it. A prompt is a text, token ids, a list of parts, or a list of messages.

        Returns:
            "prompts", their "prompt_tokens", and how many were "computed_tokens" this time.
        """
        totals = await preheat(self.generate, prompts, options)
        await self.flush()
        return totals

    async def flush(self) -> None:
        """Waits until everything finished so far is in the pool; for the outer tiers at most `PoolConfig.drain_seconds`."""
        serving = self._current
        await serving.on_model_thread(serving.memory.save_all)
        await self._recycler.drain()
        await self.pool.settle()
        if self._closing is not None:
            raise EngineClosedError()

    async def build_bundle(
        self, prompts: Sequence[BundlePrompt | Prompt | Sequence[Message]], path: str | os.PathLike[str], **options: Any
    ) -> BundleSummary:
        """Computes prompts and writes what they leave behind to a new bundle; see
        `kitelib.engine.bundle_building.build_bundle` for options and errors."""
        from kitelib.engine.bundle_building import build_bundle

        return await build_bundle(self, prompts, path, **options)

    async def preload(
        self,
        bundle: str | os.PathLike[str],
        *,
        pin: bool = True,
        require_signature: bool = False,
        trusted_keys: str | bytes | Sequence[str | bytes] = (),
        accept_stale: bool = False,
        not_before: float | None = None,
    ) -> dict[str, Any]:
        """Maps a bundle of units, so that requests find them as if they were in process memory. Reads only its header.

        Args:
            bundle: its path, which is also its name for `unload` and in `stats`; the same path again replaces it.
            pin: keep it until `unload`, whatever else is kept. False copies its units into the pool instead, where they
                are evicted like any others.
            require_signature, trusted_keys: who must have signed it; see `Bundle.open`.
            accept_stale: load it although it was made before the pool was last invalidated.
            not_before: seconds since 1970; refuse a bundle made earlier, which may be signed and yet replaced since.

        Returns:
            "units" and "tokens" that can be found, "bytes", "skipped" (units of adapters or namespaces that this engine
            does not have), "digest", "signer".

        Raises:
            BundleNotFoundError, BundleSignatureError, BundleError: as of `Bundle.open`.
            BundleMismatchError: it is for another model, layout, kind of numerics, ..., or too old; all that differs is
                named.
        """
        return await self._preloader.load(
            self._current,
            bundle,
            pin=pin,
            require_signature=require_signature,
            trusted_keys=trusted_keys,
            accept_stale=accept_stale,
            not_before=not_before,
        )

    async def unload(self, bundle: str | os.PathLike[str]) -> None:
        """Lets go of a bundle that was loaded from this path. Requests that use it go on.

        Raises:
            InvalidRequestError: there is none.
        """
        await self._preloader.unload(bundle)

    async def invalidate(self) -> dict[str, int]:
        """Forgets everything that could be reused, in every tier and in the context.

        Requests that are running go on, but leave nothing behind.

        Returns:
            How many units each tier held; "context" counts idle sequences, "bundle" units of bundles, which are unloaded.
        """
        serving = self._current
        # The epoch first: from here on, nothing from before is shared, saved or given out.
        bundles = {PINNED: count} if (count := self.pool.pinned.clear()) else {}
        memory = self.pool.forget()
        context = await serving.on_model_thread(serving.scheduler.invalidate)
        await serving.matcher.forget()
        return {"context": context, "memory": memory, **bundles, **await self.pool.spread_epoch()}

    def stats(self) -> dict[str, Any]:
        """Counters and sizes at this moment: plain data, no I/O. See docs/troubleshooting.md for what they mean."""
        serving = self._current
        return {
            **serving.stats(),
            "open_requests": self._gate.num_inside,
            "notes": [*serving.backend.info.notes, *self.pool.notes()],
            "recycler": {
                "registered": self._recycler.registered,
                "dropped": self._recycler.dropped,
                "pending_bytes": self._recycler.pending_bytes,
            },
            "pool": self.pool.stats(),
            "bundles": self.pool.pinned.stats(),
        }

    async def __aenter__(self) -> KiteEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
