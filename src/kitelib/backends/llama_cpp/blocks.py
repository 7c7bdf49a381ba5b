"""KV blocks of llama.cpp: between the library's sequence-state blob and plain block payloads.

`llama_state_seq_get_data` writes, all little-endian::

    u32 magic | i32 sequence id | one section per KV cache (two for sliding-window models)

    section:  u32 streams (1) | u32 cells | cells x (i32 position, u32 sequences (1), i32 sequence id)
              u32 V transposed | u32 layers | segments: K of every layer, then V of every layer
    segment:  i32 ggml type | u64 bytes per row | cells x row
    V segment, if V is transposed (flash attention off):
              i32 ggml type | u32 bytes per element | u32 channels | channels x cells x element

The layout is not promised by the library, so it is probed on a real blob at load (`StateLayout.probe`) and every
later blob has to match it byte for byte; a model whose blob looks different is served without block reuse.
A payload holds, one after the other, the sections, and in each its runs of segments that look the same. The elements
of a run are ordered [segment][token][row], or [segment][channel][token][element] where V is transposed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import struct
from collections.abc import Iterator, Sequence

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
_CHANNELS = struct.Struct("<iII")  # the header of a transposed segment; as long as the other
_DTYPES = {0: ("float32", 4), 1: ("float16", 2), 30: ("bfloat16", 2)}


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive segments that look the same.

    Attributes:
        ggml_type: element type.
        transposed: whether the tokens of a channel are neighbours, not the channels of a token.
        channels: rows of a transposed segment; else 1.
        item_bytes: bytes of one token in one of these rows.
        segments: number of segments.
    """

    ggml_type: int
    transposed: bool
    channels: int
    item_bytes: int
    segments: int

    @property
    def token_bytes(self) -> int:
        return self.segments * self.channels * self.item_bytes

    def shape(self, num_tokens: int) -> tuple[int, int, int, int]:
        """[segments, channels, tokens, bytes]: the order in blobs and payloads, transposed or not."""
        return self.segments, self.channels, num_tokens, self.item_bytes

    def pack_header(self, blob: Bytes, offset: int) -> None:
        if self.transposed:
            _CHANNELS.pack_into(blob.data, offset, self.ggml_type, self.item_bytes, self.channels)
        else:
            _SEGMENT.pack_into(blob.data, offset, self.ggml_type, self.item_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class _Section:
    layers: int
    transposed: bool
    runs: tuple[_Run, ...]

    @property
    def token_bytes(self) -> int:
        return sum(run.token_bytes for run in self.runs)

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
    def transposed(self) -> bool:
        """Whether V is transposed, that is, whether flash attention is off."""
        return any(section.transposed for section in self.sections)

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
                    part.append(view[:, :, start:stop])
            offset += section.num_bytes(total)
        return [self._payload(part, count) for part, count in zip(parts, counts, strict=True)]

    def cut(self, payload: BlockPayload, num_tokens: int) -> BlockPayload:
        """The first `num_tokens` tokens of a payload, copied.

        Raises:
            FormatError: the payload has another layout or size, or fewer tokens, or `num_tokens` is not positive.
        """
        self._check(payload)
        if not 1 <= num_tokens <= payload.num_tokens:
            raise FormatError(f"can't cut {num_tokens} tokens off a payload; give 1 to {payload.num_tokens}")
        parts, offset = [], 0
        for run in self._runs():
            size = payload.num_tokens * run.token_bytes
            items = payload.data[offset : offset + size].reshape(run.shape(payload.num_tokens))
            parts.append(items[:, :, :num_tokens])
            offset += size
        return self._payload(parts, num_tokens)

    def join(self, first: int, payloads: Sequence[BlockPayload]) -> Bytes:
        """The blob that restores `payloads` to the positions from `first` on.

        Raises:
            FormatError: a payload has another layout or size.
        """
        for payload in payloads:
            self._check(payload)
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
                    size = payload.num_tokens * run.token_bytes
                    items = payload.data[consumed[i] : consumed[i] + size]
                    view[:, :, start : start + payload.num_tokens] = items.reshape(run.shape(payload.num_tokens))
                    consumed[i] += size
                    start += payload.num_tokens
            offset += section.num_bytes(total)
        return blob

    def _runs(self) -> Iterator[_Run]:
        return itertools.chain.from_iterable(section.runs for section in self.sections)

    def _check(self, payload: BlockPayload) -> None:
        layout, num_bytes = self.layout_id, payload.num_tokens * self.token_bytes
        if payload.layout != layout or len(payload.data) != num_bytes:
            raise FormatError(
                f"a payload of {payload.num_tokens} tokens has layout {payload.layout!r} and {len(payload.data)} "
                f"bytes; this model needs {layout!r} and {num_bytes}"
            )

    def _payload(self, parts: Sequence[Bytes], num_tokens: int) -> BlockPayload:
        """A payload with its own copy of `parts`, one per run."""
        data, offset = np.empty(num_tokens * self.token_bytes, np.uint8), 0
        for part in parts:
            data[offset : offset + part.size].reshape(part.shape)[...] = part
            offset += part.size
        return BlockPayload(num_tokens, data, self.dtype, self._shape(num_tokens), self.layout_id)

    def _shape(self, num_tokens: int) -> tuple[int, ...]:
        """(segments, tokens, channels) if all segments look the same, else flat; see `BlockPayload`."""
        dtype, runs = self.dtype, list(self._runs())
        size = next((size for name, size in _DTYPES.values() if name == dtype), 1)
        alike = len(runs) == 1 and not runs[0].transposed and dtype != "uint8"
        if alike and runs[0].segments == 2 * self.sections[0].layers:  # K and V, not one latent tensor per layer
            return runs[0].segments, num_tokens, runs[0].item_bytes // size
        return (num_tokens * self.token_bytes // size,)

    def _write_headers(self, section: _Section, blob: Bytes, offset: int, first: int, total: int) -> None:
        _SECTION.pack_into(blob.data, offset, 1, total)
        offset += _SECTION.size
        cells = np.zeros((total, 3), np.int32)
        cells[:, 0] = np.arange(first, first + total, dtype=np.int32)
        cells[:, 1] = 1
        blob[offset : offset + cells.nbytes] = cells.reshape(-1).view(np.uint8)
        offset += cells.nbytes
        _DATA.pack_into(blob.data, offset, section.transposed, section.layers)
        offset += _DATA.size
        for run in section.runs:
            for _ in range(run.segments):
                run.pack_header(blob, offset)
                offset += _SEGMENT.size + total * run.channels * run.item_bytes

    def _views(self, section: _Section, blob: Bytes, offset: int, total: int) -> list[Bytes]:
        """Views of shape [segments, channels, total, item_bytes] into `blob`, one per run."""
        offset += _SECTION.size + total * _CELL.size + _DATA.size
        views = []
        for run in section.runs:
            row = total * run.item_bytes
            stride = _SEGMENT.size + run.channels * row
            views.append(
                np.ndarray(
                    run.shape(total), np.uint8, blob.data, offset + _SEGMENT.size, (stride, row, run.item_bytes, 1)
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
    if transposed > 1 or not 0 < layers < 4096:
        raise FormatError(f"V transposed is {transposed} and the number of layers {layers}")
    segments: list[_Run] = []
    # V may be absent (latent attention keeps one tensor per layer): then the next section, or the end, follows.
    while len(segments) < 2 * layers and not (len(segments) == layers and offset == len(blob)):
        segment = _probe_segment(blob, offset, bool(transposed) and len(segments) >= layers)
        offset += _SEGMENT.size + segment.token_bytes * cells
        if offset > len(blob):
            raise FormatError(f"a segment of {segment.token_bytes} bytes a row and token ends after the blob")
        segments.append(segment)
    runs = tuple(
        dataclasses.replace(segment, segments=len(list(group))) for segment, group in itertools.groupby(segments)
    )
    return _Section(layers, bool(transposed), runs), offset


def _probe_segment(blob: bytes | memoryview, offset: int, transposed: bool) -> _Run:
    if transposed:
        ggml_type, item_bytes, channels = _CHANNELS.unpack_from(blob, offset)
    else:
        (ggml_type, item_bytes), channels = _SEGMENT.unpack_from(blob, offset), 1
    if not 0 <= ggml_type < 256 or not (0 < item_bytes < 2**31 and 0 < channels < 2**24):
        raise FormatError(f"a segment has type {ggml_type} and {item_bytes} bytes a row of {channels} channels")
    return _Run(ggml_type, transposed, channels, item_bytes, 1)
