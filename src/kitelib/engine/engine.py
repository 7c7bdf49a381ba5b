"""`KiteEngine`: the public asyncio API."""

from __future__ import annotations

import asyncio
import atexit
import dataclasses
import operator
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kitelib.abc import Message
from kitelib.config import AdapterConfig, KiteConfig, PoolConfig, ReusePolicy, SamplingParams
from kitelib.engine.gate import Gate
from kitelib.engine.loading import Loader
from kitelib.engine.request import Request
from kitelib.engine.results import Chunk, Generation
from kitelib.engine.scheduler import Scheduler
from kitelib.engine.serving import Serving
from kitelib.errors import (
    ConfigError,
    EmptyPromptError,
    EngineClosedError,
    InvalidRequestError,
    InvalidSamplingError,
    KiteError,
    PromptTooLongError,
    UnknownAdapterError,
    UnsupportedOptionError,
)
from kitelib.fingerprint import BlockChain
from kitelib.runtime.streams import Mailbox
from kitelib.runtime.supervisor import Supervisor
from kitelib.runtime.threads import ThreadDoor
from kitelib.stores.pool import RUPool
from kitelib.upcycle.recycler import Recycler
from kitelib.yoco.planner import EMPTY_PREFIX

if TYPE_CHECKING:
    from kitelib.engine.conversation import Conversation

__all__ = ["KiteEngine"]

Prompt = str | Sequence[int]
Progress = Callable[[str, float], None]

_MAX_PENDING_WRITE_BYTES = 256 * 2**20
_INLINE_TOKENS = 256  # shorter prompts are fingerprinted on the loop: a thread would take longer
_SAMPLING_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))


