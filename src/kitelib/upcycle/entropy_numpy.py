"""The entropy coder of docs/format.md in numpy: what reads compressed units where the native part is missing.

It is also the reference that the native part is tested against: both give the same bytes. 32 lanes advance at a time,
which makes it some hundred times slower than native code.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kitelib.errors import FormatError
from kitelib.native.library import KvShape

__all__ = ["decode", "encode"]

_HEAD: Final = struct.Struct("<B3x II Q")  # low, escapes, words, table starts
_LANES: Final = 32
_PROB_BITS: Final = 11
_PROB_SUM: Final = 1 << _PROB_BITS
_STATE_LOW: Final = 1 << 16
_TILE: Final = 256
_CHUNK: Final = 256
_SYMBOLS: Final = 128
_LEVELS: Final = 32
_CONTEXTS: Final = 64
_SURE: Final = 40
_TABLE_COUNT: Final = 512
_SAMPLE_EVERY: Final = 4
_MAX_PRIOR: Final = 8 * (_LEVELS - 1)
_WEIGHTS: Final = np.array([0, 1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024])
_K_SHIFTS: Final = (1, 1, 2, 2, 2, 3)
_V_SHIFTS: Final = (2, 3, 3, 3, 3, 3, 3, 4)
_SIGN_SHIFTS: Final = (0, 1, 2, 2, 2, 3)

Ints = npt.NDArray[Any]


class _Row(NamedTuple):
    """The same token in up to `_TILE` channels of one segment."""

    segment: int
    token: int
    channels: slice


class _State:
    """What the tokens before lead to expect, per channel of a row."""

    def __init__(self, prior: int, width: int) -> None:
        self._level = np.full(width, 2 * prior)
        self._sign = np.zeros(width, np.int64)

    def contexts(self) -> Ints:
        return ((self._level + 8) >> 4) + _LEVELS * (np.abs(self._sign) >= _SURE)

    def flips(self) -> Ints:
        return (self._sign < 0).astype(np.int64)

    def learn(self, levels: Ints, negative: Ints, token: int, second_half: bool) -> None:
        shifts = _V_SHIFTS if second_half else _K_SHIFTS
        self._level += (16 * levels - self._level) >> shifts[min(token, len(shifts) - 1)]
        self._sign += (64 - 128 * negative - self._sign) >> _SIGN_SHIFTS[min(token, len(_SIGN_SHIFTS) - 1)]


def _rows(shape: KvShape) -> Iterator[_Row]:
    """Rows in coding order."""
    for segment in range(shape.segments):
        for start in range(0, shape.channels, _TILE):
            for token in range(shape.tokens):
                yield _Row(segment, token, slice(start, min(start + _TILE, shape.channels)))


def _exponent_mask(shape: KvShape) -> int:
    return 31 if shape.mantissa_bits == 10 else 255


def _frequencies(weights: Ints) -> Ints:
    """Frequencies that add up to `_PROB_SUM`, of weight codes; at least 1 where the code is not 0."""
    present = weights > 0
    if not present.any():
        raise FormatError("a probability table is empty")
    sums = np.cumsum(_WEIGHTS[weights])
    reached = sums * (_PROB_SUM - int(present.sum())) // int(sums[-1])
    return np.diff(reached, prepend=0) + present


# Encoding


def encode(shape: KvShape, data: npt.NDArray[np.uint8]) -> bytes | None:
    """The body; None if it would not be smaller than `data` (uint8, shape (num_elements * 2,))."""
    elements = data.view("<u2").astype(np.int64)
    exponents = (elements & 0x7FFF) >> shape.mantissa_bits
    low = _choose_low(shape, exponents)
    levels = _levels(exponents, low)
    if np.count_nonzero(levels == 0) > len(elements) // 16 + 16:
        return None
    sample = _sample(shape, levels)
    priors = (sample.sum(axis=1) * 8 + sample.shape[1] // 2) // sample.shape[1]
    bits = elements >> (shape.mantissa_bits - 1) & 1
    contexts, symbols, escaped = _split(shape, levels, elements >> 15, bits, exponents, priors)
    counts = np.bincount(contexts * _SYMBOLS + symbols, minlength=_CONTEXTS * _SYMBOLS).reshape(_CONTEXTS, _SYMBOLS)
    table_of, starts = _join_contexts(counts)
    tables, frequencies = [], []
    for table in range(table_of[-1] + 1):
        weights = _weight_codes(counts[table_of == table].sum(axis=0))
        tables.append(_pack_table(weights))
        frequencies.append(_frequencies(weights))
    words, states = _code(shape, table_of[contexts], symbols, np.array(frequencies))
    head = _HEAD.pack(low, len(escaped), len(words), starts) + priors.astype(np.uint8).tobytes()
    low_bits = _pack_low(elements & ((1 << (shape.mantissa_bits - 1)) - 1), shape)
    body = b"".join([head, *tables, escaped, low_bits, states.astype("<u4").tobytes(), words.astype("<u2").tobytes()])
    return body if len(body) < len(data) else None


def _levels(exponents: Ints, low: int) -> Ints:
    levels = exponents - low + 1
    levels[(levels < 1) | (levels >= _LEVELS)] = 0
    return levels


def _sample(shape: KvShape, elements: Ints) -> Ints:
    """What is looked at of each segment: shape (segments, some elements)."""
    return elements.reshape(shape[:3])[:, ::_SAMPLE_EVERY].reshape(shape.segments, -1)


def _choose_low(shape: KvShape, exponents: Ints) -> int:
    """The window's end at the highest exponent, unless that leaves out too many: then the fullest window."""
    low = max(int(exponents.max()) - (_LEVELS - 2), 0)
    sample = _levels(_sample(shape, exponents), low)
    if np.count_nonzero(sample == 0) <= sample.size // 256:
        return low
    sums = np.cumsum(np.bincount(exponents, minlength=_exponent_mask(shape) + 1))
    inside = sums[_LEVELS - 2 :] - np.concatenate([[0], sums[: -(_LEVELS - 1)]])
    return int(inside.argmax())


