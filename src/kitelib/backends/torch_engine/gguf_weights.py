"""GGUF files in the torch engine: transformers reads and dequantizes them."""

from __future__ import annotations

import importlib.util
import pathlib
from typing import Any

from kitelib.errors import BackendError, MissingExtraError, ModelFormatError, UnsupportedOptionError

__all__ = ["check_gguf", "gguf_options"]

_MAGIC = b"GGUF"
_SPLIT_MARK = "-of-"


def check_gguf(file: pathlib.Path) -> None:
    """Raises unless the file can be one of GGUF.

    Raises:
        ModelFormatError: another kind of file.
        UnsupportedOptionError: one part of a split model.
        MissingExtraError: the packages that read GGUF are not installed.
        BackendError: the file can't be read.
    """
    try:
        with file.open("rb") as stream:
            magic = stream.read(len(_MAGIC))
    except OSError as error:
        raise BackendError(f"{str(file)!r} can't be read: {error}") from error
    if magic != _MAGIC:
        raise ModelFormatError(f"{str(file)!r} is not a GGUF file; give a model folder or a GGUF file")
    if _SPLIT_MARK in file.stem and file.stem.rpartition(_SPLIT_MARK)[2].isdigit():
        raise UnsupportedOptionError(
            f"{str(file)!r} is one part of a split model, which transformers can't read; join the parts with "
            "llama-gguf-split --merge, or open it with the lite engine"
        )
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "torch", "reading a GGUF file with the torch engine")


def gguf_options(file: pathlib.Path) -> dict[str, Any]:
    """What `from_pretrained` needs beside the folder so that all weights come out dequantized."""
    import transformers

    options: dict[str, Any] = {"gguf_file": file.name}
    # Newer versions keep the weights in blocks of GGUF unless told otherwise; older ones always dequantize.
    config = getattr(transformers, "GgufConfig", None)
    if config is not None:
        options["quantization_config"] = config(dequantize=True)
    return options
