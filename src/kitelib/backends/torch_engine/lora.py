"""LoRA adapters beside the weights: several are resident, and each row of a step gets the one of its sequence.

Steps without an adapter may run compiled; steps with one must call the model itself.

Nothing is merged: an adapted linear gives ``base(x)``, and rows with an adapter get ``factor * (x @ A.T) @ B.T`` added,
so rows without one keep exactly the bits of a model without adapters. The added part is a forward hook of the linear;
`AdapterSet.close` takes the hooks off and the model is as before.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from kitelib.backends.torch_engine.lora_linear import RANK_STEP, Active, AdaptedLinear, Current
from kitelib.backends.torch_engine.peft_folder import pair_tensors, read_adapter
from kitelib.config import AdapterConfig
from kitelib.errors import (
    BackendStepError,
    ConfigError,
    ModelFormatError,
    ModelNotFoundError,
    UnknownAdapterError,
    UnsupportedOptionError,
)
from kitelib.upcycle.adapter_unit import AdapterContent

if TYPE_CHECKING:
    import torch

__all__ = ["AdapterSet", "Segment"]


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring rows of one step with the same adapter.

    Attributes:
        first, stop: rows first .. stop - 1 of the forward pass.
        adapter: name of their adapter.
    """

    first: int
    stop: int
    adapter: str


