"""`TorchBackend`: Hugging Face models through PyTorch, on CUDA and on the CPU."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kitelib.abc import BlockPayload, Message, ModelInfo, SequenceId, StepResult, StepWork
from kitelib.backends.torch_engine.device_runner import DeviceRunner
from kitelib.backends.torch_engine.runner import Runner
from kitelib.config import AdapterConfig, Numerics
from kitelib.errors import UnknownAdapterError
from kitelib.runtime.threads import in_own_thread
from kitelib.upcycle.adapter_unit import AdapterContent

if TYPE_CHECKING:
    from kitelib.backends.torch_engine.compiled import CompiledDecode
    from kitelib.backends.torch_engine.lora import AdapterSet
    from kitelib.backends.torch_engine.passages import PassageKV
    from kitelib.backends.torch_engine.tokenizer import FolderTokenizer

__all__ = ["DeviceTorchBackend", "TorchBackend", "TorchOptions"]


@dataclasses.dataclass(frozen=True, slots=True)
class TorchOptions:
    """Options of the backend.

    Attributes:
        n_ctx: tokens of one sequence; None means what the model was trained for, at most 4096 on the CPU.
        kv_tokens: tokens of all sequences together; None means four times n_ctx on the CPU, and on CUDA what a
            profile run leaves free.
        threads: threads of a step on the CPU; None leaves one core to the application.
        max_sequences: sequences that run at once; None means 16 on the CPU and 256 on CUDA.
        block_tokens: tokens in a block; None chooses by architecture (llama 16, qwen 32, phi 8, else 16).
        block_table: prefix of an architecture's name -> tokens in a block; goes before that choice.
        numerics: what to ask the load-time self-test for.
        adapters: name -> LoRA adapter, a PEFT folder.
        cache_dir: where digests, self-test results and compiled programs are remembered; None means the user's cache
            folder.
        dtype: type of the weights and the KV: "auto", "bfloat16", "float16" or "float32".
        device: "auto", "cpu", "cuda" or "cuda:N".
        adapter_contents: name -> adapter that the pool had, so that its folder is not read.
        compile: let a process in the background compile decode steps (CPU, standard numerics).
    """

    n_ctx: int | None = None
    kv_tokens: int | None = None
    threads: int | None = None
    max_sequences: int | None = None
    block_tokens: int | None = None
    block_table: Mapping[str, int] = dataclasses.field(default_factory=dict)
    numerics: Numerics = "bitwise"
    adapters: Mapping[str, AdapterConfig] = dataclasses.field(default_factory=dict)
    cache_dir: Path | None = None
    dtype: str = "auto"
    device: str = "auto"
    adapter_contents: Mapping[str, AdapterContent] = dataclasses.field(default_factory=dict)
    compile: bool = True


class TorchBackend:
    """Implements `kitelib.abc.Backend`. Create it with `load`.

    Attributes:
        info: the model.
        adapter_states: name -> (content digest, scale) of every adapter.
    """

    info: ModelInfo

    def __init__(
        self,
        info: ModelInfo,
        runner: Runner,
        tokenizer: FolderTokenizer,
        adapters: AdapterSet | None,
        close: Callable[[], None],
        compiled: CompiledDecode | None = None,
    ) -> None:
        self.info = info
        self.adapter_states: dict[str, tuple[bytes, float]] = {} if adapters is None else dict(adapters.states)
        self._adapters = adapters
        self._runner: Runner | None = runner
        self._tokenizer = tokenizer
        self._close = close
        self._compiled = compiled
        self._passages: PassageKV | None = None

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        options: TorchOptions,
        progress: Callable[[str, float], None] | None = None,
    ) -> TorchBackend:
        """Loads a model and checks how exact it can be. Takes seconds to minutes; call it off the event loop.

        Raises:
            ModelNotFoundError, ModelFormatError: the folder is missing, or holds no model that can be served.
            UnsupportedOptionError, ConfigError: the model or an option can't be served; says why.
            MissingExtraError: torch or transformers is not installed.
            BackendError: the memory does not suffice.
        """
        from kitelib.backends.torch_engine.loader import TorchLoader

        # In a thread that ends: each thread that computes has OpenMP workers of its own as long as it lives, and with
        # more of them than cores the runtime nearly stops spinning, which makes every step two to three times slower.
        return in_own_thread("kite-load", TorchLoader(path, options, progress).load)

    def take_adapters(self) -> dict[str, AdapterContent]:
        """The adapters as they were read, for the pool; once, then they are freed."""
        return {} if self._adapters is None else self._adapters.take_contents()

    @property
    def runner(self) -> Runner:
        """What the steps run on."""
        assert self._runner is not None, "the backend is closed"
        return self._runner

    def tokenize(self, text: str, *, add_special: bool) -> list[int]:
        return self._tokenizer.tokenize(text, add_special=add_special)

    def detokenize(self, ids: Sequence[int]) -> bytes:
        return self._tokenizer.detokenize(ids)

    def token_text(self, token_id: int) -> str:
        """The token as people read it, special tokens included."""
        return self._tokenizer.token_text(token_id)

    def vocab_bytes(self) -> list[bytes]:
        """Bytes of every token id; b"" for special tokens."""
        return self._tokenizer.vocab_bytes()

    def render_chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        return self._tokenizer.render_chat(messages, tools)

    @property
    def passages(self) -> PassageKV:
        """Moves KV to other positions."""
        if self._passages is None:
            from kitelib.backends.torch_engine.passages import PassageKV

            self._passages = PassageKV(self.runner, self.info.context_tokens)
        return self._passages

    def create(self, adapter: str | None = None) -> SequenceId:
        if adapter is not None and adapter not in self.adapter_states:
            raise UnknownAdapterError(f"no adapter is called {adapter!r}; open the engine with adapters={{...}}")
        return self.runner.tables.create(adapter)

    def fork(self, source: SequenceId, num_tokens: int) -> SequenceId:
        return self.runner.tables.fork(source, num_tokens)

    def shareable(self, source: SequenceId, num_tokens: int) -> bool:
        """Whether `fork(source, num_tokens)` works: always, since windows are masks here and nothing is dropped."""
        return num_tokens <= self.runner.tables[source].num_tokens

    def release(self, sequence: SequenceId) -> None:
        self.runner.tables.release(sequence)

    def truncate(self, sequence: SequenceId, num_tokens: int) -> None:
        self.runner.truncate(sequence, num_tokens)

    def step(self, work: Sequence[StepWork]) -> StepResult:
        return self.runner.step(work)

    def room(
        self, sequence: SequenceId | None = None, beside: Sequence[tuple[SequenceId, int]] = (), *, shared: int = 0
    ) -> int:
        return self.runner.tables.room(sequence, beside, shared)

    def free_sequences(self) -> int:
        return self.runner.tables.free_sequences

    def used_tokens(self) -> int:
        """Tokens that live sequences hold, shared blocks counted once."""
        return 0 if self._runner is None else self._runner.tables.used_tokens()

    def stats(self) -> dict[str, Any]:
        """For `KiteEngine.stats`. "fragmentation" is the share of the free memory that a sequence can't use: none, since
        any free block serves any sequence; "block_copies" counts copies on write; "compiled" is where the compiling of
        decode steps stands ("off": nothing is compiled). May be called from any thread, also while the backend is closed."""
        runner = self._runner
        return {
            "fragmentation": 0.0,
            "block_copies": 0 if runner is None else runner.tables.copies,
            "compiled": "off" if self._compiled is None else self._compiled.stats()["state"],
        }

    def export_blocks(self, sequence: SequenceId, first: int, count: int, end: int | None = None) -> list[BlockPayload]:
        return self.runner.export(sequence, first, count, end)

    def cut(self, payload: BlockPayload, num_tokens: int) -> BlockPayload:
        return self.runner.layout.cut(payload, num_tokens)

    def restore_blocks(self, sequence: SequenceId, first: int, payloads: Sequence[BlockPayload]) -> None:
        self.runner.restore(sequence, first, payloads)

    def close(self) -> None:
        if self._runner is not None:
            self._runner = self._passages = None
            self._close()


class DeviceTorchBackend(TorchBackend):
    """A `TorchBackend` whose steps run beside the thread that starts them (`kitelib.abc.OverlappingBackend`)."""

    def begin_step(self, work: Sequence[StepWork]) -> Callable[[], StepResult]:
        runner = self.runner
        assert isinstance(runner, DeviceRunner)
        return runner.begin(work)
