"""What a model folder says about itself, why it can't be served, and the model made of it.

The models' code is that of transformers; nothing here knows a single architecture beyond what has to be refused.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kitelib.backends.torch_engine.attention import ATTENTION, register_attention
from kitelib.backends.torch_engine.gguf_weights import check_gguf, gguf_options
from kitelib.backends.torch_engine.quiet import quiet_transformers
from kitelib.backends.torch_engine.refusals import refuse_config, refuse_model, rope_settings
from kitelib.backends.torch_engine.weights import stored_dtype, weight_files
from kitelib.errors import BackendError, ModelFormatError, ModelNotFoundError, UnsupportedOptionError

if TYPE_CHECKING:
    import torch

__all__ = ["ModelFacts", "build_model", "inspect_model"]

_DEFAULT_CONTEXT_TOKENS = 2048
# A model that also takes images keeps its language model under a name of its own.
_NESTED_KEYS = {
    r"^(model\.)?language_model\.lm_head\.": "lm_head.",
    r"^language_model\.model\.": "model.",
    r"^model\.language_model\.": "model.",
}
_MEMORY_WORDS = ("out of memory", "allocate memory", "not enough memory")


@dataclasses.dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model folder or GGUF file says about itself.

    Attributes:
        path: the folder, or the GGUF file.
        files: the files with its weights, in name order.
        config: transformers' configuration of the language model.
        raw_config: what config.json says; empty for a GGUF file.
        name: display name.
        architecture: as the configuration calls it, e.g. "qwen3_moe".
        context_tokens: most tokens of a sequence for which one set of RoPE factors holds.
        vocab_size: number of token ids.
        num_layers: decoder layers.
        windows: sliding attention window of each layer, tokens; 0 if it sees everything.
        end_token_ids: end tokens by configuration; the tokenizer may know more.
        is_nested: whether the folder's model takes more than text, and its language model is a part of it.
        stored_dtype: type of the weights in the files, e.g. "bfloat16"; None for a GGUF file or if unknown.
        settings: what kitelib changes about the numbers, by name; see `torch_model_state`.
        notes: plain sentences for people.
    """

    path: pathlib.Path
    files: tuple[pathlib.Path, ...]
    config: Any
    raw_config: Mapping[str, Any]
    name: str
    architecture: str
    context_tokens: int
    vocab_size: int
    num_layers: int
    windows: tuple[int, ...]
    end_token_ids: frozenset[int]
    is_nested: bool
    stored_dtype: str | None
    settings: Mapping[str, Any]
    notes: tuple[str, ...]

    @property
    def is_gguf(self) -> bool:
        """Whether it is a GGUF file."""
        return self.path.is_file()


def inspect_model(path: str | os.PathLike[str]) -> ModelFacts:
    """Reads the configuration of a model without its weights. Takes milliseconds, for a GGUF file seconds.

    Raises:
        ModelNotFoundError: nothing there.
        ModelFormatError: no weights, or damaged files.
        UnsupportedOptionError: a model of a kind that can't be served; says why.
    """
    root = pathlib.Path(path)
    raw: Mapping[str, Any] = {}
    if root.is_file():
        check_gguf(root)
        files = [root]
    elif root.is_dir():
        files = weight_files(root)
        raw = _read_json(root / "config.json")
    else:
        raise ModelNotFoundError(f"no model folder or GGUF file at {str(root)!r}; check the path")
    whole = _read_config(root, raw)
    config = whole.get_text_config(decoder=True)
    refuse_config(whole, config, root)
    notes: list[str] = []
    if "auto_map" in raw:
        notes.append("the folder's own code is not run; transformers' code for this architecture is")
    if whole is not config:
        # The whole model ties its embeddings or not; its language model's own setting may be a mere default.
        config.tie_word_embeddings = getattr(whole, "tie_word_embeddings", config.tie_word_embeddings)
        notes.append(f"only the language model of this {whole.model_type!r} model is loaded; it takes text")
    context, settings = _context(config, notes)
    return ModelFacts(
        path=root,
        files=tuple(files),
        config=config,
        raw_config=raw,
        name=root.stem if root.is_file() else root.resolve().name,
        architecture=str(config.model_type),
        context_tokens=context,
        vocab_size=int(config.vocab_size),
        num_layers=int(config.num_hidden_layers),
        windows=_windows(config),
        end_token_ids=_end_tokens(root, config),
        is_nested=whole is not config,
        stored_dtype=None if root.is_file() else _dtype_name(config) or stored_dtype(files[0]),
        settings=settings,
        notes=tuple(notes),
    )


def build_model(
    facts: ModelFacts, dtype: torch.dtype, device: torch.device | str, *, experts: str | None = None
) -> torch.nn.Module:
    """The model with its weights, ready to be called in a step. Blocks while weights that are not mapped are read.

    Modules are made on the meta device. On the CPU weights whose type is the wanted one stay mapped from their files,
    so they take no time and no memory of their own; don't overwrite the files in place while the model is in use.

    Args:
        dtype: type of the weights in memory.
        device: where they go.
        experts: how transformers multiplies the experts of a mixture, e.g. "eager" or "grouped_mm"; None is its own
            choice.

    Raises:
        ModelFormatError: weights are missing, damaged or of other shapes; names them.
        UnsupportedOptionError: what the model computes can't be served; says why.
        BackendError: memory is short.
    """
    import torch

    device = torch.device(device)
    register_attention()
    config = facts.config
    if experts is not None:
        config._experts_implementation = experts
    model, report = _load(facts, dtype, device)
    missing = sorted(report["missing_keys"])
    if missing:
        names = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        raise ModelFormatError(f"{str(facts.path)!r} lacks weights of the model: {names}; download it again")
    refuse_model(model, facts.architecture)
    if "rope_longrope_limit" in facts.settings:
        _fix_rope(model)
    model.requires_grad_(False)
    placed: torch.nn.Module = model.eval().to(device)
    return placed