class AdapterSet:
    """All adapters of a loaded model.

    The model's linears must be the ones that will run: replace or pack them before. Applying needs no state but the
    thread's current choice (`use`), so a set serves several threads.

    Args:
        model: the transformers model.
        adapters: name -> adapter; paths are folders that PEFT saved.
        dtype: element type of the model's activations.
        device: where the model is.
        cache_dir: folder of remembered digests; None means the user's.
        progress: called with what is being done and its share, 0 to 1.
        contents: name -> adapter that came from elsewhere (the pool), so that its folder is not read.
        row_invariant: compute every row with the same fixed shapes whatever else is in the step, for bitwise numerics.

    Attributes:
        states: name -> (content digest, scale); goes into fingerprints.
        mixable: whether rows with different adapters may share a step. False if an adapted linear sees other rows than
            those of the step (experts, latents of all tokens); then a step has one adapter for all rows.
        num_bytes: bytes of all matrices on the device.
        largest_content_bytes: bytes of the largest adapter's weights as they were read; about the size of its unit.

    Raises:
        ModelNotFoundError, ModelFormatError, BackendError: a folder can't be read, or does not fit the model.
        UnsupportedOptionError: an adapter needs what is not supported.
        ConfigError: a scale is not finite.
    """

    def __init__(
        self,
        model: Any,
        adapters: Mapping[str, AdapterConfig],
        dtype: torch.dtype,
        device: torch.device | str,
        cache_dir: pathlib.Path | None = None,
        progress: Callable[[str, float], None] | None = None,
        *,
        contents: Mapping[str, AdapterContent] | None = None,
        row_invariant: bool = True,
    ) -> None:
        import torch

        # On the CPU float32 costs little at these ranks, and is exact for the 16-bit numbers that adapters have.
        self._dtype = torch.float32 if torch.device(device).type == "cpu" else dtype
        self._device = device
        self._row_invariant = row_invariant
        self._current = Current()
        self._sites: dict[str, AdaptedLinear] = {}
        self._numbers: dict[str, int] = {}
        self._whole: dict[int, Active] = {}  # kept from step to step, with what the kernels derive from them
        self._contents: dict[str, AdapterContent] = {}
        self.states: dict[str, tuple[bytes, float]] = {}
        self.mixable = True
        self.largest_content_bytes = 0
        linears = _linears(model)
        try:
            for number, (name, config) in enumerate(adapters.items()):
                self._load(linears, number, name, config, cache_dir, (contents or {}).get(name))
                if progress is not None:
                    progress("loading adapters", (number + 1) / len(adapters))
            for module, site in self._sites.items():
                site.attach(linears.modules[module])
        except BaseException:
            self.close()
            raise

    @property
    def num_bytes(self) -> int:
        return sum(site.num_bytes for site in self._sites.values())

    def take_contents(self) -> dict[str, AdapterContent]:
        """The adapters as they were read, for whoever keeps them in the pool; once, then they are freed."""
        contents, self._contents = self._contents, {}
        return contents

    @contextmanager
    def use(self, adapter: str | Sequence[Segment] | None, rows: int | None = None) -> Iterator[None]:
        """Makes the linears apply an adapter in the forward passes of this thread.

        Args:
            adapter: a name for all rows, None for none, or segments in any order that don't overlap; rows outside of
                them get none.
            rows: rows of the pass, padding included; needed with segments.

        Raises:
            UnknownAdapterError: no adapter has that name.
            BackendStepError: segments were given where `mixable` is False, or they are not rows of the pass.
        """
        active = self._active(adapter, rows)
        before, self._current.active = self._current.active, active
        try:
            yield
        finally:
            self._current.active, self._current.cast = before, None

    def close(self) -> None:
        """Takes the hooks off and frees the matrices; the model is as before. Idempotent."""
        for site in self._sites.values():
            site.detach()
        self._sites.clear()
        self._contents.clear()

    def _active(self, adapter: str | Sequence[Segment] | None, rows: int | None) -> Active | None:
        if adapter is None:
            return None
        if isinstance(adapter, str):
            return self._whole[self._number(adapter)]
        if not adapter:
            return None
        names = {each.adapter for each in adapter}
        ordered = sorted(adapter, key=lambda each: each.first)
        edges = [0, *itertools.chain.from_iterable((each.first, each.stop) for each in ordered), rows or 0]
        if rows is None or edges != sorted(edges):
            raise BackendStepError(f"the segments {ordered} do not lie one after the other in {rows} rows")
        if not self.mixable:
            if len(names) > 1 or ordered[0].first or any(a.stop != b.first for a, b in itertools.pairwise(ordered)):
                raise BackendStepError(
                    f"the adapters {', '.join(sorted(names))} can't be mixed in a step of this model"
                )
            return self._whole[self._number(ordered[0].adapter)]
        return Active(tuple((each.first, each.stop, self._number(each.adapter)) for each in ordered), rows)

    def _number(self, name: str) -> int:
        try:
            return self._numbers[name]
        except KeyError:
            known = ", ".join(map(repr, self._numbers)) or "none"
            raise UnknownAdapterError(f"no adapter is called {name!r}; this engine has: {known}") from None

    def _load(
        self,
        linears: _Linears,
        number: int,
        name: str,
        config: AdapterConfig,
        cache_dir: pathlib.Path | None,
        content: AdapterContent | None,
    ) -> None:
        what = f"the adapter {name!r} ({config.path!r})"
        if not math.isfinite(config.scale):
            raise ConfigError(f"{what} has scale {config.scale}; give a finite number")
        if content is None:
            content = _from_folder(name, config, cache_dir)
        if config.digest is not None and content.digest.hex() != config.digest:
            raise ModelFormatError(
                f"{what} has the content {content.digest.hex()}, not {config.digest} as its AdapterConfig says; "
                "give the folder of that adapter, or leave the digest out"
            )
        self._numbers[name] = number
        self._whole[number] = Active(((0, None, number),), None)
        self._contents[name] = content
        self.largest_content_bytes = max(self.largest_content_bytes, len(content.weights))
        self.states[name] = (content.digest, float(config.scale))
        tensors = _tensors(content, what)
        broken = [key for key, each in tensors.items() if not bool(each.isfinite().all())]
        if broken:
            raise ModelFormatError(
                f"{what} holds numbers that are not finite, in {broken[0]!r}; its training went wrong"
            )
        shapes = {
            key: (_NAMES.get(str(each.dtype), str(each.dtype)), tuple(each.shape)) for key, each in tensors.items()
        }
        for module, (first, second) in pair_tensors(shapes, what).items():
            target = linears.find(module, what)
            linear = linears.modules[target]
            _check_shape(what, first, shapes[first][1][1], shapes[first][1], "in_features", linear)
            _check_shape(what, second, shapes[second][1][0], shapes[second][1], "out_features", linear)
            if target not in self._sites:
                self._sites[target] = AdaptedLinear(target, self._current, row_invariant=self._row_invariant)
            factor = content.scales[module] * float(config.scale)
            self._sites[target].add(number, self._matrix(tensors[first], 0), self._matrix(tensors[second], 1), factor)
            self.mixable = self.mixable and target not in linears.other_rows

    def _matrix(self, tensor: torch.Tensor, rank_dim: int) -> torch.Tensor:
        """The matrix on the device, its rank filled up with zeros."""
        import torch

        shape = list(tensor.shape)
        shape[rank_dim] += -shape[rank_dim] % RANK_STEP
        matrix = torch.zeros(shape, dtype=self._dtype, device=self._device)
        matrix.narrow(rank_dim, 0, tensor.shape[rank_dim]).copy_(tensor)
        return matrix


