"""Loads a model: from a path and options to a backend that is ready, step by step."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kitelib.abc import ModelInfo
from kitelib.backends.selftest_cache import SelfTestCache
from kitelib.backends.torch_engine.backend import DeviceTorchBackend, TorchBackend, TorchOptions
from kitelib.backends.torch_engine.device_runner import DeviceRunner
from kitelib.backends.torch_engine.forward import Forward, probe_layers
from kitelib.backends.torch_engine.packing import RowPlan
from kitelib.backends.torch_engine.pages import LayerShape, PagedCache, block_bytes
from kitelib.backends.torch_engine.runner import Runner
from kitelib.backends.torch_engine.selftest import CUDA_PLANS, PLANS, SELF_TEST, TEST_TOKENS, find_plan
from kitelib.backends.torch_engine.sizing import kv_blocks, most_outputs
from kitelib.backends.torch_engine.versions import execution_versions
from kitelib.config import Numerics, block_tokens_of
from kitelib.errors import BackendError, ConfigError, MissingExtraError, UnsupportedOptionError
from kitelib.fingerprint import encode_fields
from kitelib.runtime.cores import default_threads
from kitelib.runtime.limits import available_memory_bytes

if TYPE_CHECKING:
    import torch

    from kitelib.backends.torch_engine.compiled import CompiledDecode
    from kitelib.backends.torch_engine.kernels.contract import AttentionKernel
    from kitelib.backends.torch_engine.linear import RowTile
    from kitelib.backends.torch_engine.lora import AdapterSet
    from kitelib.backends.torch_engine.opening import Dtype, OpenedModel

__all__ = ["TorchLoader"]

_BLOCK_TOKENS = {"llama": 16, "qwen": 32, "phi": 8}
_CPU_CONTEXT = 4096
_CPU_SEQUENCES, _CUDA_SEQUENCES = 16, 256
_IDLE_SEQUENCES = 1024
_CPU_ROWS, _CUDA_ROWS = 256, 4096
_GRAPH_ROWS = 64
"""Rows up to which decode steps with drafts are captured where fewer sequences run."""
# Weights times tokens per second, as a first guess: of one CPU thread, of a CUDA device.
_CPU_SPEED, _CUDA_SPEED = 1e11, 1e14


class TorchLoader:
    """The steps of loading, in order; holds what they share."""

    def __init__(
        self, path: str | os.PathLike[str], options: TorchOptions, progress: Callable[[str, float], None] | None
    ) -> None:
        self._path = Path(path)
        self._options = options
        self._progress = progress or (lambda *_: None)
        self._notes: list[str] = []
        self._closers: list[Callable[[], None]] = []
        self._tile: RowTile | None = None

    def load(self) -> TorchBackend:
        """See `TorchBackend.load`."""
        try:
            return self._load()
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        while self._closers:
            self._closers.pop()()

    def _load(self) -> TorchBackend:
        from kitelib.backends.torch_engine.threads import prepare_torch

        options = self._options
        self._threads = default_threads() if options.threads is None else options.threads
        try:
            note = prepare_torch(self._threads)
        except ModuleNotFoundError as error:
            raise MissingExtraError("torch", "torch", "opening a Hugging Face model") from error
        if note:
            self._notes.append(note)
        self._device = _choose_device(options.device)
        self._cuda = self._device.type == "cuda"
        self._runner_type = DeviceRunner if self._cuda else Runner
        self._max_sequences = options.max_sequences or (_CUDA_SEQUENCES if self._cuda else _CPU_SEQUENCES)
        opened = self._open()
        self._max_outputs = most_outputs(opened.facts.vocab_size, self._max_sequences)
        self._notes.extend(opened.notes)
        self._context_tokens = self._choose_context(opened)
        block_tokens = self._choose_block_tokens(opened)
        layers = probe_layers(opened.model, opened.facts.name)
        self._forward = Forward(opened.model, latent=any(layer.latent for layer in layers))
        kernel = self._choose_kernel(block_tokens)
        adapters = self._adapters(opened)
        rows, bitwise = self._choose_rows(opened, layers, block_tokens, kernel, adapters)
        self._compiled = None if bitwise else self._compile(opened, layers)

        def make(num_blocks: int, plan: RowPlan) -> Runner:
            cache = PagedCache(layers, num_blocks, block_tokens, opened.kv_dtype, self._device)
            return self._runner_type(
                self._forward,
                cache,
                kernel,
                plan,
                self._max_sequences + _IDLE_SEQUENCES,
                adapters=adapters,
                compiled=self._compiled,
                max_outputs=self._max_outputs,
                tile=self._tile,
            )

        num_blocks = self._capacity(opened, layers, block_tokens, rows, make)
        self._progress("allocating the KV cache", 0.0)
        runner = make(num_blocks, rows)
        if isinstance(runner, DeviceRunner):
            self._capture(runner, kernel, rows)
        info = self._info(opened, layers, runner, kernel, rows, bitwise=bitwise)
        kind = DeviceTorchBackend if isinstance(runner, DeviceRunner) else TorchBackend
        return kind(info, runner, opened.tokenizer, adapters, self._close, self._compiled)

    def _capture(self, runner: DeviceRunner, kernel: AttentionKernel, rows: RowPlan) -> None:
        """Captures decode steps in the sizes of batch that the row plan allows."""
        from kitelib.backends.torch_engine.graphed import capture, decode_graphs

        graphs = decode_graphs(
            self._forward,
            runner.cache,
            kernel,
            rows,
            max_rows=max(self._max_sequences, min(_GRAPH_ROWS, runner.max_outputs)),
            max_context=self._context_tokens,
        )
        if graphs is None:
            return
        note = capture(graphs, lambda done, total: self._progress("capturing CUDA graphs", done / total))
        if note:
            self._notes.append(note)
        else:
            runner.graphs = graphs

    def _open(self) -> OpenedModel:
        from kitelib.backends.torch_engine.opening import open_model

        cache_dir = self._options.cache_dir
        return open_model(
            self._path,
            dtype=cast("Dtype", self._options.dtype),  # checked there
            device=self._device,
            cache_dir=cache_dir,
            progress=lambda share: self._progress("reading the weights", share),
        )

    def _choose_context(self, opened: OpenedModel) -> int:
        trained, wanted = opened.facts.context_tokens, self._options.n_ctx
        if wanted is None:
            return trained if self._cuda else min(trained, _CPU_CONTEXT)
        if not 1 <= wanted <= trained:
            raise ConfigError(f"n_ctx is {wanted}; this model takes 1 to {trained} tokens")
        return wanted

    def _choose_block_tokens(self, opened: OpenedModel) -> int:
        wanted, option, architecture = self._options.block_tokens, "block_tokens", opened.facts.architecture
        if wanted is None:
            wanted, option = block_tokens_of(self._options.block_table, architecture), "ru_slicing"
        if wanted is None:
            return block_tokens_of(_BLOCK_TOKENS, architecture) or 16
        if not 1 <= wanted <= 256:
            raise ConfigError(f"{option} is {wanted}; give 1 to 256")
        if self._cuda and wanted not in (8, 16, 32, 64, 128):
            raise ConfigError(f"{option} is {wanted}; on CUDA give 8, 16, 32, 64 or 128")
        return wanted

    def _choose_kernel(self, block_tokens: int) -> AttentionKernel:
        if self._cuda:
            import torch

            from kitelib.backends.torch_engine.kernels.triton_attention import TritonAttention

            return TritonAttention(
                block_tokens,
                bitwise=self._options.numerics == "bitwise",
                max_context=self._context_tokens,
                num_sms=torch.cuda.get_device_properties(self._device).multi_processor_count,
            )
        from kitelib.backends.torch_engine.kernels.gathered import GatheredAttention
        from kitelib.backends.torch_engine.kernels.native import native_attention, native_attention_note

        native = native_attention()
        if native is None:
            self._notes.append(native_attention_note())
            return GatheredAttention()
        return native

    def _adapters(self, opened: OpenedModel) -> AdapterSet | None:
        if not self._cuda:
            from kitelib.backends.torch_engine.linear import pack_linears

            self._tile = pack_linears(opened.model).tile
        if not self._options.adapters:
            return None
        from kitelib.backends.torch_engine.lora import AdapterSet

        adapters = AdapterSet(
            opened.model,
            self._options.adapters,
            opened.dtype,
            self._device,
            self._options.cache_dir,
            self._progress,
            contents=self._options.adapter_contents,
            row_invariant=self._options.numerics == "bitwise",
        )
        self._closers.append(adapters.close)
        return adapters

    def _choose_rows(
        self,
        opened: OpenedModel,
        layers: tuple[LayerShape, ...],
        block_tokens: int,
        kernel: AttentionKernel,
        adapters: AdapterSet | None,
    ) -> tuple[RowPlan, bool]:
        standard = RowPlan(1, _CUDA_ROWS if self._cuda else _CPU_ROWS)
        if self._options.numerics != "bitwise":
            return standard, False
        if not kernel.row_invariant:
            self._notes.append("numerics are standard: this attention's bits depend on the batch")
            return standard, False
        states = {} if adapters is None else adapters.states
        versions = execution_versions(self._device, self._threads)
        fields = (
            opened.model_state,
            repr(layers),
            repr(versions),
            repr((PLANS, CUDA_PLANS)),
            kernel.name,
            block_tokens,
            SELF_TEST,
            self._max_outputs,
        )
        key = hashlib.sha256(encode_fields("kite.torch.selftest", *fields, repr(sorted(states.values())))).hexdigest()
        cache = SelfTestCache(self._options.cache_dir, RowPlan)
        known, plan = cache.get(key)
        if not known:
            self._progress("checking numerics", 0.0)
            blocks = -(-TEST_TOKENS // block_tokens) + self._max_sequences + 64

            def make(plan: RowPlan) -> Runner:
                pages = PagedCache(layers, blocks, block_tokens, opened.kv_dtype, self._device)
                return Runner(
                    self._forward, pages, kernel, plan, self._max_sequences + 64, adapters=adapters, tile=self._tile
                )

            plan = find_plan(
                make, CUDA_PLANS if self._cuda else PLANS, opened.facts.vocab_size, self._max_outputs, sorted(states)
            )
            cache.put(key, plan)
        if plan is None:
            self._notes.append("numerics are standard: on this machine the kernels' bits depend on the batch")
            return standard, False
        return plan, True

    def _compile(self, opened: OpenedModel, layers: tuple[LayerShape, ...]) -> CompiledDecode | None:
        if self._cuda or not self._options.compile or any(layer.latent for layer in layers):
            return None
        from kitelib.backends.torch_engine.compiled import CompiledDecode

        compiled = CompiledDecode(opened, self._options.cache_dir, threads=self._threads)
        self._closers.append(compiled.close)
        compiled.start()
        return compiled

    def _capacity(
        self,
        opened: OpenedModel,
        layers: tuple[LayerShape, ...],
        block_tokens: int,
        rows: RowPlan,
        make: Callable[..., Runner],
    ) -> int:
        wanted, context = self._options.kv_tokens, self._context_tokens
        if wanted is not None and wanted < context:
            raise ConfigError(f"kv_tokens is {wanted}; it must be at least n_ctx, which is {context}")
        size = block_bytes(layers, block_tokens, opened.kv_dtype.itemsize)
        at_least = -(-context // block_tokens)
        if wanted is not None:
            most = -(-wanted // block_tokens)
        else:
            most = self._max_sequences * at_least if self._cuda else 4 * at_least
        if self._cuda:
            from kitelib.backends.torch_engine.profile import largest_step

            budget = kv_blocks(
                self._device, size, lambda: largest_step(make, rows, block_tokens, self._max_sequences), most=most
            )
            blocks = budget.blocks
            self._notes.append(budget.sentence())
        else:
            available = available_memory_bytes()
            blocks = min(most, available // (size if wanted is not None else 4 * size))
            blocks = max(blocks, min(at_least, available // size))
        if blocks < (at_least if wanted is None else most):
            asked = f"n_ctx={context}" if wanted is None else f"kv_tokens={wanted}"
            raise BackendError(
                f"the KV of {asked} tokens takes {max(at_least, most if wanted else 0) * size / 2**20:.0f} MiB, more "
                "than the memory available; open the engine with less"
            )
        return blocks

    def _info(
        self,
        opened: OpenedModel,
        layers: tuple[LayerShape, ...],
        runner: Runner,
        kernel: AttentionKernel,
        rows: RowPlan,
        *,
        bitwise: bool,
    ) -> ModelInfo:
        tables = runner.tables
        numerics: Numerics = "bitwise" if bitwise else "standard"
        path: dict[str, str | int | bool] = {
            "backend": "torch",
            "attention": kernel.name,
            "layout": runner.layout.id,
            "block_tokens": tables.block_tokens,
            "device": self._device.type,
            "numerics": numerics,
        }
        if bitwise:
            path |= {**execution_versions(self._device, self._threads), "rows": repr(rows)}
        params = sum(file.stat().st_size for file in opened.facts.files) / opened.dtype.itemsize
        speed = _CUDA_SPEED if self._cuda else _CPU_SPEED * self._threads
        capacity = tables.num_blocks * tables.block_tokens
        return ModelInfo(
            name=opened.facts.name,
            architecture=opened.facts.architecture,
            context_tokens=self._context_tokens,
            capacity_tokens=capacity,
            max_sequences=self._max_sequences,
            max_step_tokens=rows.max_rows,
            vocab_size=opened.facts.vocab_size,
            end_token_ids=frozenset(opened.tokenizer.end_token_ids),
            block_tokens=tables.block_tokens,
            block_bytes=block_bytes(layers, tables.block_tokens, opened.kv_dtype.itemsize),
            model_state=opened.model_state,
            state_parts=opened.state_parts,
            execution_path=path,
            numerics=numerics,
            reuse_blocks=True,
            resident_idle_tokens=capacity,  # idle blocks cost a step nothing
            notes=tuple(self._notes),
            prefill_guess=max(1.0, speed / params),
            mixes_adapters=runner.mixes_adapters,
            draws_tokens=runner.draws_tokens,
            max_outputs=runner.max_outputs,
        )


def _choose_device(name: str) -> torch.device:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device is {name!r}; give 'auto', 'cpu', 'cuda' or 'cuda:N'") from error
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedOptionError(f"device is {name!r}; the torch backend runs on 'cpu' and 'cuda'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedOptionError(
            f"device is {name!r}, but this PyTorch ({torch.__version__}) sees no CUDA device; install a CUDA build and "
            "a matching driver, or give device='cpu'"
        )
    return device
