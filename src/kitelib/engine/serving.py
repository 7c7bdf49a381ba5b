"""One loaded model with everything that serves it; replaced as a whole by `KiteEngine.reload`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import anyio

from kitelib.abc import ModelInfo
from kitelib.config import PoolConfig, ReusePolicy, SamplingParams
from kitelib.engine.adapters import adapters_from_pool, adapters_to_pool
from kitelib.engine.constraints import Constraint, ConstraintFactory
from kitelib.engine.context_memory import ContextMemory
from kitelib.engine.drafting import Drafting
from kitelib.engine.loading import Loader
from kitelib.engine.matching import Matcher
from kitelib.engine.output import Outputs
from kitelib.engine.request import Branch, Request
from kitelib.engine.saving import Saver
from kitelib.engine.scheduler import Scheduler
from kitelib.errors import EngineClosedError, KiteError, UnsupportedOptionError
from kitelib.fingerprint import Fingerprint, root_fingerprint
from kitelib.runtime.streams import LoopPort
from kitelib.runtime.supervisor import Supervisor
from kitelib.runtime.threads import ModelThread, ThreadDoor, to_the_end
from kitelib.stores.pool import RUPool
from kitelib.upcycle.recycler import Recycler
from kitelib.yoco.completions import Completions
from kitelib.yoco.encoder import Encoder
from kitelib.yoco.planner import EMPTY_PREFIX, Planner, PooledPrefix, Spawn, late_prefix
from kitelib.yoco.wordings import Question

__all__ = ["Serving", "load_backend", "use_model"]


_MAX_ROOTS = 65536
_SAVE_WAIT_S = 0.5
_GUESS_WAIT_S = 1.0  # nobody waits for it


@dataclasses.dataclass(slots=True)
class Serving:
    """A backend, its scheduler on its own thread, and the planner and constraints for its vocabulary."""

    backend: Any
    pool: RUPool
    planner: Planner
    completions: Completions
    matcher: Matcher
    memory: ContextMemory
    scheduler: Scheduler
    port: LoopPort
    thread: ModelThread
    config: PoolConfig
    spawn: Spawn
    _constraints: ConstraintFactory | None = None
    _constraints_lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    _roots: dict[tuple[str | None, str | None], Fingerprint] = dataclasses.field(default_factory=dict)

    @classmethod
    def start(
        cls,
        backend: Any,
        pool: RUPool,
        recycler: Recycler,
        supervisor: Supervisor,
        config: PoolConfig,
        door: ThreadDoor,
        encoder: Encoder | None,
    ) -> Serving:
        """Starts the model's thread. Call it on the event loop."""
        port = LoopPort(asyncio.get_running_loop())
        planner = Planner(
            pool,
            backend.info,
            str(backend.info.execution_path.get("layout", "none")),
            speed=lambda: scheduler.speed.tokens_per_s,
            spawn=supervisor.spawn,
        )
        saver = Saver(backend, pool, recycler, planner, port.add)
        memory = ContextMemory(backend, saver, lambda: pool.epoch)

        def ask_pool(branch: Branch, block: int) -> None:
            async def look() -> None:
                prefix = EMPTY_PREFIX
                try:
                    with anyio.move_on_after(
                        _SAVE_WAIT_S
                    ):  # what a preempted branch left may be on its way to the pool
                        await recycler.drain()
                    prefix = await planner.find(branch.run.chain, branch.run.tokens, block, logits=False, defer=False)
                finally:
                    scheduler.fetched(branch, prefix)
                    _bind_late(scheduler, branch.request, prefix)

            supervisor.spawn("fetch", look)

        matcher = Matcher(backend, pool, recycler, door, supervisor.spawn, encoder)
        outputs = Outputs(
            backend, backend.token_text, port.add, matcher.finished, rounded=config.kv_precision != "exact"
        )
        scheduler = Scheduler(memory, outputs, Drafting(backend), port, ask_pool)
        thread = ModelThread("kite-model", scheduler.run)
        thread.start()
        completions = Completions(pool, backend.info)
        return cls(
            backend, pool, planner, completions, matcher, memory, scheduler, port, thread, config, supervisor.spawn
        )

    def submitted(self, request: Request) -> None:
        """The scheduler has the request: what takes time and only helps with drafts follows. On the event loop."""
        _bind_late(self.scheduler, request, request.prefix)
        if request.asked is None:
            return
        question = request.question
        if request.seek_guess:
            self.spawn("guess", lambda: self._add_guess(request))
        if question is not None and self.matcher.encodes and request.vector is None:
            self.spawn("encode", lambda: self._add_vector(request, question))

    async def _add_guess(self, request: Request) -> None:
        guess = await self.completions.find(request.chain, None, patience_s=_GUESS_WAIT_S)
        if guess is not None:
            self.scheduler.call(lambda: self.scheduler.drafting.add_guess(request, guess))

    async def _add_vector(self, request: Request, question: Question) -> None:
        vector = None if request.closed else await self.matcher.vector(question)
        if vector is not None:
            self.scheduler.call(lambda: self.scheduler.drafting.add_vector(request, vector))

    def root(self, policy: ReusePolicy, adapter: str | None) -> Fingerprint:
        """Where the fingerprints of a tenant's requests start."""
        key = (policy.namespace, adapter)
        if len(self._roots) >= _MAX_ROOTS:
            self._roots.clear()  # they are computed again as they are needed
        if key not in self._roots:
            state = None if adapter is None else self.backend.adapter_states[adapter]
            self._roots[key] = root = self._compute_root(policy.namespace, state)
            about = {"execution_path": self.execution_path, "namespace": policy.namespace, "adapter": state}
            self.pool.hits.describe(root, about)
        self.pool.add_namespace(self._roots[key], policy.namespace)
        return self._roots[key]

    def root_of(self, namespace: str | None, adapter: tuple[bytes, float] | None) -> Fingerprint | None:
        """As `root`, of an adapter by its content; None if there is no such adapter. Any thread."""
        if adapter is not None and adapter not in self.backend.adapter_states.values():
            return None
        return self._compute_root(namespace, adapter)

    def _compute_root(self, namespace: str | None, adapter: tuple[bytes, float] | None) -> Fingerprint:
        return root_fingerprint(
            self.backend.info.model_state,
            self.execution_path,
            namespace,
            namespace_secret=self.config.namespace_secret,
            adapter=adapter,
        )

    @property
    def execution_path(self) -> dict[str, str | int | bool]:
        """The execution path with what the pool does to the numbers."""
        path = dict(self.backend.info.execution_path)
        if self.config.kv_precision != "exact":
            path["kv_precision"] = self.config.kv_precision
        return path

    def fingerprint_configs(self, policy: ReusePolicy, adapter: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """What `root` and the chains of such requests are made of; see `KiteEngine.fingerprint_configs`."""
        backend, info = self.backend, self.backend.info
        model: dict[str, Any] = {
            "model_state": info.model_state,
            "tokenizer": lambda text: backend.tokenize(text, add_special=True),
        }
        runtime: dict[str, Any] = {**self.execution_path, "namespace": policy.namespace}
        if runtime.get("block_tokens") != info.block_tokens:
            raise UnsupportedOptionError(
                f"the execution path of {info.name!r} does not hold its block_tokens, {info.block_tokens}, so its "
                "fingerprints can't be computed outside the engine"
            )
        if self.config.namespace_secret is not None:
            runtime["namespace_secret"] = _Secret(self.config.namespace_secret)
        if adapter is not None:
            runtime["adapter"] = backend.adapter_states[adapter]
        return model, runtime

    def constraint(self, params: SamplingParams) -> Constraint | None:
        """The compiled constraint of a request. Blocks; the first one reads the whole vocabulary."""
        with self._constraints_lock:
            if self._constraints is None:
                self._constraints = ConstraintFactory(
                    self.backend.vocab_bytes(),
                    self.backend.info.end_token_ids,
                    tokenize=lambda text: self.backend.tokenize(text, add_special=False),
                )
        return self._constraints.compile(params)

    def stats(self) -> dict[str, Any]:
        """The model's part of `KiteEngine.stats`."""
        info, size = self.backend.info, self.backend.info.block_tokens
        active = sum(run.computed for run in list(self.scheduler.active_runs()))
        return {
            **dataclasses.asdict(self.scheduler.counters),
            **self.backend.stats(),
            "queued": self.scheduler.num_waiting,
            "running": self.scheduler.num_active,
            "drafts": self.scheduler.drafting.stats(),
            "matching": self.matcher.stats(),
            "blocks_used": -(-active // size),
            "blocks_idle": max(0, -(-self.backend.used_tokens() // size) - -(-active // size)),
            "blocks_total": info.capacity_tokens // size,
            "block_tokens": size,
            "block_bytes": info.block_bytes,
            "idle_sequences": self.memory.num_idle,
            "context_evictions": self.memory.evictions,
            "numerics": info.numerics,
            "model": info.name,
        }

    async def on_model_thread(self, job: Callable[[], int]) -> int:
        """The result of a job run between two steps."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def run() -> None:
            result = job()
            # Through the port, after what the job itself sends.
            self.port.add(lambda: None if future.done() else future.set_result(result))

        self.scheduler.call(run)
        if self.scheduler.ended:
            raise EngineClosedError
        return await future

    async def finish(self, reason: KiteError, *, save: bool) -> None:
        """Ends all open requests with `reason`; `save` hands what they and earlier ones left to the recycler."""

        def end() -> int:
            self.scheduler.fail_all(reason)
            return self.memory.save_all() if save else 0

        await self.on_model_thread(end)

    def abandon(self) -> None:
        """The program ends and nobody has closed the engine. Blocks for as long as a step takes."""
        self.scheduler.stop(EngineClosedError())
        self.thread.join_at_exit()

    async def stop(self, reason: KiteError) -> None:
        """Ends the thread and frees the model. Requests still open fail with `reason`."""
        self.scheduler.stop(reason)
        try:
            await self.thread.join()
        finally:
            await to_the_end(self.backend.close)  # gives gigabytes back to the system, which takes its time


def _bind_late(scheduler: Scheduler, request: Request, prefix: PooledPrefix) -> None:
    """Blocks that are still on their way go to the scheduler when they come. On the event loop, once the scheduler has
    the request."""
    late = prefix.late
    if late is not None:
        late.bind(lambda first, units: scheduler.arrived(request, late, late_prefix(first, units)))


async def load_backend(loader: Loader, pool: RUPool, door: ThreadDoor) -> Any:
    """The loaded backend, with those of its adapters from the pool that are there. Raises as `KiteEngine.open`."""
    wanted = await door.run(loader.poolable_adapters)  # looks at the file system
    contents = await adapters_from_pool(pool, wanted, door, cache_dir=loader.cache_dir)

    def load() -> Any:
        backend = loader.load(contents)
        # The first chat takes 10 ms more, for a template engine to start up: better now than in a request.
        with contextlib.suppress(KiteError):
            backend.render_chat([{"role": "user", "content": "Hi"}])
        return backend

    return await door.run(load, discard=lambda backend: backend.close())


async def use_model(pool: RUPool, backend: Any, door: ThreadDoor) -> None:
    """Tells the pool which model is served from now on, and gives it the model's adapters."""
    info: ModelInfo = backend.info
    contents = backend.take_adapters()
    largest = max(info.block_bytes, 4 * info.vocab_size, *(len(each.weights) for each in contents.values()))
    await pool.use_model(info.model_state, bitwise=info.numerics == "bitwise", max_data_bytes=largest)
    pool.hits.use_model(info)
    await adapters_to_pool(pool, contents, door)


class _Secret(bytes):
    """Bytes that can be used, but are not shown where a mapping that holds them is printed."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<secret>"

    __str__ = __repr__