class _Linears:
    """The linears of a model by name, and why others can't be adapted."""

    def __init__(self, modules: dict[str, Any], others: dict[str, str], other_rows: frozenset[str]) -> None:
        self.modules = modules
        self.others = others
        self.other_rows = other_rows

    def find(self, module: str, what: str) -> str:
        """The name of the linear that an adapter calls `module`: the same, or below the part that was trained."""
        if module in self.modules:
            return module
        if module in self.others:
            raise UnsupportedOptionError(f"{what} adapts {module!r}, {self.others[module]}")
        longer = [each for each in self.modules if each.endswith(f".{module}")]
        if len(longer) == 1:
            return longer[0]
        if ".experts" in module:
            raise UnsupportedOptionError(
                f"{what} adapts {module!r}; experts are fused in this model and can't be adapted, so train without them"
            )
        raise ModelFormatError(f"{what} adapts {module!r}, which this model does not have; it was made for another one")


_NAMES: Final = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}


def _linears(model: Any) -> _Linears:
    import torch

    modules: dict[str, Any] = {}
    others: dict[str, str] = {}
    outputs = model.get_output_embeddings()
    for name, module in model.named_modules():
        sizes = (getattr(module, "in_features", None), getattr(module, "out_features", None))
        if module is outputs:
            # Only some rows of a step get there, and often its weights are those of the input embeddings.
            others[name] = "the model's output layer, which can't be adapted; leave it out of target_modules"
        elif isinstance(module, torch.nn.Linear) or all(isinstance(size, int) for size in sizes):
            modules[name] = module
        else:
            others[name] = f"which is a {type(module).__name__} here; only Linear modules can be adapted"
    other_rows = frozenset(
        name for name in modules if "experts" in name.split(".") or name.rpartition(".")[2].startswith("kv_b_proj")
    )
    return _Linears(modules, others, other_rows)


def _from_folder(name: str, config: AdapterConfig, cache_dir: pathlib.Path | None) -> AdapterContent:
    if config.digest is not None and not pathlib.Path(config.path).exists():
        raise ModelNotFoundError(
            f"the adapter {name!r} has no folder at {config.path!r}, and the pool does not have its content "
            f"{config.digest}; give its folder once"
        )
    return read_adapter(config.path, name, cache_dir)


def _tensors(content: AdapterContent, what: str) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(bytes(content.weights))
    except (SafetensorError, ValueError, KeyError) as error:
        raise ModelFormatError(f"{what} holds weights that can't be read: {error}") from error


def _check_shape(what: str, tensor: str, size: int, shape: tuple[int, ...], feature: str, linear: Any) -> None:
    expected = getattr(linear, feature)
    if size != expected:
        raise ModelFormatError(
            f"{what} has shape {shape} at {tensor!r}, but the model's module has shape "
            f"({linear.out_features}, {linear.in_features}); it was made for another model"
        )