class KiteEngine:
    """Runs one model and reuses what its requests leave behind. Open it with `KiteEngine.open`.

    All methods belong to the event loop on which the engine was opened; `stats` may be called anywhere.

    Attributes:
        pool: the tiers; `await engine.pool.get_rus_by_cf(cf)` lists units for people and tools.
        reuse: the policy of calls that give none.
    """

    pool: RUPool
    reuse: ReusePolicy

    def __init__(self, loader: Loader, pool_config: PoolConfig, reuse: ReusePolicy, max_queue: int) -> None:
        """Use `KiteEngine.open`."""
        self.reuse = reuse
        self._loader = loader
        self._pool_config = pool_config
        self._door = ThreadDoor()
        self.pool = RUPool(pool_config, self._door)
        self._recycler = Recycler(self.pool, self._door, _MAX_PENDING_WRITE_BYTES)
        self._supervisor = Supervisor()
        self._gate = Gate(max_queue + loader.max_sequences)
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
        config: KiteConfig | None = None,
        progress: Progress | None = None,
    ) -> _Opening:
        """Opens an engine: ``async with KiteEngine.open(...) as engine`` or ``engine = await KiteEngine.open(...)``.

        Args:
            model: a ``.gguf`` file.
            backend: "auto" (by the kind of model) or "llama_cpp".
            pool: where recyclable units are kept; default `PoolConfig()`.
            reuse: policy for calls that give none; default `ReusePolicy()`.
            n_ctx: most tokens of one sequence; None takes what the model was trained for, at most 4096.
            threads: threads of a model step; None leaves one core to the application.
            max_sequences: requests computed at once; default 16.
            dtype: "auto" (float16 KV); nothing else yet.
            device: "auto" or "cpu".
            adapters: name -> LoRA adapter (a GGUF file, or an `AdapterConfig` with a scale).
            block_tokens: tokens per KV block; None chooses by architecture.
            kv_tokens: most tokens of all sequences together; None takes four times n_ctx if memory allows.
            max_queue: requests that may wait; one more raises `EngineOverloadedError`.
            cache_dir: folder for digests and self-test results; None means the user's cache folder.
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
            max_sequences=16 if max_sequences is None else max_sequences,
            block_tokens=block_tokens,
            block_table={} if config is None else config.ru_slicing,
            adapters=dict(adapters or {}),
            numerics=(reuse or ReusePolicy()).numerics,
            cache_dir=None if cache_dir is None else Path(cache_dir),
            progress=progress,
        )
        return _Opening(loader, pool or PoolConfig(), reuse or ReusePolicy(), max_queue)

    async def _start(self) -> None:
        self._check_policy(self.reuse)
        self._supervisor.start()
        try:
            backend = await self._door.run(self._loader.load)
            self._serve(backend)
        except BaseException:
            await self._supervisor.aclose()
            raise
        self._supervisor.keep("recycler", self._recycler.run)

    def _serve(self, backend: Any) -> None:
        self._serving = Serving.start(backend, self.pool, self._recycler, self._supervisor, self._pool_config)
        # A program that ends without closing the engine must not hang on the model's thread.
        atexit.register(self._serving.scheduler.stop, EngineClosedError())

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
            prompt: a text, or token ids. Give this or `messages`.
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
        params = _sampling(sampling, options)
        async with self._gate.enter():
            mailbox: Mailbox[Any] = Mailbox()
            request = await self._request(
                prompt, messages, tools, params, reuse, adapter, deadline, priority, mailbox, streaming=False
            )
            with _Submitted(self._current.scheduler, request) as submitted:
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
        params = _sampling(sampling, options)
        return self._stream(prompt, messages, tools, params, reuse, adapter, deadline, priority)

    async def _stream(
        self,
        prompt: Prompt | None,
        messages: Sequence[Message] | None,
        tools: Sequence[Mapping[str, Any]] | None,
        params: SamplingParams,
        reuse: ReusePolicy | None,
        adapter: str | None,
        deadline: float | None,
        priority: int,
    ) -> AsyncGenerator[Chunk, None]:
        async with self._gate.enter():
            mailbox: Mailbox[Any] = Mailbox()
            request = await self._request(
                prompt, messages, tools, params, reuse, adapter, deadline, priority, mailbox, streaming=True
            )
            held: Chunk | None = None
            with _Submitted(self._current.scheduler, request) as submitted:
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
            return _ChatStream(self.stream(messages=messages, **options))
        return self.generate(messages=messages, **options)

    def conversation(
        self, system: str | None = None, *, tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> Conversation:
        """An append-only chat that keeps token ids, so that every turn continues the cached run of the last.

        `options` are those of `generate` and hold for every turn.
        """
        from kitelib.engine.conversation import Conversation

        return Conversation(self, system, tools=tools, **options)

    # Preparing a request

    async def _request(
        self,
        prompt: Prompt | None,
        messages: Sequence[Message] | None,
        tools: Sequence[Mapping[str, Any]] | None,
        params: SamplingParams,
        reuse: ReusePolicy | None,
        adapter: str | None,
        deadline: float | None,
        priority: int,
        mailbox: Mailbox[Any],
        *,
        streaming: bool,
    ) -> Request:
        created = asyncio.get_running_loop().time()  # the same clock as time.monotonic
        serving = self._current
        policy = self.reuse if reuse is None else reuse
        self._check_policy(policy)
        self._check_adapter(adapter)
        _check_urgency(deadline, priority)
        epoch = self.pool.epoch
        tokens = await self._tokens(prompt, messages, tools)
        self._check_sampling(params)
        constraint = None
        if params.json_schema is not None or params.regex is not None:
            constraint = await self._door.run(lambda: serving.constraint(params))
        root = serving.root(policy, adapter)
        size = serving.backend.info.block_tokens
        if len(tokens) <= _INLINE_TOKENS:
            chain = BlockChain(root, size, tokens)
        else:
            chain = await self._door.run(lambda: BlockChain(root, size, tokens))
        prefix = EMPTY_PREFIX
        if policy.mode != "off":
            first = serving.memory.residency.resident_blocks(chain)
            prefix = await serving.planner.find(chain, tokens, first, logits=policy.zero_prefill)
        return Request(
            prompt=tokens,
            chain=chain,
            params=params,
            policy=policy,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            max_new_tokens=min(params.max_tokens, serving.backend.info.context_tokens - len(tokens)),
            adapter=adapter,
            priority=priority,
            deadline=None if deadline is None else created + deadline,
            constraint=constraint,
            deliver=mailbox.put,
            streaming=streaming,
            epoch=epoch,
            prefix=prefix,
            created=created,
        )

    def _check_policy(self, policy: ReusePolicy) -> None:
        if not isinstance(policy, ReusePolicy):
            raise InvalidRequestError(f"reuse is {policy!r}; give a ReusePolicy, such as ReusePolicy(mode='off')")
        if policy.mode == "semantic":
            raise UnsupportedOptionError(
                "ReusePolicy.mode is 'semantic', which this release does not have; use 'exact'"
            )
        if policy.numerics == "bitwise" and self.reuse.numerics == "standard":
            raise UnsupportedOptionError(
                "a call asks for numerics='bitwise', but the engine was opened with 'standard'; "
                "open it with reuse=ReusePolicy(numerics='bitwise')"
            )

    def _check_adapter(self, adapter: str | None) -> None:
        states = self._current.backend.adapter_states
        if adapter is not None and adapter not in states:
            known = ", ".join(sorted(states)) or "none"
            raise UnknownAdapterError(f"no adapter is called {adapter!r}; this engine has: {known}")

    def _check_sampling(self, params: SamplingParams) -> None:
        info = self._current.backend.info
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            for token in ids:
                if token >= info.vocab_size:
                    raise InvalidSamplingError(
                        f"{name} holds {token}; this model's token ids end at {info.vocab_size - 1}"
                    )
        if params.n > info.max_sequences:
            raise InvalidSamplingError(
                f"n is {params.n}; this engine computes at most {info.max_sequences} sequences at once (max_sequences)"
            )

    async def _tokens(
        self,
        prompt: Prompt | None,
        messages: Sequence[Message] | None,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> list[int]:
        if (prompt is None) == (messages is None):
            raise InvalidRequestError("give exactly one of prompt and messages")
        if tools is not None and messages is None:
            raise InvalidRequestError("tools only go with messages: the chat template renders them")
        backend = self._current.backend
        if messages is not None:
            tokens = await self.tokenize_chat(messages, tools)
        elif isinstance(prompt, str):
            text = prompt
            tokens = await self._door.run(lambda: backend.tokenize(text, add_special=True)) if text else []
        else:
            tokens = _checked_ids(prompt, backend.info.vocab_size)
        if not tokens:
            raise EmptyPromptError("the prompt is empty; give at least one token")
        limit = backend.info.context_tokens - 1
        if len(tokens) > limit:
            raise PromptTooLongError(len(tokens), limit)
        return tokens

    async def tokenize_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of a rendered chat, up to where the assistant's answer starts."""
        if isinstance(messages, (list, tuple)) and not messages:
            raise EmptyPromptError("messages is empty; give at least one message")
        if isinstance(messages, (str, bytes)) or not messages:
            raise InvalidRequestError("messages must be a non-empty list of mappings with 'role' and 'content'")
        backend = self._current.backend

        def work() -> list[int]:
            return list(backend.tokenize(backend.render_chat(messages, tools), add_special=False))

        return await self._door.run(work)

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
        self._check_adapter(adapter)
        return self._current.fingerprint_configs(self.reuse if reuse is None else reuse, adapter)

    # Managing what is kept

    async def preheat(self, prompts: Sequence[Prompt | Sequence[Message]], **options: Any) -> dict[str, int]:
        """Computes prompts and keeps what they leave behind, so that the first request that starts like one of them
        finds it. A prompt is a text, token ids, or a list of messages.

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
        """Waits until everything finished so far is in the pool."""
        serving = self._current
        await serving.on_model_thread(serving.memory.save_all)
        await self._recycler.drain()

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
        cleared = await self.pool.clear()
        context = await serving.on_model_thread(lambda: serving.memory.invalidate(serving.scheduler.open_runs()))
        return {"context": context, **cleared}

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
            backend = await self._door.run(loader.load)
            self._loader = loader
            self._unregister(old)
            await old.stop(EngineClosedError("the model was replaced"))
            if backend.info.model_state != old.backend.info.model_state:
                await self.pool.clear()
            self._serve(backend)

    def stats(self) -> dict[str, Any]:
        """Counters and sizes at this moment: plain data, no I/O. See docs/troubleshooting.md for what they mean."""
        serving = self._current
        info = serving.backend.info
        size = info.block_tokens
        active = sum(run.computed for run in list(serving.scheduler.active_runs()))
        return {
            **dataclasses.asdict(serving.scheduler.counters),
            "queued": serving.scheduler.num_waiting,
            "running": serving.scheduler.num_active,
            "open_requests": self._gate.num_inside,
            "blocks_used": -(-active // size),
            "blocks_idle": -(-serving.memory.idle_tokens() // size),
            "blocks_total": info.capacity_tokens // size,
            "block_tokens": size,
            "block_bytes": info.block_bytes,
            "idle_sequences": serving.memory.num_idle,
            "context_evictions": serving.memory.evictions,
            "numerics": info.numerics,
            "model": info.name,
            "notes": list(info.notes),
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
            await self._serving.stop(EngineClosedError())
        await self._supervisor.aclose()
        await self.pool.aclose()

    @staticmethod
    def _unregister(serving: Serving) -> None:
        atexit.unregister(serving.scheduler.stop)

    async def __aenter__(self) -> KiteEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class _Opening:
    """What `KiteEngine.open` gives: awaitable, and an async context manager."""

    def __init__(self, loader: Loader, pool: PoolConfig, reuse: ReusePolicy, max_queue: int) -> None:
        if isinstance(max_queue, bool) or not isinstance(max_queue, int) or max_queue < 0:
            raise ConfigError(f"max_queue is {max_queue!r}; give a whole number of requests, 0 or more")
        self._arguments = (loader, pool, reuse, max_queue)
        self._engine: KiteEngine | None = None

    async def _open(self) -> KiteEngine:
        # In a thread: how much the pool may hold is read from the system's files.
        engine = await ThreadDoor().run(lambda: KiteEngine(*self._arguments))
        await engine._start()
        return engine

    def __await__(self) -> Generator[Any, None, KiteEngine]:
        return self._open().__await__()

    async def __aenter__(self) -> KiteEngine:
        self._engine = await self._open()
        return self._engine

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._engine is not None
        await self._engine.aclose()


class _Submitted:
    """A submitted request; leaving the block before its end cancels it."""

    def __init__(self, scheduler: Scheduler, request: Request) -> None:
        self._scheduler = scheduler
        self._request = request
        self.finished = False

    def __enter__(self) -> _Submitted:
        self._scheduler.submit(self._request)
        return self

    def take(self, item: Chunk | Generation | KiteError) -> Chunk | Generation:
        """The next event; raises it if it is an error."""
        self.finished = not isinstance(item, Chunk)
        if isinstance(item, KiteError):
            raise item
        return item

    def __exit__(self, *_: object) -> None:
        if not self.finished:
            self._scheduler.cancel(self._request)


class _ChatStream:
    """A stream that may also be awaited first, which gives itself."""

    def __init__(self, chunks: AsyncIterator[Chunk]) -> None:
        self._chunks = chunks

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._chunks

    def __await__(self) -> Generator[Any, None, _ChatStream]:
        async def itself() -> _ChatStream:
            return self

        return itself().__await__()

    async def aclose(self) -> None:
        """Ends the request."""
        close: Callable[[], Awaitable[None]] = self._chunks.aclose  # type: ignore[attr-defined]
        await close()


def _sampling(sampling: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
    if sampling is not None and not isinstance(sampling, SamplingParams):
        raise InvalidSamplingError(f"sampling is {sampling!r}; give a SamplingParams, or the options as keywords")
    if not options:
        return sampling or SamplingParams()
    unknown = sorted(set(options) - _SAMPLING_FIELDS)
    if unknown:
        raise InvalidSamplingError(
            f"unknown option {unknown[0]!r}; sampling options are {', '.join(sorted(_SAMPLING_FIELDS))}"
        )
    if sampling is not None:
        raise InvalidSamplingError(
            f"sampling= and the keyword {min(options)!r} are both given; use one way or the other"
        )
    return SamplingParams(**options)


def _check_urgency(deadline: Any, priority: Any) -> None:
    number = isinstance(deadline, (int, float)) and not isinstance(deadline, bool)
    if deadline is not None and not (number and deadline > 0):
        raise InvalidRequestError(f"deadline is {deadline!r}; give a positive number of seconds, or None")
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidRequestError(f"priority is {priority!r}; give a whole number, higher for sooner")


def _checked_ids(prompt: Any, vocab_size: int) -> list[int]:
    try:
        if isinstance(prompt, (bytes, bytearray)):
            raise TypeError
        # Not int(): a float or a digit string is a mistake, and would be cut to some other token.
        ids = [operator.index(token) for token in prompt]
    except TypeError:
        raise InvalidRequestError(
            f"a prompt must be a str or a flat list of token ids, not {_shorten(repr(prompt))}"
        ) from None
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(f"the prompt holds token id {token}; this model has 0 to {vocab_size - 1}")
    return ids


def _shorten(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
