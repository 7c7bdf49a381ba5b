"""`LlamaCppBackend`: GGUF models through llama.cpp's public C API."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kitelib.abc import BlockPayload, Message, ModelInfo, SequenceId, StepResult, StepWork
from kitelib.backends.chat_template import ChatTemplate
from kitelib.backends.llama_cpp.blocks import StateLayout
from kitelib.backends.llama_cpp.build_id import library_digest
from kitelib.backends.llama_cpp.context import ContextOptions, LlamaContext
from kitelib.backends.llama_cpp.library import load_library, spin_note
from kitelib.backends.llama_cpp.model import GGUFModel
from kitelib.backends.llama_cpp.model_state import model_state, state_parts
from kitelib.backends.llama_cpp.selftest import OUTPUTS, PLANS, SPLITS, RowPlan, find_plan
from kitelib.backends.selftest_cache import SelfTestCache
from kitelib.config import AdapterConfig, Numerics, block_tokens_of
from kitelib.errors import BackendError, ConfigError, FormatError, UnknownAdapterError
from kitelib.fingerprint import encode_fields
from kitelib.runtime.allocator import give_back_freed_memory
from kitelib.runtime.cores import default_threads
from kitelib.runtime.limits import available_memory_bytes
from kitelib.runtime.threads import in_own_thread

__all__ = ["LlamaCppBackend", "LlamaCppOptions"]

_BLOCK_TOKENS = {"llama": 16, "qwen": 32, "phi": 8}
_DEFAULT_CONTEXT, _LEAST_CONTEXT = 4096, 512  # where nobody says
# What llama.cpp's CPU kernels are fastest with, flash attention off: 600 tokens of SmolLM2 take 4.0 s on one thread,
# against 4.3 s in micro-batches of 512 rows and 4.5 s with flash attention; 20 tokens 0.15 s against 0.20 s.
_STANDARD_ROWS = RowPlan(64, 1, 1)
_PROBE_CELLS = 1024
# Moving a live cell takes about as long as this many rows stepping over a wasted one (measured: 15 us beside 0.65 us).
_MOVE_COST_ROWS = 24
# One masked cell costs about this many multiply-adds per attention head, row and layer (measured: 2.4 ns with flash
# attention, 2.7 times as much without, beside 0.074 ns per weight and token). Idle tokens may slow a step by this
# share before the pool becomes the better place.
_FLASH_CELL_WEIGHTS, _PLAIN_CELL_WEIGHTS = 32, 86
_PREFILL_WEIGHTS = 2e10  # weights that one thread multiplies with a token per second, roughly
_IDLE_SHARE = 0.05
_MIN_IDLE_FLASH, _MIN_IDLE_PLAIN = 768, 256


@dataclasses.dataclass(frozen=True, slots=True)
class LlamaCppOptions:
    """Options of the backend.

    Attributes:
        n_ctx: tokens of one sequence; None means what the model was trained for, at most 4096, or on a device with
            little memory as many as a quarter of what is available holds, at least 512.
        kv_tokens: tokens of all sequences together; None means four times n_ctx if the memory allows it.
        threads: threads of a step; None leaves one core to the application.
        max_sequences: sequences that run at once; default 16.
        block_tokens: tokens in a block; None chooses by architecture (llama 16, qwen 32, phi 8, else 16).
        block_table: prefix of an architecture's name -> tokens in a block; goes before that choice.
        numerics: what to ask the load-time self-test for.
        adapters: name -> LoRA adapter.
        cache_dir: where digests and self-test results are remembered; None means the user's cache folder.
    """

    n_ctx: int | None = None
    kv_tokens: int | None = None
    threads: int | None = None
    max_sequences: int = 16
    block_tokens: int | None = None
    block_table: Mapping[str, int] = dataclasses.field(default_factory=dict)
    numerics: Numerics = "bitwise"
    adapters: Mapping[str, AdapterConfig] = dataclasses.field(default_factory=dict)
    cache_dir: Path | None = None


class LlamaCppBackend:
    """Implements `kitelib.abc.Backend`. Create it with `load`."""

    info: ModelInfo

    def __init__(self, model: GGUFModel, context: LlamaContext, template: ChatTemplate, info: ModelInfo) -> None:
        self.info = info
        self.adapter_states = {name: (each.digest, each.scale) for name, each in model.adapters.items()}
        self._model = model
        self._context = context
        self._drag = 0
        self._template = template

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        options: LlamaCppOptions,
        progress: Callable[[str, float], None] | None = None,
    ) -> LlamaCppBackend:
        """Loads a model and checks how exact it can be. Takes seconds; call it off the event loop.

        Raises:
            ModelNotFoundError, ModelFormatError: the file is missing or not a model that can be served.
            ConfigError: an option does not fit the model.
            BackendError: llama.cpp failed, or the memory does not suffice.
        """
        lib = load_library()
        report = None if progress is None else lambda share: progress("reading the weights", share)
        model = GGUFModel.load(path, adapters=options.adapters, cache_dir=options.cache_dir, progress=report)
        try:
            return _Loader(lib, model, options, progress).load()
        except BaseException:
            model.close()
            raise

    def tokenize(self, text: str, *, add_special: bool) -> list[int]:
        return self._model.tokenize(text, add_special=add_special)

    def detokenize(self, ids: Sequence[int]) -> bytes:
        return self._model.detokenize(ids)

    def token_text(self, token_id: int) -> str:
        """The token as people read it, special tokens included."""
        return self._model.token_text(token_id)

    def vocab_bytes(self) -> list[bytes]:
        """Bytes of every token id; b"" for special tokens."""
        return self._model.vocab_bytes()

    def render_chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        return self._template.render(messages, tools)

    def create(self, adapter: str | None = None) -> SequenceId:
        if adapter is not None and adapter not in self.adapter_states:
            raise UnknownAdapterError(f"no adapter is called {adapter!r}; open the engine with adapters={{...}}")
        return self._context.create(adapter)

    def fork(self, source: SequenceId, num_tokens: int) -> SequenceId:
        return self._context.fork(source, num_tokens)

    def shareable(self, source: SequenceId, num_tokens: int) -> bool:
        """Whether `fork(source, num_tokens)` works."""
        return self._context.shareable(source, num_tokens)

    def release(self, sequence: SequenceId) -> None:
        self._context.release(sequence)

    def truncate(self, sequence: SequenceId, num_tokens: int) -> None:
        self._context.truncate(sequence, num_tokens)

    def step(self, work: Sequence[StepWork]) -> StepResult:
        # Cells that nobody needs slow every row of every step. Moving the live ones away costs about as much as what
        # they have cost by then, so it is never much worse than having known in advance.
        wasted = self._context.wasted_tokens
        self._drag = self._drag + wasted * sum(len(item.token_ids) for item in work) if wasted else 0
        if self._drag > _MOVE_COST_ROWS * self._context.used_tokens:
            self._context.compact()
            self._drag = 0
        return self._context.step(work)

    def room(
        self,
        sequence: SequenceId | None = None,  # noqa: ARG002 - any token of any sequence takes one cell
        beside: Sequence[tuple[SequenceId, int]] = (),
        *,
        shared: int = 0,  # noqa: ARG002 - what is shared takes none
    ) -> int:
        return self._context.room() - sum(count for _, count in beside)

    def free_sequences(self) -> int:
        """How many more sequences can be created."""
        return self._context.free_sequences

    def used_tokens(self) -> int:
        """Tokens that live sequences hold, shared ones counted once."""
        return self._context.used_tokens

    def take_adapters(self) -> dict[str, Any]:
        """None: GGUF adapters are mapped from their files, which is as quick as from a pool."""
        return {}

    def stats(self) -> dict[str, Any]:
        """For `KiteEngine.stats`: "fragmentation" is the share of the memory that is dead until cells are moved."""
        return {"fragmentation": self._context.wasted_tokens / max(1, self.info.capacity_tokens)}

    def export_blocks(self, sequence: SequenceId, first: int, count: int, end: int | None = None) -> list[BlockPayload]:
        if not self.info.reuse_blocks:
            return []
        size = self.info.block_tokens
        last = min(self._context.num_tokens(sequence), (first + count) * size, end if end is not None else 2**31)
        counts = [min(size, last - start) for start in range(first * size, last, size)]
        try:
            return self._context.export_range(sequence, first * size, counts) if counts else []
        except FormatError:
            return []  # part of the range is not in the cache any more: a miss

    def cut(self, payload: BlockPayload, num_tokens: int) -> BlockPayload:
        if self._context.layout is None:
            raise FormatError("the KV of this model has no blocks, so no payload can be cut")
        return self._context.layout.cut(payload, num_tokens)

    def restore_blocks(self, sequence: SequenceId, first: int, payloads: Sequence[BlockPayload]) -> None:
        if self._context.num_tokens(sequence) != first * self.info.block_tokens:
            raise BackendError(
                f"blocks from {first} on can't follow a sequence of {self._context.num_tokens(sequence)} tokens"
            )
        self._context.restore(sequence, payloads)

    def close(self) -> None:
        self._context.close()
        self._model.close()


@dataclasses.dataclass(frozen=True, slots=True)
class _Setup:
    """How the model is going to run; without a layout there are no blocks, `bitwise` means that the self-test held."""

    flash: bool
    layout: StateLayout | None
    rows: RowPlan
    bitwise: bool


class _Loader:
    """The steps of loading, in order; holds what they share."""

    def __init__(
        self, lib: Any, model: GGUFModel, options: LlamaCppOptions, progress: Callable[[str, float], None] | None
    ) -> None:
        self._lib = lib
        self._model = model
        self._options = options
        self._progress = progress or (lambda *_: None)
        self._notes: list[str] = []
        self._threads = default_threads() if options.threads is None else options.threads
        most = max(16, 4 * (os.cpu_count() or 1))
        if not 1 <= self._threads <= most:
            raise ConfigError(
                f"threads is {self._threads}; give 1 to {most}: more than there are cores only slows down"
            )
        if options.max_sequences < 1 or options.max_sequences > 63:
            raise ConfigError(f"max_sequences is {options.max_sequences}; give 1 to 63")
        self._adapters = {name: (each.handle, each.scale) for name, each in model.adapters.items()}

    def load(self) -> LlamaCppBackend:
        context_tokens = self._context_tokens()
        block_tokens = self._block_tokens()
        setup = self._setup()
        context_tokens, capacity = self._capacity(context_tokens, setup.layout)
        options = self._context_options(setup.rows, capacity, flash=setup.flash)
        self._progress("allocating the KV cache", 0.0)
        # What the contexts of the checks above had touched: in new buffers, those pages would stay in memory unused.
        give_back_freed_memory()
        context = LlamaContext(self._lib, self._model.handle, options, adapters=self._adapters)
        context.layout = setup.layout
        if note := spin_note():
            self._notes.append(note)
        try:
            info = self._info(context_tokens, capacity, block_tokens, setup, context.max_outputs)
            return LlamaCppBackend(self._model, context, self._model.template(), info)
        except BaseException:
            context.close()
            raise

    def _context_tokens(self) -> int:
        trained, wanted = self._model.n_ctx_train, self._options.n_ctx
        if wanted is None:
            return min(trained, _DEFAULT_CONTEXT)
        if not 1 <= wanted <= trained:
            raise ConfigError(f"n_ctx is {wanted}; this model takes 1 to {trained} tokens")
        return wanted

    def _block_tokens(self) -> int:
        wanted, option, architecture = self._options.block_tokens, "block_tokens", self._model.architecture
        if wanted is None:
            wanted, option = block_tokens_of(self._options.block_table, architecture), "ru_slicing"
        if wanted is None:
            return block_tokens_of(_BLOCK_TOKENS, architecture) or 16
        if wanted < 1 or wanted > 256 or (self._model.n_swa and wanted > self._model.n_swa):
            raise ConfigError(f"{option} is {wanted}; give 1 to {min(256, self._model.n_swa or 256)}")
        return wanted

    def _setup(self) -> _Setup:
        if self._options.numerics == "bitwise":
            try:
                layout, _ = self._probe(flash=True)
            except BackendError:
                layout = None
            if plan := self._plan(layout):
                return _Setup(True, layout, plan, True)
        try:
            flash, (layout, note) = False, self._probe(flash=False)
        except BackendError:  # a model that only runs with flash attention
            flash, (layout, note) = True, self._probe(flash=True)
        if note:
            self._notes.insert(0, note)  # before what follows from it; the engine shows the first
        return _Setup(flash, layout, _STANDARD_ROWS, False)

    def _context_options(self, plan: RowPlan, capacity: int, *, flash: bool) -> ContextOptions:
        return ContextOptions(
            capacity_tokens=capacity,
            max_sequences=self._options.max_sequences,
            rows=plan.rows,
            min_rows=plan.min_rows,
            row_multiple=plan.row_multiple,
            threads=self._threads,
            flash_attention=flash,
        )

    def _probe(self, *, flash: bool) -> tuple[StateLayout | None, str]:
        """The layout, or None and the reason why there is none. BackendError: it does not run with this attention."""
        model = self._model
        options = self._context_options(RowPlan(16, 1, 1), 256, flash=flash)
        context = LlamaContext(self._lib, model.handle, options, adapters={})
        try:
            sequence = context.create()
            context.step([StepWork(sequence, [1, 2, 3], 0, False)])
            if model.is_recurrent or model.is_hybrid:
                kind = "recurrent" if model.is_recurrent else "hybrid"
                note = f"{kind} model: its state can't be cut into blocks, so it is served without block reuse"
                return None, note
            return StateLayout.probe(context.read_range(sequence, 0, 3).tobytes(), [0, 1, 2]), ""
        except FormatError as error:
            return None, f"served without block reuse: {error}"
        finally:
            context.close()

    def _plan(self, layout: StateLayout | None) -> RowPlan | None:
        if layout is None or layout.transposed:
            self._notes.append("numerics are standard: the self-test needs blocks and flash attention")
            return None
        key = hashlib.sha256(
            encode_fields(
                "kite.selftest",
                self._model.weights_digest,
                library_digest(self._lib),
                self._system(),
                self._threads,
                repr((PLANS, SPLITS, OUTPUTS)),
                repr(sorted((each.digest, each.scale) for each in self._model.adapters.values())),
            )
        ).hexdigest()
        cache = SelfTestCache(self._options.cache_dir, RowPlan)
        known, plan = cache.get(key)
        if not known:
            self._progress("checking numerics", 0.0)

            def make(plan: RowPlan) -> LlamaContext:
                options = self._context_options(plan, _PROBE_CELLS, flash=True)
                context = LlamaContext(self._lib, self._model.handle, options, adapters=self._adapters)
                context.layout = layout
                return context

            # In a thread of its own, whose heap goes back to the system whole: what the checks touch is not what stays.
            adapters = sorted(self._adapters)
            plan = in_own_thread("kite-self-test", lambda: find_plan(make, PLANS, self._model.n_vocab, adapters))
            cache.put(key, plan)
        if plan is None:
            self._notes.append("numerics are standard: on this machine the kernels' bits depend on the batch")
        return plan

    def _capacity(self, context_tokens: int, layout: StateLayout | None) -> tuple[int, int]:
        """Tokens of one sequence, fewer than `context_tokens` if nobody asked for those and the memory is small, and
        cells of the cache."""
        wanted = self._options.kv_tokens
        if self._options.n_ctx is None and layout is not None:
            context_tokens = self._affordable(context_tokens, layout)
        if wanted is not None and wanted < context_tokens:
            raise ConfigError(f"kv_tokens is {wanted}; it must be at least n_ctx, which is {context_tokens}")
        # Padding rows and the cache's own granularity (256 cells) come on top.
        capacity = wanted or 4 * context_tokens
        if layout is not None:
            budget = available_memory_bytes() if wanted is not None else self._default_kv_bytes()
            if context_tokens * layout.token_bytes > available_memory_bytes():
                raise BackendError(
                    f"the KV of n_ctx={context_tokens} tokens takes {context_tokens * layout.token_bytes / 2**20:.0f} MiB, "
                    "more than the memory available; open the engine with a smaller n_ctx"
                )
            if wanted is None:
                capacity = max(context_tokens, min(capacity, budget // layout.token_bytes))
            elif capacity * layout.token_bytes > budget:
                raise BackendError(
                    f"kv_tokens={wanted} takes {capacity * layout.token_bytes / 2**20:.0f} MiB, more than the memory "
                    "available; give less"
                )
        return context_tokens, -(-(capacity + 64) // 256) * 256

    def _default_kv_bytes(self) -> int:
        """A quarter of what is available beside the weights: they are mapped, so the system counts them as available,
        but a model whose weights come from storage again and again is of no use."""
        available = available_memory_bytes()
        # Half at least: where a control group counts them as in use, they are not counted twice.
        return max(available - int(self._lib.llama_model_size(self._model.handle)), available // 2) // 4

    def _affordable(self, context_tokens: int, layout: StateLayout) -> int:
        most = max(_LEAST_CONTEXT, self._default_kv_bytes() // layout.token_bytes // 256 * 256)
        if most >= context_tokens:
            return context_tokens
        self._notes.append(
            f"n_ctx is {most} and not {context_tokens}, whose KV would take more than a quarter of the memory available; "
            "open the engine with n_ctx to have it otherwise"
        )
        return most

    def _system(self) -> str:
        return bytes(self._lib.llama_print_system_info()).decode()

    def _info(
        self, context_tokens: int, capacity: int, block_tokens: int, setup: _Setup, max_outputs: int
    ) -> ModelInfo:
        model, layout = self._model, setup.layout
        numerics: Numerics = "bitwise" if setup.bitwise else "standard"
        path: dict[str, str | int | bool] = {
            "backend": "llama_cpp",
            "attention": "flash" if setup.flash else "plain",
            "layout": layout.layout_id if layout else "none",
            "block_tokens": block_tokens,
            "numerics": numerics,
        }
        if setup.bitwise:
            path |= {
                "library": library_digest(self._lib).hex(),
                "system": self._system(),
                "rows": repr(setup.rows),
                "threads": self._threads,
            }
        heads = max(1, model.n_head * model.n_layer)
        cell = _FLASH_CELL_WEIGHTS if setup.flash else _PLAIN_CELL_WEIGHTS
        idle = int(_IDLE_SHARE * model.n_params / (cell * heads))
        return ModelInfo(
            name=model.name,
            architecture=model.architecture,
            context_tokens=context_tokens,
            capacity_tokens=capacity,
            max_sequences=self._options.max_sequences,
            max_step_tokens=setup.rows.rows,
            vocab_size=model.n_vocab,
            end_token_ids=frozenset(model.end_token_ids),
            block_tokens=block_tokens,
            block_bytes=block_tokens * (layout.token_bytes if layout else 0),
            model_state=model_state(model.weights_digest),
            state_parts=state_parts(model.weights_digest),
            execution_path=path,
            numerics=numerics,
            reuse_blocks=layout is not None,
            resident_idle_tokens=max(_MIN_IDLE_FLASH if setup.flash else _MIN_IDLE_PLAIN, idle),
            notes=tuple(self._notes),
            prefill_guess=_PREFILL_WEIGHTS * self._threads / max(1, model.n_params),
            max_outputs=max_outputs,
        )
