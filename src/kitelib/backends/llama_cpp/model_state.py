"""The model state of a GGUF model: what of it enters fingerprints."""

from __future__ import annotations

import hashlib
import os
import pathlib
from collections.abc import Callable, Sequence

from kitelib.backends.digest import content_digest
from kitelib.backends.llama_cpp.gguf import check_file, split_paths
from kitelib.fingerprint import encode_fields

__all__ = ["file_model_state", "model_state", "state_parts", "weights_digest"]

_KV_TYPE = "float16"


def model_state(weights: bytes) -> bytes:
    """`ModelInfo.model_state` of a model with this `weights_digest`, 32 bytes."""
    return hashlib.sha256(encode_fields("kite.model", weights, f"kv-{_KV_TYPE}")).digest()


def state_parts(weights: bytes) -> dict[str, str]:
    """`ModelInfo.state_parts` of a model with this `weights_digest`."""
    return {"weights": weights.hex(), "kv_type": _KV_TYPE}


def weights_digest(
    files: Sequence[pathlib.Path], cache_dir: pathlib.Path | None, progress: Callable[[float], None] | None = None
) -> bytes:
    """SHA-256 over the content of a model's file or files, 32 bytes. Arguments and errors as of `content_digest`."""
    digests = []
    for index, file in enumerate(files):

        def part(fraction: float, done: int = index) -> None:
            if progress is not None:
                progress((done + fraction) / len(files))

        digests.append(content_digest(file, cache_dir, part))
    return digests[0] if len(digests) == 1 else hashlib.sha256(b"".join(digests)).digest()


def file_model_state(path: str | os.PathLike[str], cache_dir: pathlib.Path | None = None) -> bytes:
    """Model state of a GGUF file, or of the split model whose first file it is, without loading it.

    Blocks for about 1 s per GB unless the digest is remembered.

    Raises:
        ModelNotFoundError, ModelFormatError, BackendError: as of `GGUFModel.load`.
    """
    return model_state(weights_digest(split_paths(check_file(path)), cache_dir))
