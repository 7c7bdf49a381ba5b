"""LoRA adapters as the PEFT library saves them: ``adapter_config.json`` beside ``adapter_model.safetensors``.

A folder may come from anywhere: only JSON and safetensors are read, every size is checked, and whatever would change
the numbers in a way that is not supported is refused by name, because leaving it out would give wrong answers quietly.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from kitelib.backends.digest import content_digest, file_state
from kitelib.errors import BackendError, ModelFormatError, ModelNotFoundError, UnsupportedOptionError
from kitelib.upcycle.adapter_unit import AdapterContent, adapter_digest

__all__ = ["ADAPTER_CONFIG", "ADAPTER_WEIGHTS", "folder_digest", "pair_tensors", "read_adapter"]

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"

_MAX_CONFIG_BYTES: Final = 2**20
_MAX_NAME_CHARS: Final = 256
_MAX_PATTERN_CHARS: Final = 2048
_MAX_REPEATS: Final = 3
_PREFIX: Final = "base_model.model."
_MATRICES: Final = {".lora_A.weight": 0, ".lora_B.weight": 1}
_DTYPES: Final = frozenset({"F32", "F16", "BF16"})
_DATA: Final = frozenset({
    # What trained the adapter, or where it was; the file's tensors say the rest.
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules", "inference_mode",
    "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
    # Read below.
    "alpha_pattern", "bias", "init_lora_weights", "lora_alpha", "peft_type", "r", "rank_pattern", "target_modules",
    "use_rslora",
})  # fmt: skip
_REMEDIES: Final = {
    "use_dora": "DoRA scales whole columns of the weights; train with use_dora=False, or merge it into the model",
    "lora_bias": "a bias beside lora_B is not applied; train with lora_bias=False",
    "modules_to_save": "whole retrained modules belong into the model: merge the adapter, or train without them",
    "trainable_token_indices": "retrained embeddings belong into the model: merge the adapter",
    "fan_in_fan_out": "layers with transposed weights (Conv1D, as of GPT-2) are not adapted; use a model with Linear",
    "layer_replication": "a model with repeated layers is another model: merge the adapter and save that",
    "target_parameters": "adapters on bare parameters (fused experts) are not applied; adapt Linear modules",
    "alora_invocation_tokens": "an activated LoRA applies from a trigger on only; use a plain one",
    "use_qalora": "QALoRA is tied to a quantized base; use a plain LoRA",
    "megatron_config": "Megatron's parallel layers are not adapted; convert the adapter to plain Linear layers",
}
_PLAIN_INITS: Final = ("gaussian", "orthogonal", "eva")  # these start from the unchanged base weights
_OTHER_TENSORS: Final = (
    ("lora_magnitude_vector", "it belongs to DoRA, which is not supported; train with use_dora=False"),
    ("lora_embedding_", "adapted embeddings are not supported; leave the embeddings out of target_modules"),
    (".lora_B.bias", "a bias beside lora_B is not applied; train with lora_bias=False"),
    (".hada_", "LoHa is not supported; use LoRA"),
    (".lokr_", "LoKr is not supported; use LoRA"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Config:
    rank: int
    alpha: float
    root_rank: bool
    ranks: Mapping[str, float]
    alphas: Mapping[str, float]
    targets: str | list[str]

    def factor(self, module: str, rank: int, what: str) -> float:
        """What the product of a module's matrices is multiplied with; `rank` is that of its tensors."""
        if not self._targeted(module):
            raise ModelFormatError(
                f"{what} holds weights of {module!r}, which target_modules does not name; PEFT would leave them out, so "
                f"one of {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS} is of another adapter"
            )
        expected = _by_pattern(self.ranks, module, self.rank)
        if expected != rank:
            raise ModelFormatError(f"{what} has rank {rank} at {module!r}, but its configuration says {expected:g}")
        return _by_pattern(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.root_rank else rank)

    def _targeted(self, module: str) -> bool:
        if isinstance(self.targets, str):
            return self.targets == "all-linear" or re.fullmatch(self.targets, module) is not None
        return any(module == each or module.endswith(f".{each}") for each in self.targets)


