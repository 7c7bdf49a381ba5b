"""KV blocks of llama.cpp: between the library's sequence-state blob and plain block payloads.

`llama_state_seq_get_data` writes, all little-endian::

    u32 magic | i32 sequence id | one section per KV cache (two for sliding-window models)

    section:  u32 streams (1) | u32 cells | cells x (i32 position, u32 sequences (1), i32 sequence id)
              u32 V transposed (0) | u32 layers | segments
    segment:  i32 ggml type | u64 bytes per row | cells x row     K of every layer, then V of every layer

The layout is not promised by the library, so it is probed on a real blob at load (`StateLayout.probe`) and every
later blob has to match it byte for byte; a model whose blob looks different is served without block reuse.
A payload holds, per section and per run of segments with equal rows, the elements as [segment][token][row].
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kitelib.abc import BlockPayload
from kitelib.errors import FormatError

__all__ = ["StateLayout"]

Bytes = npt.NDArray[np.uint8]

_OUTER = struct.Struct("<Ii")
_SECTION = struct.Struct("<II")
_CELL = struct.Struct("<iIi")
_DATA = struct.Struct("<II")
_SEGMENT = struct.Struct("<iQ")
_DTYPES = {0: ("float32", 4), 1: ("float16", 2), 30: ("bfloat16", 2)}


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive segments with the same element type and row size."""

    ggml_type: int
    row_bytes: int
    segments: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Section:
    layers: int
    runs: tuple[_Run, ...]

    @property
    def token_bytes(self) -> int:
        return sum(run.segments * run.row_bytes for run in self.runs)

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes of this section in a blob of `num_tokens` cells."""
        segments = sum(run.segments for run in self.runs)
        return _SECTION.size + num_tokens * (_CELL.size + self.token_bytes) + _DATA.size + segments * _SEGMENT.size


@dataclasses.dataclass(frozen=True, slots=True)
class StateLayout:
    """How the blobs of one loaded model are laid out.

    Attributes:
        magic: first word of every blob.
        sections: one per KV cache.
    """

    magic: int
    sections: tuple[_Section, ...]

    @classmethod
    def probe(cls, blob: bytes | memoryview, positions: Sequence[int]) -> StateLayout:
        """Reads the layout off a blob that must hold exactly the cells at `positions`, in this order.

        Raises:
            FormatError: the blob is laid out in another way.
        """
        try:
            magic, _ = _OUTER.unpack_from(blob, 0)
            offset = _OUTER.size
            sections = []
            while offset < len(blob):
                section, offset = _probe_section(blob, offset, positions)
                sections.append(section)
        except struct.error as error:
            raise FormatError(f"the state blob ends in the middle of a field: {error}") from None
        if not sections or offset != len(blob):
            raise FormatError(f"the state blob has {len(blob)} bytes, its fields end at {offset}")
        return cls(magic, tuple(sections))

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token, all layers and caches."""
        return sum(section.token_bytes for section in self.sections)

    @property
    def dtype(self) -> str:
        """Element type if all segments share one, else "uint8"."""
        types = {run.ggml_type for section in self.sections for run in section.runs}
        return _DTYPES[types.pop()][0] if len(types) == 1 and types <= set(_DTYPES) else "uint8"

    @property
    def layout_id(self) -> str:
        """Stable id of this layout; equal ids mean that payloads are interchangeable."""
        return "llama_cpp.kv." + hashlib.sha256(repr(self.sections).encode()).hexdigest()[:16]

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes of a blob of `num_tokens` tokens."""
        return _OUTER.size + sum(section.num_bytes(num_tokens) for section in self.sections)

    def split(self, blob: Bytes, first: int, counts: Sequence[int]) -> list[BlockPayload]:
        """Cuts a blob that holds the tokens from position `first` on into payloads of `counts` tokens.

        Raises:
            FormatError: the blob does not hold exactly these positions in ascending order.
        """
        total = sum(counts)
        if len(blob) != self.num_bytes(total):
            raise FormatError(f"the state blob has {len(blob)} bytes, {total} tokens need {self.num_bytes(total)}")
        parts: list[list[Bytes]] = [[] for _ in counts]
        bounds = list(itertools.pairwise([0, *itertools.accumulate(counts)]))
        offset = _OUTER.size
        expected = np.arange(first, first + total, dtype=np.int32)
        for section in self.sections:
            cells = np.frombuffer(blob, np.int32, total * 3, offset + _SECTION.size).reshape(total, 3)
            if not np.array_equal(cells[:, 0], expected):
                raise FormatError(f"the state blob does not hold the positions {first} to {first + total - 1} in order")
            for view in self._views(section, blob, offset, total):
                for part, (start, stop) in zip(parts, bounds, strict=True):
                    part.append(np.ascontiguousarray(view[:, start:stop]).reshape(-1))
            offset += section.num_bytes(total)
        dtype, layout = self.dtype, self.layout_id
        size = next((size for name, size in _DTYPES.values() if name == dtype), 1)
        payloads = []
        for part, count in zip(parts, counts, strict=True):
            data = part[0] if len(part) == 1 else np.concatenate(part)
            payloads.append(BlockPayload(count, data, dtype, (len(data) // size,), layout))
        return payloads

    def join(self, first: int, payloads: Sequence[BlockPayload]) -> Bytes:
        """The blob that restores `payloads` to the positions from `first` on.

        Raises:
            FormatError: a payload has another layout or size.
        """
        layout = self.layout_id
        for payload in payloads:
            if payload.layout != layout or len(payload.data) != payload.num_tokens * self.token_bytes:
                raise FormatError(
                    f"a payload of {payload.num_tokens} tokens has layout {payload.layout!r} and "
                    f"{len(payload.data)} bytes; this model needs {layout!r} and {payload.num_tokens * self.token_bytes}"
                )
        total = sum(payload.num_tokens for payload in payloads)
        blob = np.empty(self.num_bytes(total), np.uint8)
        _OUTER.pack_into(blob.data, 0, self.magic, 0)
        offset = _OUTER.size
        consumed = [0] * len(payloads)
        for section in self.sections:
            self._write_headers(section, blob, offset, first, total)
            for run, view in zip(section.runs, self._views(section, blob, offset, total), strict=True):
                start = 0
                for i, payload in enumerate(payloads):
                    size = run.segments * payload.num_tokens * run.row_bytes
                    rows = payload.data[consumed[i] : consumed[i] + size]
                    view[:, start : start + payload.num_tokens] = rows.reshape(
                        run.segments, payload.num_tokens, run.row_bytes
                    )
                    consumed[i] += size
                    start += payload.num_tokens
            offset += section.num_bytes(total)
        return blob

    def _write_headers(self, section: _Section, blob: Bytes, offset: int, first: int, total: int) -> None:
        _SECTION.pack_into(blob.data, offset, 1, total)
        offset += _SECTION.size
        cells = np.zeros((total, 3), np.int32)
        cells[:, 0] = np.arange(first, first + total, dtype=np.int32)
        cells[:, 1] = 1
        blob[offset : offset + cells.nbytes] = cells.reshape(-1).view(np.uint8)
        offset += cells.nbytes
        _DATA.pack_into(blob.data, offset, 0, section.layers)
        offset += _DATA.size
        for run in section.runs:
            for _ in range(run.segments):
                _SEGMENT.pack_into(blob.data, offset, run.ggml_type, run.row_bytes)
                offset += _SEGMENT.size + total * run.row_bytes

    def _views(self, section: _Section, blob: Bytes, offset: int, total: int) -> list[Bytes]:
        """Views of shape [segments, total, row_bytes] into `blob`, one per run."""
        offset += _SECTION.size + total * _CELL.size + _DATA.size
        views = []
        for run in section.runs:
            stride = _SEGMENT.size + total * run.row_bytes
            views.append(
                np.ndarray(
                    (run.segments, total, run.row_bytes),
                    np.uint8,
                    blob.data,
                    offset + _SEGMENT.size,
                    (stride, run.row_bytes, 1),
                )
            )
            offset += run.segments * stride
        return views


def _probe_section(blob: bytes | memoryview, offset: int, positions: Sequence[int]) -> tuple[_Section, int]:
    streams, cells = _SECTION.unpack_from(blob, offset)
    offset += _SECTION.size
    if streams != 1 or cells != len(positions):
        raise FormatError(f"a section holds {streams} streams and {cells} cells, expected 1 and {len(positions)}")
    for position in positions:
        found, sequences, _ = _CELL.unpack_from(blob, offset)
        if (found, sequences) != (position, 1):
            raise FormatError(f"a cell holds position {found} of {sequences} sequences, expected {position} of 1")
        offset += _CELL.size
    transposed, layers = _DATA.unpack_from(blob, offset)
    offset += _DATA.size
    if transposed or not 0 < layers < 4096:
        raise FormatError(f"V transposed is {transposed} and the number of layers {layers}")
    rows: list[tuple[int, int]] = []
    # V may be absent (latent attention keeps one tensor per layer): then the next section, or the end, follows.
    for _ in range(2 * layers):
        if len(rows) == layers and offset == len(blob):
            break
        ggml_type, row_bytes = _SEGMENT.unpack_from(blob, offset)
        offset += _SEGMENT.size + row_bytes * cells
        if not 0 <= ggml_type < 256 or not 0 < row_bytes < 2**31 or offset > len(blob):
            raise FormatError(f"a segment has type {ggml_type} and {row_bytes} bytes a row")
        rows.append((ggml_type, row_bytes))
    runs = tuple(_Run(*key, len(list(group))) for key, group in itertools.groupby(rows))
    return _Section(layers, runs), offset