def _load(facts: ModelFacts, dtype: torch.dtype, device: torch.device) -> tuple[Any, Mapping[str, Any]]:
    import importlib.util

    import torch
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    options: dict[str, Any] = gguf_options(facts.path) if facts.is_gguf else {"use_safetensors": True}
    if facts.is_nested:
        options["key_mapping"] = _NESTED_KEYS
    if device.type != "cpu" and importlib.util.find_spec("accelerate") is not None:
        # Without it weights go through the CPU's memory, which only matters for those that have to be rearranged.
        options["device_map"] = device
    folder = facts.path.parent if facts.is_gguf else facts.path
    try:
        with quiet_transformers(), torch.no_grad():
            model, report = auto.from_pretrained(
                str(folder),
                config=facts.config,
                dtype=dtype,
                attn_implementation=ATTENTION,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                **options,
            )
    except MemoryError as error:
        raise BackendError(f"memory is too short for the weights of {str(facts.path)!r}") from error
    except Exception as error:  # foreign files and foreign code: anything may come out of reading them
        text = str(error)
        if any(word in text.lower() for word in _MEMORY_WORDS):
            raise BackendError(f"memory is too short for the weights of {str(facts.path)!r}: {text}") from error
        if "attention" in text and ATTENTION in text:
            raise UnsupportedOptionError(
                f"transformers' code for {facts.architecture!r} does not let the attention be replaced: {text}"
            ) from error
        raise ModelFormatError(f"{str(facts.path)!r} can't be loaded: {text}") from error
    return model, report


def _read_config(root: pathlib.Path, raw: Mapping[str, Any]) -> Any:
    import transformers
    from transformers import AutoConfig

    options = {"gguf_file": root.name} if root.is_file() else {}
    folder = root.parent if root.is_file() else root
    try:
        with quiet_transformers():
            return AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **options)
    except Exception as error:  # foreign files: anything may come out of reading them
        kind = raw.get("model_type")
        if "auto_map" in raw:
            raise UnsupportedOptionError(
                f"{str(root)!r} (model type {kind!r}) needs code from its folder, which is never run, and transformers "
                f"{transformers.__version__} has none for it; use a newer transformers"
            ) from error
        if "does not recognize this architecture" in str(error) or "model_type" in str(error):
            raise UnsupportedOptionError(
                f"{str(root)!r} has model type {kind!r}, which transformers {transformers.__version__} does not know; "
                "use a newer transformers"
            ) from error
        if root.is_file():
            raise UnsupportedOptionError(
                f"transformers can't read the GGUF file {str(root)!r}: {error}; open it with the lite engine"
            ) from error
        raise ModelFormatError(f"{str(root / 'config.json')!r} can't be used: {error}") from error


def _read_json(file: pathlib.Path) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise ModelFormatError(f"{str(file)!r} is missing; give a complete model folder") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"{str(file)!r} can't be read: {error}") from error
    if not isinstance(found, dict):
        raise ModelFormatError(f"{str(file)!r} holds no settings; download it again")
    return found


def _context(config: Any, notes: list[str]) -> tuple[int, dict[str, Any]]:
    """Most tokens of a sequence, and the settings that this changes."""
    found = getattr(config, "max_position_embeddings", None)
    if not found:
        notes.append(f"the model names no context length; {_DEFAULT_CONTEXT_TOKENS} tokens are used")
        found = _DEFAULT_CONTEXT_TOKENS
    limits = [
        int(rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", 0) or 0)
        for rope in rope_settings(config)
        if rope.get("rope_type") == "longrope"
    ]
    if not limits or not min(limits) or min(limits) >= found:
        return int(found), {"rope_longrope_limit": int(found)} if limits else {}
    notes.append(
        f"the context is limited to {min(limits)} of {found} tokens: longer texts would change the RoPE factors of tokens "
        "that are already computed"
    )
    return min(limits), {"rope_longrope_limit": min(limits)}


def _fix_rope(model: Any) -> None:
    """Within the limit the short factors hold, so the search for the longest position (and its wait) is left out."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind == "longrope":
            module.rope_type = "default"
        elif isinstance(kind, dict):
            module.rope_type = {name: "default" if each == "longrope" else each for name, each in kind.items()}


def _windows(config: Any) -> tuple[int, ...]:
    count = int(config.num_hidden_layers)
    window = int(getattr(config, "sliding_window", None) or 0)
    kinds: Sequence[str] | None = getattr(config, "layer_types", None)
    if getattr(config, "use_sliding_window", True) is False:
        return (0,) * count
    if kinds is None:
        return (window,) * count
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds[:count])


def _end_tokens(root: pathlib.Path, config: Any) -> frozenset[int]:
    found = [getattr(config, "eos_token_id", None)]
    if root.is_dir() and (root / "generation_config.json").exists():
        found.append(_read_json(root / "generation_config.json").get("eos_token_id"))
    flat = [each for entry in found for each in (entry if isinstance(entry, list) else [entry])]
    return frozenset(each for each in flat if isinstance(each, int) and 0 <= each < config.vocab_size)


def _dtype_name(config: Any) -> str | None:
    kind = getattr(config, "dtype", None)
    return None if kind is None else str(kind).removeprefix("torch.")