def _split(
    shape: KvShape, levels: Ints, negative: Ints, bits: Ints, exponents: Ints, priors: Ints
) -> tuple[Ints, Ints, bytes]:
    """Contexts, symbols and escaped exponents in coding order."""
    cube = shape[:3]
    levels, negative, bits, exponents = (each.reshape(cube) for each in (levels, negative, bits, exponents))
    contexts, symbols, escaped = [], [], []
    state = _State(0, 0)
    for row in _rows(shape):
        here = (row.segment, row.token, row.channels)
        if row.token == 0:
            state = _State(int(priors[row.segment]), levels[here].size)
        contexts.append(state.contexts())
        symbols.append((negative[here] ^ state.flips()) << 6 | levels[here] << 1 | bits[here])
        escaped.append(exponents[here][levels[here] == 0])
        state.learn(levels[here], negative[here], row.token, row.segment >= shape.segments // 2)
    return np.concatenate(contexts), np.concatenate(symbols), np.concatenate(escaped).astype(np.uint8).tobytes()


def _join_contexts(counts: Ints) -> tuple[Ints, int]:
    """The table of each context, and the contexts at which tables start, as bits."""
    table_of, starts, table, gathered = [], 1, 0, 0
    for context in range(_CONTEXTS):
        here = int(counts[context].sum())
        first_of_half = context >= _LEVELS and not starts >> _LEVELS
        if here and (gathered >= _TABLE_COUNT or (first_of_half and gathered)):
            table += 1
            gathered = 0
            starts |= 1 << context
        gathered += here
        table_of.append(table)
    return np.array(table_of), starts


def _weight_codes(counts: Ints) -> Ints:
    """Per symbol the largest weight that is at most 4/3 of its share, in 1024ths of the highest count."""
    reached = counts[:, None] * 4096 >= int(counts.max()) * 3 * _WEIGHTS[2:]
    return np.where(counts > 0, 1 + reached.sum(axis=1), 0)


def _pack_table(weights: Ints) -> bytes:
    parts = []
    for half in weights.reshape(2, -1):
        present = np.flatnonzero(half)
        first, end = (int(present[0]), int(present[-1]) + 1) if len(present) else (0, 0)
        codes = np.append(half[first:end], 0)[: (end - first + 1) // 2 * 2].reshape(-1, 2)
        parts.append(bytes([first, end - first]) + (codes[:, 0] | codes[:, 1] << 4).astype(np.uint8).tobytes())
    return b"".join(parts)


def _pack_low(low: Ints, shape: KvShape) -> bytes:
    whole = len(low) // _CHUNK * _CHUNK
    chunks, rest = low[:whole], low[whole:]
    if shape.mantissa_bits == 10:
        chunks = chunks.reshape(-1, 8, 32)
        tops = (chunks >> 8 << np.arange(8)[:, None]).sum(axis=1)
        packed = np.concatenate([(chunks & 255).reshape(-1, _CHUNK), tops], axis=1)
        return b"".join([packed.astype(np.uint8).tobytes(), rest.astype("<u2").tobytes()])
    chunks = chunks.reshape(-1, 4, 64)
    packed = chunks[:, :3] | (chunks[:, 3:] >> np.array([[0], [2], [4]]) & 3) << 6
    return b"".join([packed.astype(np.uint8).tobytes(), rest.astype(np.uint8).tobytes()])


def _code(shape: KvShape, tables: Ints, symbols: Ints, frequencies: Ints) -> tuple[Ints, Ints]:
    """Range coding from the last symbol to the first; the words in the order of reading, and the states."""
    frequency = frequencies[tables, symbols].astype(np.uint64)
    start = (np.cumsum(frequencies, axis=1) - frequencies)[tables, symbols].astype(np.uint64)
    limit = frequency << np.uint64(32 - _PROB_BITS)
    states = np.full(_LANES, _STATE_LOW, np.uint64)
    words = []
    for first, end in reversed(list(_groups(shape))):
        group, state = slice(first, end), states[: end - first]
        full = state >= limit[group]
        words.append((state[full] & np.uint64(0xFFFF)).astype(np.uint16))
        state = np.where(full, state >> np.uint64(16), state)
        quotient, rest = np.divmod(state, frequency[group])
        states[: end - first] = (quotient << np.uint64(_PROB_BITS)) + rest + start[group]
    return np.concatenate(words[::-1]), states


def _groups(shape: KvShape) -> Iterator[tuple[int, int]]:
    """Where each group of up to `_LANES` symbols starts and ends, in coding order; no group spans two rows."""
    at = 0
    for row in _rows(shape):
        end = at + row.channels.stop - row.channels.start
        for first in range(at, end, _LANES):
            yield first, min(first + _LANES, end)
        at = end


# Decoding


@dataclasses.dataclass(slots=True)
class _Stream:
    """The states and the words that are left."""

    states: Ints
    words: Ints
    position: int = 0

    def take(self, tables: Ints, slots: _Slots) -> Ints:
        """The next symbols, up to `_LANES` of them, each under its table."""
        state = self.states[: len(tables)]
        index = tables << _PROB_BITS | (state & (_PROB_SUM - 1))
        state = slots.frequency[index] * (state >> _PROB_BITS) + slots.offset[index]
        short = state < _STATE_LOW
        end = self.position + int(np.count_nonzero(short))
        if end > len(self.words):
            raise FormatError("the compressed words end too early")
        state[short] = state[short] << 16 | self.words[self.position : end]
        self.states[: len(tables)], self.position = state, end
        symbols: Ints = slots.symbol[index]
        return symbols


class _Slots(NamedTuple):
    """Per table and slot: the symbol, its frequency, and how far into its range the slot is."""

    symbol: Ints
    frequency: Ints
    offset: Ints


@dataclasses.dataclass(frozen=True, slots=True)
class _Body:
    """The parts of a body, cut but for the coded symbols not yet read."""

    low: int
    priors: Ints
    table_of: Ints
    slots: _Slots
    escaped: Ints
    low_bits: Ints
    stream: _Stream


def decode(shape: KvShape, body: bytes | memoryview) -> npt.NDArray[np.uint8]:
    """The bytes of the elements: uint8, shape (num_elements * 2,).

    Raises:
        FormatError: the body is damaged.
    """
    parts = _open(shape, np.frombuffer(body, np.uint8))
    data = np.empty(shape[:3], np.int64)
    escaped, taken, state = parts.escaped, 0, _State(0, 0)
    for row in _rows(shape):
        width = row.channels.stop - row.channels.start
        if row.token == 0:
            state = _State(int(parts.priors[row.segment]), width)
        tables = parts.table_of[state.contexts()]
        groups = [parts.stream.take(tables[at : at + _LANES], parts.slots) for at in range(0, width, _LANES)]
        symbols = np.concatenate(groups)
        levels, negative = symbols >> 1 & (_LEVELS - 1), symbols >> 6 ^ state.flips()
        exponents = levels + parts.low - 1
        strange = levels == 0
        if number := int(np.count_nonzero(strange)):
            if taken + number > len(escaped):
                raise FormatError("exponents without a level are missing")
            exponents[strange] = escaped[taken : taken + number]
            taken += number
        bits = (symbols & 1) << (shape.mantissa_bits - 1)
        data[row.segment, row.token, row.channels] = negative << 15 | exponents << shape.mantissa_bits | bits
        state.learn(levels, negative, row.token, row.segment >= shape.segments // 2)
    stream = parts.stream
    if taken != len(escaped) or stream.position != len(stream.words) or (stream.states != _STATE_LOW).any():
        raise FormatError("the compressed words do not end where they should")
    return (data.reshape(-1) | parts.low_bits).astype("<u2").view(np.uint8)


def _open(shape: KvShape, body: Ints) -> _Body:
    """Checks every size before it is used."""
    num_elements = shape.segments * shape.tokens * shape.channels
    if len(body) < _HEAD.size + shape.segments:
        raise FormatError(f"{len(body)} compressed bytes are too few")
    low, num_escaped, num_words, starts = _HEAD.unpack(body[: _HEAD.size].tobytes())
    mask = _exponent_mask(shape)
    if body[1:4].any() or low > mask - (_LEVELS - 2) or not starts & 1:
        raise FormatError("the head of the compressed bytes is damaged")
    at = _HEAD.size + shape.segments
    priors = body[_HEAD.size : at]
    if (priors > _MAX_PRIOR).any():
        raise FormatError("a segment's expected exponent is out of range")
    table_of, tables, at = _read_tables(body, at, starts)
    low_bytes = num_elements // _CHUNK * (288 if shape.mantissa_bits == 10 else 192)
    low_bytes += num_elements % _CHUNK * (2 if shape.mantissa_bits == 10 else 1)
    if len(body) - at != num_escaped + low_bytes + 4 * _LANES + 2 * num_words:
        raise FormatError("the parts do not fill the compressed bytes exactly")
    escaped, low_at = body[at : at + num_escaped], at + num_escaped
    if (escaped > mask).any():
        raise FormatError("an exponent is out of range")
    at = low_at + low_bytes
    states = body[at : at + 4 * _LANES].view("<u4").astype(np.int64)
    words = body[at + 4 * _LANES :].view("<u2").astype(np.int64)
    low_bits = _unpack_low(body[low_at:at], shape, num_elements)
    return _Body(low, priors, table_of, tables, escaped.astype(np.int64), low_bits, _Stream(states, words))


def _read_tables(body: Ints, at: int, starts: int) -> tuple[Ints, _Slots, int]:
    frequencies: list[Ints] = []
    table_of = []
    for context in range(_CONTEXTS):
        if starts >> context & 1:
            weights = np.zeros((2, _SYMBOLS // 2), np.int64)
            for half in weights:
                first, number = (int(each) for each in body[at : at + 2]) if at + 2 <= len(body) else (_SYMBOLS, 0)
                packed = body[at + 2 : at + 2 + (number + 1) // 2].astype(np.int64)
                at += 2 + (number + 1) // 2
                if first + number > _SYMBOLS // 2 or at > len(body):
                    raise FormatError("a probability table is damaged")
                half[first : first + number] = np.stack([packed & 15, packed >> 4], axis=1).reshape(-1)[:number]
            frequencies.append(_frequencies(weights.reshape(-1)))
        table_of.append(len(frequencies) - 1)
    flat = np.concatenate(frequencies)
    within = np.arange(_PROB_SUM * len(frequencies)) - np.repeat(np.cumsum(flat) - flat, flat)
    symbol = np.repeat(np.tile(np.arange(_SYMBOLS), len(frequencies)), flat)
    return np.array(table_of), _Slots(symbol, np.repeat(flat, flat), within), at


def _unpack_low(packed: Ints, shape: KvShape, num_elements: int) -> Ints:
    chunks, rest = num_elements // _CHUNK, num_elements % _CHUNK
    low = np.empty(num_elements, np.int64)
    whole = low[: chunks * _CHUNK]
    if shape.mantissa_bits == 10:
        body: Ints = packed[: chunks * 288].reshape(chunks, 288).astype(np.int64)
        tops = (body[:, None, _CHUNK:] >> np.arange(8)[:, None] & 1) << 8
        whole[:] = (body[:, :_CHUNK].reshape(chunks, 8, 32) | tops).reshape(-1)
        low[len(whole) :] = packed[chunks * 288 :].view("<u2")
    else:
        body = packed[: chunks * 192].reshape(chunks, 3, 64).astype(np.int64)
        last = (body >> 6 << np.array([[0], [2], [4]])).sum(axis=1, keepdims=True)
        whole[:] = np.concatenate([body & 63, last], axis=1).reshape(-1)
        low[len(whole) :] = packed[chunks * 192 :]
    if rest and (low[len(whole) :] >> (shape.mantissa_bits - 1)).any():
        raise FormatError("bits are set that no element has")
    return low