def read_adapter(
    path: str | os.PathLike[str],
    name: str,
    cache_dir: pathlib.Path | None = None,
    progress: Callable[[float], None] | None = None,
) -> AdapterContent:
    """Reads an adapter's folder.

    Args:
        path: the folder.
        name: what the caller calls the adapter; for messages only.
        cache_dir: folder of remembered digests; None means the user's.
        progress: called with the fraction of the weights hashed, 0 to 1.

    Raises:
        ModelNotFoundError: no such folder, or a file of it is missing.
        ModelFormatError: a file is damaged, changed while it was read, or is no adapter of the LoRA kind.
        UnsupportedOptionError: the adapter needs what is not supported; the message names it and the remedy.
        BackendError: a file can't be read.
    """
    what = _what(name, path)
    weights = _weights_path(path, what)
    try:
        before = file_state(weights)
        scales = _factors(path, what)
        digest = adapter_digest(scales, content_digest(weights, cache_dir, progress))
        data = weights.read_bytes()
        if file_state(weights) != before:
            raise ModelFormatError(f"{what} changed while it was read; open it when it is complete")
    except OSError as error:
        if isinstance(error, ModelNotFoundError):
            raise
        raise BackendError(f"{what} can't be read: {error}") from error
    return AdapterContent(scales, data, digest)


def folder_digest(path: str | os.PathLike[str], name: str, cache_dir: pathlib.Path | None = None) -> bytes:
    """The digest that `read_adapter` would give, 32 bytes; the weights are only read if it is not remembered.

    Raises:
        as `read_adapter`.
    """
    what = _what(name, path)
    return adapter_digest(_factors(path, what), content_digest(_weights_path(path, what), cache_dir))


def pair_tensors(shapes: Mapping[str, tuple[str, tuple[int, ...]]], what: str) -> dict[str, tuple[str, str]]:
    """Module -> names of its two tensors (lora_A, lora_B), for tensors with those element types and shapes.

    Raises:
        ModelFormatError: a tensor is without its partner, or they don't fit each other.
        UnsupportedOptionError: a tensor is of another kind of adapter.
    """
    found: dict[str, list[str]] = {}
    for name, (dtype, shape) in shapes.items():
        suffix = next((each for each in _MATRICES if name.endswith(each)), None)
        if len(name) > _MAX_NAME_CHARS or suffix is None or not name.startswith(_PREFIX):
            reason = next((text for part, text in _OTHER_TENSORS if part in name), None)
            kind = ModelFormatError if reason is None else UnsupportedOptionError
            raise kind(
                f"{what} holds the tensor {name[:_MAX_NAME_CHARS]!r}: "
                f"{reason or 'only base_model.model.<module>.lora_A.weight and lora_B.weight are known'}"
            )
        if len(shape) != 2 or 0 in shape:
            raise UnsupportedOptionError(f"{what} has shape {shape} at {name!r}; only Linear modules can be adapted")
        if dtype not in _DTYPES:
            raise UnsupportedOptionError(f"{what} has {dtype} numbers at {name!r}; save it as {', '.join(_DTYPES)}")
        module = name[len(_PREFIX) : -len(suffix)]
        found.setdefault(module, ["", ""])[_MATRICES[suffix]] = name
    pairs = {module: (first, second) for module, (first, second) in found.items()}
    for module, (first, second) in pairs.items():
        if not first or not second:
            raise ModelFormatError(f"{what} has only one of lora_A and lora_B for {module!r}; it is incomplete")
        if shapes[first][1][0] != shapes[second][1][1]:
            raise ModelFormatError(
                f"{what}: {first!r} has shape {shapes[first][1]} and {second!r} {shapes[second][1]}; ranks must agree"
            )
    if not pairs:
        raise ModelFormatError(f"{what} holds no weights at all")
    return pairs


def _what(name: str, path: str | os.PathLike[str]) -> str:
    return f"the adapter {name!r} ({os.fspath(path)!r})"


def _weights_path(path: str | os.PathLike[str], what: str) -> pathlib.Path:
    folder = pathlib.Path(path)
    if not folder.is_dir():
        hint = "; it is a file" if folder.is_file() else ""
        raise ModelNotFoundError(f"{what} is not a folder that PEFT saved{hint}; check the path")
    weights = folder / ADAPTER_WEIGHTS
    if not weights.is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        remedy = "save it with safe_serialization=True; .bin files can run code and are not read" if pickled else ""
        raise ModelNotFoundError(f"{what} has no {ADAPTER_WEIGHTS}; {remedy or 'check that the folder is complete'}")
    return weights


