"""The computation fingerprint of a prompt, for people and tools: made by the engine's own key builder."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from typing import Any

from kitelib.errors import EmptyPromptError, InvalidRequestError
from kitelib.fingerprint import FINGERPRINT_BYTES, BlockChain, TokenIds, root_fingerprint

__all__ = ["compute_computation_fingerprint"]

_MODEL_KEYS = ("model_state", "path", "tokenizer")
_DEFAULT_BLOCK_TOKENS = 16


def compute_computation_fingerprint(
    prompt: str | TokenIds, model_config: Mapping[str, Any], runtime_config: Mapping[str, Any]
) -> str:
    """The computation fingerprint (CF) of a whole prompt: 64 hexadecimal digits.

    Equal for equal computations only: same tokens, same weights, same way to compute, same tenant. An open engine
    tells both mappings, and finds what it keeps for a prompt::

        cf = compute_computation_fingerprint("Hello", *engine.fingerprint_configs())
        units = await engine.pool.get_rus_by_cf(cf)

    Args:
        prompt: token ids, or a text. A fingerprint covers tokens, not characters: two texts may have the same tokens
            under one model and others under the next. So a text needs ``model_config["tokenizer"]``.
        model_config:
            * ``model_state``: `ModelInfo.model_state`, 32 bytes or 64 hexadecimal digits; or
            * ``path``: a GGUF file, which is identified by its content (blocks for about 1 s per GB the first time);
            * ``tokenizer``: turns a text into token ids as the engine does, special tokens included.
        runtime_config: `ModelInfo.execution_path`, of which ``block_tokens`` (tokens in one block; 16 where it is not
            given) also says how the prompt is cut, and next to it, all optional:

            * ``namespace``: the tenant, `ReusePolicy.namespace`;
            * ``namespace_secret``: `PoolConfig.namespace_secret`, bytes;
            * ``adapter``: a pair (SHA-256 of the adapter file's content as bytes or digits, scale).

    Raises:
        InvalidRequestError: an argument makes no sense; the message names it. EmptyPromptError: no token.
        ModelNotFoundError, ModelFormatError, BackendError: there is no usable model at ``path``.
    """
    for name, mapping in (("model_config", model_config), ("runtime_config", runtime_config)):
        if not isinstance(mapping, Mapping):
            raise InvalidRequestError(f"{name} is a {type(mapping).__name__}; give a mapping")
    for key in model_config:
        if key not in _MODEL_KEYS:
            near = difflib.get_close_matches(str(key), _MODEL_KEYS, 1, 0.0)[0]
            raise InvalidRequestError(
                f"model_config has the unknown key {key!r}; did you mean {near!r}? There are: {', '.join(_MODEL_KEYS)}"
            )
    token_ids = _token_ids(prompt, model_config.get("tokenizer"))
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
    state = _model_state(model_config)
    root = root_fingerprint(state, path, namespace, namespace_secret=secret, adapter=adapter)
    chain = BlockChain(root, block_tokens, token_ids)
    if not chain.num_tokens:
        raise EmptyPromptError("the prompt is empty; give at least one token")
    return chain.end().hex()


def _token_ids(prompt: str | TokenIds, tokenizer: Callable[[str], TokenIds] | None) -> TokenIds:
    if not isinstance(prompt, str):
        return prompt
    if tokenizer is None:
        raise InvalidRequestError(
            "the prompt is a text, but fingerprints cover token ids; give those, or a model_config with 'tokenizer', "
            "as engine.fingerprint_configs() has it"
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
