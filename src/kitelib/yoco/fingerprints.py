"""The computation fingerprint of a prompt, for people and tools: made by the engine's own key builder."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import os
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, get_args

from kitelib.errors import EmptyPromptError, InvalidRequestError
from kitelib.fingerprint import (
    FINGERPRINT_BYTES,
    BlockChain,
    TokenIds,
    as_token_ids,
    derived_fingerprint,
    encode_fields,
    root_fingerprint,
)

__all__ = ["FingerprintParts", "Level", "compute_computation_fingerprint", "fingerprint_parts"]

Level = Literal["exact", "canonical", "structural"]
"""What of a prompt a fingerprint covers: its tokens, or a signature of its text (`kitelib.yoco.canonical`)."""

_LEVELS: Final = get_args(Level)
_MODEL_KEYS: Final = ("model_state", "path", "tokenizer")
_DEFAULT_BLOCK_TOKENS: Final = 16


@dataclasses.dataclass(frozen=True, slots=True)
class FingerprintParts:
    """The parts of a computation fingerprint, each as 64 hexadecimal digits: where two differ, the fingerprints do.

    Attributes:
        level: what `prompt` covers.
        prompt: the prompt alone, without model and machine; for a text level, that is its signature and the tables
            that made it.
        model_state: `ModelInfo.model_state`, or a digest of it and the adapter where there is one.
        execution_path: how and for whom it is computed: everything in ``runtime_config`` but the adapter.
    """

    level: Level
    prompt: str
    model_state: str
    execution_path: str


def compute_computation_fingerprint(
    prompt: str | TokenIds,
    model_config: Mapping[str, Any],
    runtime_config: Mapping[str, Any],
    *,
    level: Level | None = None,
) -> str:
    """The computation fingerprint (CF) of a whole prompt: 64 hexadecimal digits.

    Equal for equal computations only: same tokens, same weights, same way to compute, same tenant. An open engine
    tells both mappings, and finds what it keeps for a prompt::

        cf = compute_computation_fingerprint("Hello", *engine.fingerprint_configs())
        units = await engine.pool.get_rus_by_cf(cf)

    The other levels are equal for texts that say the same in another form, and so name no computation: they are for
    grouping, routing and counting prompts. The level enters the hash, so none of them equals an exact one.

    Args:
        prompt: token ids, or a text. An exact fingerprint covers tokens, not characters: two texts may have the same
            tokens under one model and others under the next. So a text needs ``model_config["tokenizer"]`` for it.
        model_config:
            * ``model_state``: `ModelInfo.model_state`, 32 bytes or 64 hexadecimal digits; or
            * ``path``: a GGUF file, which is identified by its content (blocks for about 1 s per GB the first time);
            * ``tokenizer``: turns a text into token ids as the engine does, special tokens included.
        runtime_config: `ModelInfo.execution_path`, of which ``block_tokens`` (tokens in one block; 16 where it is not
            given) also says how the prompt is cut, and next to it, all optional:

            * ``namespace``: the tenant, `ReusePolicy.namespace`;
            * ``namespace_secret``: `PoolConfig.namespace_secret`, bytes;
            * ``adapter``: a pair (SHA-256 of the adapter file's content as bytes or digits, scale).
        level: "exact": the tokens. "canonical", "structural": the text's signature of that level after `normalise`
            (markup, width and case gone, long texts cut to head and tail). None: exact where token ids can be had,
            which are given or come from ``tokenizer``, else canonical.

    Raises:
        InvalidRequestError: an argument makes no sense; the message names it. EmptyPromptError: no token, no text.
        ModelNotFoundError, ModelFormatError, BackendError: there is no usable model at ``path``.
    """
    given = _read(prompt, model_config, runtime_config, level)
    root = root_fingerprint(
        given.model_state, given.path, given.namespace, namespace_secret=given.secret, adapter=given.adapter
    )
    if given.level == "exact":
        return BlockChain(root, given.block_tokens, given.prompt).end().hex()
    return derived_fingerprint(root, "text", *_signed(given)).hex()


def fingerprint_parts(
    prompt: str | TokenIds,
    model_config: Mapping[str, Any],
    runtime_config: Mapping[str, Any],
    *,
    level: Level | None = None,
) -> FingerprintParts:
    """What `compute_computation_fingerprint` of the same arguments is made of, part by part: two machines that should
    share and don't show by it whether prompt, model or execution path differs. Arguments and errors are those of it.
    """
    given = _read(prompt, model_config, runtime_config, level)
    fields = [given.prompt.tobytes()] if given.level == "exact" else _signed(given)
    model = given.model_state
    if given.adapter is not None:
        model = root_fingerprint(model, {}, None, adapter=given.adapter)
    # The root of no model at all covers the path and the tenant as the real one does.
    path = root_fingerprint(bytes(FINGERPRINT_BYTES), given.path, given.namespace, namespace_secret=given.secret)
    return FingerprintParts(
        given.level,
        hashlib.sha256(encode_fields("kite.cf.prompt", given.level, *fields)).hexdigest(),
        model.hex(),
        path.hex(),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Given:
    """The arguments, checked; `prompt` is a uint32 array of shape (num_tokens,) at the exact level, else the text."""

    level: Level
    prompt: Any
    model_state: bytes
    path: dict[str, Any]
    block_tokens: int
    namespace: str | None
    secret: bytes | None
    adapter: tuple[bytes, float] | None


def _read(
    prompt: str | TokenIds, model_config: Mapping[str, Any], runtime_config: Mapping[str, Any], level: Level | None
) -> _Given:
    for name, mapping in (("model_config", model_config), ("runtime_config", runtime_config)):
        if not isinstance(mapping, Mapping):
            raise InvalidRequestError(f"{name} is a {type(mapping).__name__}; give a mapping")
    for key in model_config:
        if key not in _MODEL_KEYS:
            near = difflib.get_close_matches(str(key), _MODEL_KEYS, 1, 0.0)[0]
            raise InvalidRequestError(
                f"model_config has the unknown key {key!r}; did you mean {near!r}? There are: {', '.join(_MODEL_KEYS)}"
            )
    resolved, content = _prompt(prompt, model_config.get("tokenizer"), level)
    path = dict(runtime_config)
    namespace, secret = path.pop("namespace", None), path.pop("namespace_secret", None)
    adapter = _adapter(path.pop("adapter", None))
    if namespace is not None and not isinstance(namespace, str):
        raise InvalidRequestError(f"runtime_config['namespace'] is {namespace!r}; give a str, or None")
    if secret is not None and not isinstance(secret, bytes):
        raise InvalidRequestError(f"runtime_config['namespace_secret'] is a {type(secret).__name__}; give bytes")
    # How a prompt is cut is part of how it is computed, so block_tokens stays in the path.
    block_tokens = path.get("block_tokens", _DEFAULT_BLOCK_TOKENS)
    if isinstance(block_tokens, bool) or not isinstance(block_tokens, int) or block_tokens < 1:
        raise InvalidRequestError(
            f"runtime_config['block_tokens'] is {block_tokens!r}; give a whole number of at least 1"
        )
    return _Given(resolved, content, _model_state(model_config), path, block_tokens, namespace, secret, adapter)


def _prompt(
    prompt: str | TokenIds, tokenizer: Callable[[str], TokenIds] | None, level: Level | None
) -> tuple[Level, Any]:
    """The level that applies, and the token ids or the text."""
    if level is not None and level not in _LEVELS:
        raise InvalidRequestError(f"level is {level!r}; give one of {', '.join(map(repr, _LEVELS))}, or None")
    if not isinstance(prompt, str):
        if level not in (None, "exact"):
            raise InvalidRequestError(f"level is {level!r}, but the prompt is token ids; give its text, or 'exact'")
        ids = as_token_ids(prompt)
    elif level == "exact" or (level is None and tokenizer is not None):
        ids = as_token_ids(_token_ids(prompt, tokenizer))
    elif prompt.strip():
        return level or "canonical", prompt
    else:
        raise EmptyPromptError("the prompt is empty; give some text")
    if not ids.size:
        raise EmptyPromptError("the prompt is empty; give at least one token")
    return "exact", ids


def _signed(given: _Given) -> list[Any]:
    """The fields of a prompt at a text level: equal for texts with the same signature under the same tables."""
    from kitelib.yoco.canonical import normalise, signature, tables_digest  # reads its tables

    assert given.level != "exact"
    # What has no signature at all, such as markup alone, is itself.
    signed = signature(normalise(given.prompt), given.level) or ["as written", given.prompt]
    return [given.level, tables_digest(), signed]


def _token_ids(prompt: str, tokenizer: Callable[[str], TokenIds] | None) -> TokenIds:
    if tokenizer is None:
        raise InvalidRequestError(
            "level is 'exact' and the prompt is a text, but exact fingerprints cover token ids; give those, or a "
            "model_config with 'tokenizer', as engine.fingerprint_configs() has it"
        )
    if not callable(tokenizer):
        raise InvalidRequestError(f"model_config['tokenizer'] is {tokenizer!r}; give a function from text to token ids")
    return tokenizer(prompt)


def _model_state(model_config: Mapping[str, Any]) -> bytes:
    state, path = model_config.get("model_state"), model_config.get("path")
    if (state is None) == (path is None):
        raise InvalidRequestError("model_config must have exactly one of 'model_state' and 'path'")
    if state is not None:
        return _digest(state, "model_config['model_state']")
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidRequestError(f"model_config['path'] is {path!r}; give the path of a GGUF file")
    from kitelib.backends.llama_cpp.model_state import file_model_state

    return file_model_state(path)


def _adapter(value: Any) -> tuple[bytes, float] | None:
    if value is None:
        return None
    what = "runtime_config['adapter']"
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise InvalidRequestError(f"{what} is {value!r}; give a pair: digest of the adapter's content, scale")
    digest, scale = value
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise InvalidRequestError(f"the scale in {what} is {scale!r}; give a number")
    return _digest(digest, f"the digest in {what}"), float(scale)


def _digest(value: Any, what: str) -> bytes:
    """32 bytes, from themselves or their hexadecimal digits."""
    digest = value
    if isinstance(value, str):
        try:
            digest = bytes.fromhex(value)
        except ValueError:
            digest = None
    if not isinstance(digest, (bytes, bytearray, memoryview)) or len(digest) != FINGERPRINT_BYTES:
        raise InvalidRequestError(f"{what} is {value!r}; give {FINGERPRINT_BYTES} bytes or their hexadecimal digits")
    return bytes(digest)