def _factors(path: str | os.PathLike[str], what: str) -> dict[str, float]:
    """Module -> factor, from the configuration and the names and shapes in the weights file."""
    from safetensors import SafetensorError, safe_open

    weights = _weights_path(path, what)
    config = _read_config(pathlib.Path(path) / ADAPTER_CONFIG, what)
    try:
        with safe_open(weights, "np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - a method, not a mapping
            shapes = {name: (each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()}
    except SafetensorError as error:
        raise ModelFormatError(f"{what}: {ADAPTER_WEIGHTS} is damaged or cut short: {error}") from error
    except OSError as error:
        raise BackendError(f"{what} can't be read: {error}") from error
    pairs = pair_tensors(shapes, what)
    return {module: config.factor(module, shapes[first][1][0], what) for module, (first, _) in pairs.items()}


def _read_config(path: pathlib.Path, what: str) -> _Config:
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_CONFIG_BYTES + 1)
    except FileNotFoundError:
        raise ModelNotFoundError(f"{what} has no {ADAPTER_CONFIG}; check that the folder is complete") from None
    except OSError as error:
        raise BackendError(f"{what} can't be read: {error}") from error
    if len(raw) > _MAX_CONFIG_BYTES:
        raise ModelFormatError(f"{what}: {ADAPTER_CONFIG} has more than {_MAX_CONFIG_BYTES} bytes; it is damaged")
    try:
        plain = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{what}: {ADAPTER_CONFIG} is not JSON: {error}") from error
    if not isinstance(plain, dict):
        raise ModelFormatError(f"{what}: {ADAPTER_CONFIG} holds no JSON object")
    _check_supported(plain, what)
    return _Config(
        rank=int(_number(plain.get("r"), "r", what, whole=True)),
        alpha=_number(plain.get("lora_alpha"), "lora_alpha", what),
        root_rank=bool(plain.get("use_rslora", False)),
        ranks=_patterns(plain, "rank_pattern", what, whole=True),
        alphas=_patterns(plain, "alpha_pattern", what, whole=False),
        targets=_targets(plain.get("target_modules"), what),
    )


def _check_supported(plain: Mapping[str, Any], what: str) -> None:
    kind = plain.get("peft_type")
    if kind != "LORA":
        raise UnsupportedOptionError(f"{what} has peft_type {kind!r}; only 'LORA' is supported")
    bias = plain.get("bias", "none")
    if bias != "none":
        raise UnsupportedOptionError(f"{what} has bias {bias!r}; retrained biases are not applied, use bias='none'")
    start = plain.get("init_lora_weights", True)
    if isinstance(start, str) and start not in _PLAIN_INITS:
        raise UnsupportedOptionError(
            f"{what} has init_lora_weights {start!r}, which changes the base weights as well; convert it with "
            "PeftModel.save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    for key, value in plain.items():
        if key not in _DATA and value:
            remedy = _REMEDIES.get(key, "it is not known here; save the adapter without it")
            raise UnsupportedOptionError(f"{what} sets {key} = {str(value)[:100]!r}: {remedy}")


def _targets(value: Any, what: str) -> str | list[str]:
    if isinstance(value, str):
        _check_pattern(value, "target_modules", what)
        return value
    if isinstance(value, list) and value and all(isinstance(each, str) and each for each in value):
        return value
    raise ModelFormatError(f"{what} has target_modules {str(value)[:100]!r}; it must be names or one pattern")


def _patterns(plain: Mapping[str, Any], key: str, what: str, *, whole: bool) -> dict[str, float]:
    value = plain.get(key) or {}
    if not isinstance(value, dict):
        raise ModelFormatError(f"{what} has {key} {str(value)[:100]!r}; it must be an object")
    for pattern in value:
        _check_pattern(pattern, key, what)
    return {pattern: _number(each, f"{key}[{pattern!r}]", what, whole=whole) for pattern, each in value.items()}


def _check_pattern(pattern: str, key: str, what: str) -> None:
    """Refuses patterns that may take for ever: a folder from anywhere must not hang the process."""
    # "(?" begins a group; every other "?" repeats, or makes a repeat reluctant, which costs as much.
    repeats = len(re.findall(r"[*+{]|(?<!\()\?", pattern))
    if len(pattern) > _MAX_PATTERN_CHARS or repeats > _MAX_REPEATS or re.search(r"\)[*+{?]", pattern):
        raise UnsupportedOptionError(
            f"{what} has the pattern {pattern[:100]!r} in {key}, which may take very long; give the names instead"
        )
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ModelFormatError(f"{what} has the pattern {pattern[:100]!r} in {key}: {error}") from error


def _by_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    """The value of the first pattern that the end of the module's name fits, in the file's order."""
    fitting: Iterable[float] = (
        value for pattern, value in patterns.items() if re.fullmatch(rf"(?:.*\.)?(?:{pattern})", module)
    )
    return next(iter(fitting), default)


def _number(value: Any, key: str, what: str, *, whole: bool = False) -> float:
    good = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not good or (whole and not 0 < value < 2**31) or not -1e30 < value < 1e30:
        kind = "a whole number above 0" if whole else "a finite number"
        raise ModelFormatError(f"{what} has {key} = {str(value)[:100]!r}; it must be {kind}")
    return float(value)
