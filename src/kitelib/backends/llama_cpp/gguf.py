"""Checks GGUF files before llama.cpp sees them, and identifies them by content.

llama.cpp ends the process on some malformed files (a metadata value of the wrong type, an absurd layer count) and
says little about truncated ones, so the header is read here first, with every size checked against the file.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
import pathlib
import re
import stat
import struct
from collections.abc import Mapping
from typing import Any

from kitelib.errors import BackendError, ModelFormatError, ModelNotFoundError

__all__ = ["GGUFArray", "GGUFSummary", "check_file", "split_paths"]

Scalar = str | int | float | bool

_MAGIC = b"GGUF"
_HEADER = struct.Struct("<4sIQQ")
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_STRING, _ARRAY, _UINT32, _FLOAT32 = 8, 9, 4, 6
_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    _UINT32: _U32,
    5: struct.Struct("<i"),
    _FLOAT32: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: _U64,
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
# Smallest encodings: a key of one byte with a one-byte value; a tensor with a one-byte name and no dimension.
_MIN_ENTRY_BYTES, _MIN_TENSOR_BYTES = 8 + 1 + 4 + 1, 8 + 1 + 4 + 4 + 8
_MAX_DIMENSIONS, _MAX_NAME_BYTES = 4, 63
_MAX_LAYERS = 512  # LLAMA_MAX_LAYERS; llama.cpp aborts past it

# ggml type id -> (elements per block, bytes per block), from ggml.h and ggml-common.h.
_TENSOR_TYPES: dict[int, tuple[int, int]] = {
    0: (1, 4),  # F32
    1: (1, 2),  # F16
    2: (32, 18),  # Q4_0
    3: (32, 20),  # Q4_1
    6: (32, 22),  # Q5_0
    7: (32, 24),  # Q5_1
    8: (32, 34),  # Q8_0
    9: (32, 36),  # Q8_1
    10: (256, 84),  # Q2_K
    11: (256, 110),  # Q3_K
    12: (256, 144),  # Q4_K
    13: (256, 176),  # Q5_K
    14: (256, 210),  # Q6_K
    15: (256, 292),  # Q8_K
    16: (256, 66),  # IQ2_XXS
    17: (256, 74),  # IQ2_XS
    18: (256, 98),  # IQ3_XXS
    19: (256, 50),  # IQ1_S
    20: (32, 18),  # IQ4_NL
    21: (256, 110),  # IQ3_S
    22: (256, 82),  # IQ2_S
    23: (256, 136),  # IQ4_XS
    24: (1, 1),  # I8
    25: (1, 2),  # I16
    26: (1, 4),  # I32
    27: (1, 8),  # I64
    28: (1, 8),  # F64
    29: (256, 56),  # IQ1_M
    30: (1, 2),  # BF16
    34: (256, 54),  # TQ1_0
    35: (256, 66),  # TQ2_0
    39: (32, 17),  # MXFP4
    40: (64, 36),  # NVFP4
    41: (128, 18),  # Q1_0
    42: (64, 18),  # Q2_0
}


@dataclasses.dataclass(frozen=True, slots=True)
class GGUFArray:
    """An array in the metadata: GGUF element type id and length; the elements are not kept."""

    element_type: int
    length: int


@dataclasses.dataclass(frozen=True, slots=True)
class GGUFSummary:
    """What the header of a checked GGUF file says.

    Attributes:
        path: the file, as given.
        size_bytes: length of the file, bytes.
        version: GGUF version.
        architecture: ``general.architecture``, e.g. "llama".
        name: ``general.name``, else the file name without its suffix.
        kind: ``general.type``: "model" (default), "adapter", "mmproj", "imatrix", ...
        metadata: all scalars and strings.
        arrays: all arrays, without their elements.
        num_tensors: tensors in this file.
        num_splits: files that make up the model together; 1 for a whole one.
        data_offset: where tensor data begins, bytes from the start of the file.
    """

    path: pathlib.Path
    size_bytes: int
    version: int
    architecture: str
    name: str
    kind: str
    metadata: Mapping[str, Scalar]
    arrays: Mapping[str, GGUFArray]
    num_tensors: int
    num_splits: int
    data_offset: int

    def of_architecture(self, key: str) -> Scalar | None:
        """The value of ``<architecture>.<key>``; None if the file does not have it."""
        return self.metadata.get(f"{self.architecture}.{key}")


def check_file(path: str | os.PathLike[str]) -> GGUFSummary:
    """Reads and checks the header of one GGUF file, and that the file is as long as its tensors need.

    Takes milliseconds plus about 0.1 s per million vocabulary entries; weights are not read.

    Raises:
        ModelNotFoundError: no such file.
        ModelFormatError: not a GGUF file, corrupt, or truncated.
        BackendError: the file can't be read.
    """
    path = pathlib.Path(path)
    try:
        # Not blocking: opening a named pipe would wait for a writer.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ModelNotFoundError(f"no model file at {str(path)!r}; check the path") from error
    except (OSError, ValueError) as error:
        if path.is_dir():  # opening a folder fails on some platforms
            raise _not_a_file(path) from error
        raise BackendError(f"the model file {str(path)!r} can't be read: {error}; check its permissions") from error
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise _not_a_file(path)
        if status.st_size < _HEADER.size:
            raise ModelFormatError(
                f"{str(path)!r} has {status.st_size} bytes, too few for a GGUF header; download it again"
            )
        with mmap.mmap(handle, 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data).summary()
    except OSError as error:
        raise BackendError(f"the model file {str(path)!r} can't be read: {error}") from error
    finally:
        os.close(handle)


def split_paths(summary: GGUFSummary) -> list[pathlib.Path]:
    """All files of a model, in order: one, or those named ``<name>-00001-of-00003.gguf`` and so on.

    Raises:
        ModelFormatError: the file is not the first of its split model, or not named like one.
    """
    if summary.num_splits == 1:
        return [summary.path]
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", summary.path.name)
    if match is None or int(match[3]) != summary.num_splits or int(match[2]) != 1:
        raise ModelFormatError(
            f"{str(summary.path)!r} is one of {summary.num_splits} files of a split model; open the first one, under "
            f"its original name '<name>-00001-of-{summary.num_splits:05d}.gguf'"
        )
    return [
        summary.path.with_name(f"{match[1]}-{index:05d}-of-{summary.num_splits:05d}.gguf")
        for index in range(1, summary.num_splits + 1)
    ]


def _not_a_file(path: pathlib.Path) -> ModelFormatError:
    kind = "a folder" if path.is_dir() else "not a regular file"
    return ModelFormatError(f"{str(path)!r} is {kind}; give the path of a GGUF file")


class _Parser:
    """A cursor over the file. Every read is checked against its end, so no size in it is trusted."""

    def __init__(self, path: pathlib.Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 0

    def summary(self) -> GGUFSummary:
        version, num_tensors, num_entries = self.header()
        metadata: dict[str, Scalar] = {}
        arrays: dict[str, GGUFArray] = {}
        for _ in range(num_entries):
            key = self.string()
            if not key or key in metadata or key in arrays:
                raise self.corrupt(f"metadata key {key[:80]!r} is empty or occurs twice")
            value = self.value(key)
            if isinstance(value, GGUFArray):
                arrays[key] = value
            else:
                metadata[key] = value
        architecture = _check_metadata(self, metadata, arrays)
        data_offset = self.tensors(num_tensors, int(metadata.get("general.alignment", 32)))
        return GGUFSummary(
            path=self.path,
            size_bytes=self.size,
            version=version,
            architecture=architecture,
            name=str(metadata.get("general.name") or self.path.stem),
            kind=str(metadata.get("general.type", "model")),
            metadata=metadata,
            arrays=arrays,
            num_tensors=num_tensors,
            num_splits=max(1, int(metadata.get("split.count", 1))),
            data_offset=data_offset,
        )

    def header(self) -> tuple[int, int, int]:
        magic, version, num_tensors, num_entries = _HEADER.unpack_from(self.data)
        self.at = _HEADER.size
        if magic != _MAGIC:
            hint = "it is a Git LFS pointer, not the file itself; fetch it with git lfs pull"
            if self.data[:24] != b"version https://git-lfs.":
                hint = "give a file in GGUF format"
            raise ModelFormatError(f"{str(self.path)!r} is not a GGUF file (it starts with {magic!r}); {hint}")
        if version not in (2, 3):
            hint = " (a big-endian file?)" if version & 0xFFFF == 0 else ""
            raise ModelFormatError(
                f"{str(self.path)!r} has GGUF version {version}{hint}; versions 2 and 3, little-endian, can be read"
            )
        room = self.size - self.at
        if num_entries * _MIN_ENTRY_BYTES > room or num_tensors * _MIN_TENSOR_BYTES > room:
            raise self.corrupt(
                f"it names {num_tensors} tensors and {num_entries} metadata entries, more than its {self.size} bytes hold"
            )
        return version, num_tensors, num_entries

    def corrupt(self, what: str) -> ModelFormatError:
        return ModelFormatError(f"{str(self.path)!r} is corrupt: {what}; download it again")

    def take(self, num_bytes: int) -> int:
        """Moves the cursor over `num_bytes`; returns where they begin."""
        start = self.at
        if num_bytes > self.size - start:
            raise ModelFormatError(
                f"{str(self.path)!r} is truncated or corrupt: its header needs {num_bytes} bytes at offset {start}, but "
                f"the file has {self.size} bytes; download it again"
            )
        self.at = start + num_bytes
        return start

    def number(self, form: struct.Struct) -> Any:
        return form.unpack_from(self.data, self.take(form.size))[0]

    def string(self) -> str:
        length = self.number(_U64)
        start = self.take(length)
        # llama.cpp takes any bytes; names and templates with broken UTF-8 must not stop a load.
        return self.data[start : start + length].decode("utf-8", "replace")

    def value(self, key: str) -> Scalar | GGUFArray:
        kind = self.number(_U32)
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(key)
        form = _SCALARS.get(kind)
        if form is None:
            raise self.corrupt(f"metadata key {key!r} has the unknown type {kind}")
        value: Scalar = self.number(form)
        return value

    def array(self, key: str) -> GGUFArray:
        element_type, length = self.number(_U32), self.number(_U64)
        if element_type == _STRING:
            if length * 8 > self.size - self.at:
                self.take(length * 8)  # raises
            self.skip_strings(length)
        elif element_type in _SCALARS:
            self.take(length * _SCALARS[element_type].size)
        else:
            raise self.corrupt(f"metadata key {key!r} is an array of the unknown type {element_type}")
        return GGUFArray(element_type, length)

    def skip_strings(self, count: int) -> None:
        """Passes over `count` strings; written for speed, vocabularies have hundreds of thousands."""
        data, size, at, read = self.data, self.size, self.at, _U64.unpack_from
        for _ in range(count):
            if at + 8 > size:
                break
            at += 8 + read(data, at)[0]
        else:
            if at <= size:
                self.at = at
                return
        self.take(self.size)  # raises: some string ends past the file

    def tensors(self, count: int, alignment: int) -> int:
        """Checks all tensor infos against the length of the file; returns where tensor data begins."""
        needed, complete, names = 0, True, set()
        for _ in range(count):
            name = self.string()
            if name in names or len(name.encode()) > _MAX_NAME_BYTES:
                raise self.corrupt(f"tensor name {name[:80]!r} occurs twice or is longer than {_MAX_NAME_BYTES} bytes")
            names.add(name)
            num_dimensions = self.number(_U32)
            if num_dimensions > _MAX_DIMENSIONS:
                raise self.corrupt(f"tensor {name!r} has {num_dimensions} dimensions")
            shape = [self.number(_U64) for _ in range(num_dimensions)]
            kind, offset = self.number(_U32), self.number(_U64)
            if kind not in _TENSOR_TYPES:
                complete = False  # a type newer than this table: llama.cpp decides
                continue
            block, block_bytes = _TENSOR_TYPES[kind]
            if offset % alignment or (shape[0] if shape else 1) % block:
                raise self.corrupt(f"tensor {name!r} of shape {shape} at offset {offset} is not aligned to its blocks")
            needed = max(needed, offset + math.prod(shape) // block * block_bytes)
        data_offset = -(-self.at // alignment) * alignment
        if count and data_offset + needed > self.size:
            about = "" if complete else "at least "
            raise ModelFormatError(
                f"{str(self.path)!r} is truncated or corrupt: its tensors need {about}{data_offset + needed} bytes, but the "
                f"file has {self.size} bytes; download it again"
            )
        return data_offset


def _check_metadata(parser: _Parser, metadata: Mapping[str, Scalar], arrays: Mapping[str, GGUFArray]) -> str:
    """Checks the values on whose type or range llama.cpp would end the process; returns the architecture."""
    architecture = metadata.get("general.architecture")
    splits = metadata.get("split.no", 0)
    if architecture is None and isinstance(splits, int) and splits > 0:
        architecture = ""  # later files of a split model carry no description
    if not isinstance(architecture, str):
        raise parser.corrupt("it does not name its architecture (general.architecture)")
    for key in ("general.name", "general.type", "adapter.type", "tokenizer.ggml.model", "tokenizer.chat_template"):
        if key in arrays or not isinstance(metadata.get(key, ""), str):
            raise parser.corrupt(f"metadata key {key!r} is not a string")
    if not isinstance(metadata.get("adapter.lora.alpha", 0.0), float):
        raise parser.corrupt("metadata key 'adapter.lora.alpha' is not a float")
    for key in ("general.alignment", "split.count", f"{architecture}.block_count"):
        value = metadata.get(key, 1)
        if key in arrays or isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise parser.corrupt(f"metadata key {key!r} is not a count")
    alignment = int(metadata.get("general.alignment", 32))
    if alignment == 0 or alignment & (alignment - 1):
        raise parser.corrupt(f"general.alignment is {alignment}, not a power of two")
    layers = int(metadata.get(f"{architecture}.block_count", 1))
    if not 1 <= layers <= _MAX_LAYERS:
        raise parser.corrupt(f"{architecture}.block_count is {layers}; 1 to {_MAX_LAYERS} layers can be run")
    return architecture
