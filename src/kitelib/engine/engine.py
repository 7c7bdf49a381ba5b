"""`KiteEngine`: the public asyncio API."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import anyio

from kitelib.abc import Message
from kitelib.config import AdapterConfig, KiteConfig, PoolConfig, ReusePolicy, SamplingParams
from kitelib.engine.calls import Call, Prompt, check_adapter, check_policy, sampling_params, tokenize_chat
from kitelib.engine.gate import Gate
from kitelib.engine.loading import Loader
from kitelib.engine.matching import check_encoder, open_encoder
from kitelib.engine.opening import Opening
from kitelib.engine.results import Chunk, Generation
from kitelib.engine.serving import Serving, load_backend, use_model
from kitelib.engine.streaming import ChatStream, Submitted
from kitelib.errors import (
    ConfigError,
    EngineClosedError,
    InvalidRequestError,
    UnsupportedOptionError,
)
from kitelib.runtime.streams import Mailbox
from kitelib.runtime.supervisor import Supervisor
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.pool import RUPool
from kitelib.upcycle.recycler import Recycler
from kitelib.yoco.encoder import Encoder

if TYPE_CHECKING:
    from kitelib.engine.conversation import Conversation

__all__ = ["KiteEngine"]

Progress = Callable[[str, float], None]

_MAX_PENDING_WRITE_BYTES = 256 * 2**20


class KiteEngine:
    """Runs one model and reuses what its requests leave behind. Open it with `KiteEngine.open`.

    All methods belong to the event loop on which the engine was opened; `stats` may be called anywhere.

    Attributes:
        pool: the tiers; `await engine.pool.get_rus_by_cf(cf)` lists units for people and tools.
        reuse: the policy of calls that give none.
    """

    pool: RUPool
    reuse: ReusePolicy

    def __init__(
        self,
        loader: Loader,
        pool_config: PoolConfig,
        reuse: ReusePolicy,
        max_queue: int,
        encoder: str | Encoder | None = None,
    ) -> None:
        """Use `KiteEngine.open`."""
        self.reuse = check_policy(reuse, ReusePolicy(numerics="bitwise"))
        self._loader = loader
        self._pool_config = pool_config
        self._wanted_encoder = encoder
        self._encoder: Encoder | None = None
        self._door = ThreadDoor()
        self.pool = RUPool(pool_config, self._door, on_epoch=self._on_epoch)
        self._recycler = Recycler(self.pool, _MAX_PENDING_WRITE_BYTES)
        self._supervisor = Supervisor()
        self._gate = Gate(max_queue + loader.most_requests)
        self._serving: Serving | None = None
        self._closing: asyncio.Task[None] | None = None

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

    async def _start(self) -> None:
        self._supervisor.start()
        try:
            self._encoder = await open_encoder(self._wanted_encoder, self._door)
            await self.pool.start(self._supervisor)
            backend = await load_backend(self._loader, self.pool, self._door)
            try:
                await use_model(self.pool, backend, self._door)
                self._serve(backend)
            except BaseException:
                backend.close()
                raise
        except BaseException:
            await self._supervisor.aclose()
            await self.pool.aclose()
            raise
        self._supervisor.keep("recycler", self._recycler.run)

    def _serve(self, backend: Any) -> None:
        self._serving = Serving.start(
            backend, self.pool, self._recycler, self._supervisor, self._pool_config, self._door, self._encoder
        )
        # A program that ends without closing the engine must not hang on the model's thread.
        atexit.register(self._serving.abandon)

    def _on_epoch(self) -> None:
        """The pool was cleared, here or by another process: idle blocks in the context are of no use any more."""
        if self._serving is not None:
            self._serving.scheduler.forget()

    @property
    def _current(self) -> Serving:
        if self._serving is None or self._closing is not None:
            raise EngineClosedError()
        return self._serving

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
        call = self._call(prompt, messages, tools, sampling, reuse, adapter, deadline, priority, options, False)
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
        return self._stream(
            self._call(prompt, messages, tools, sampling, reuse, adapter, deadline, priority, options, True)
        )

    def _call(
        self,
        prompt: Prompt | None,
        messages: Sequence[Message] | None,
        tools: Sequence[Mapping[str, Any]] | None,
        sampling: SamplingParams | None,
        reuse: ReusePolicy | None,
        adapter: str | None,
        deadline: float | None,
        priority: int,
        options: Mapping[str, Any],
        streaming: bool,
    ) -> Call:
        params = sampling_params(sampling, options)
        policy = check_policy(reuse, self.reuse)
        return Call(prompt, messages, tools, params, policy, adapter, deadline, priority, streaming)

    async def _submit(self, call: Call, mailbox: Mailbox[Any], created: float) -> Submitted:
        serving = self._current
        with serving.scheduler.expecting():
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
        totals = {"prompts": 0, "prompt_tokens": 0, "computed_tokens": 0}
        if isinstance(prompts, str):
            raise InvalidRequestError("preheat takes a list of prompts; put the text into a list")
        for prompt in prompts:
            chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
            source: dict[str, Any] = {"messages": prompt} if chat else {"prompt": prompt}
            gen = await self.generate(**source, max_tokens=1, **options)
            totals["prompts"] += 1
            totals["prompt_tokens"] += gen.usage.prompt_tokens
            totals["computed_tokens"] += gen.reuse.computed_tokens
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

    async def preload(self, bundle: str | os.PathLike[str]) -> None:
        """Loads an RU bundle.

        Raises:
            UnsupportedOptionError: always; bundles come with a later release.
        """
        raise UnsupportedOptionError(
            f"bundles are not in this release, so {os.fspath(bundle)!r} can't be loaded; use preheat()"
        )

    async def invalidate(self) -> dict[str, int]:
        """Forgets everything that could be reused, in every tier and in the context.

        Requests that are running go on, but leave nothing behind.

        Returns:
            How many units each tier held; "context" counts idle sequences.
        """
        serving = self._current
        # The epoch first: from here on, nothing from before is shared, saved or given out.
        memory = self.pool.forget()
        context = await serving.on_model_thread(serving.scheduler.invalidate)
        await serving.matcher.forget()
        return {"context": context, "memory": memory, **await self.pool.spread_epoch()}

    async def reload(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        adapters: Mapping[str, str | AdapterConfig] | None = None,
    ) -> None:
        """Replaces the weights, the adapters, or both. Running requests finish on the old ones, new calls wait.

        Units of other weights can't be found any more, whatever the file or the adapter is called: fingerprints cover
        their content. If loading fails, the engine goes on with the old model.

        Raises:
            as `open`.
        """
        old_loader = self._loader
        loader = dataclasses.replace(
            old_loader,
            model=old_loader.model if model is None else os.fspath(model),
            adapters=old_loader.adapters if adapters is None else dict(adapters),
        )
        async with self._gate.shut():
            old = self._current
            backend = await load_backend(loader, self.pool, self._door)
            self._unregister(old)
            try:
                await old.stop(EngineClosedError("the model was replaced"))
            finally:  # from here on there is no way back, also for a cancelled caller
                if self._closing is None:
                    self._loader = loader
                    with anyio.CancelScope(shield=True):
                        if backend.info.model_state != old.backend.info.model_state:
                            await self.pool.clear()
                        await use_model(self.pool, backend, self._door)
                    self._serve(backend)
                else:
                    backend.close()
            self._current  # noqa: B018 - says so if the engine was closed meanwhile

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
        }

    # Closing

    async def aclose(self) -> None:
        """Ends open requests with `EngineClosedError` and frees everything. Idempotent."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._gate.close()
        if self._serving is not None:
            self._unregister(self._serving)
            await self._drain(self._serving)
            await self._serving.stop(EngineClosedError())
        await self._supervisor.aclose()
        self._recycler.close()
        await self.pool.aclose()

    async def _drain(self, serving: Serving) -> None:
        """Ends open requests and, where a tier outlives the process, writes what is not there yet."""
        with anyio.move_on_after(self._pool_config.drain_seconds), contextlib.suppress(EngineClosedError):
            await serving.finish(EngineClosedError(), save=bool(self.pool.tiers.tiers))
            await self._recycler.drain()
            await self.pool.drain()

    @staticmethod
    def _unregister(serving: Serving) -> None:
        atexit.unregister(serving.abandon)

    async def __aenter__(self) -> KiteEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
