"""Coded elements, read by a decoder written from docs/format.md alone: one element at a time, no code of the library.

test_format.py holds that the library's own decoder gives the right elements; here both must give the same.
"""

import struct
from pathlib import Path

import pytest

from kitelib.upcycle.codec import get_codec

HERE = Path(__file__).parent
WEIGHTS = [0, 1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
K_SHIFTS, V_SHIFTS, SIGN_SHIFTS = [1, 1, 2, 2, 2, 3, 3, 3], [2, 3, 3, 3, 3, 3, 3, 4], [0, 1, 2, 2, 2, 3, 3, 3]


def read_table(body: bytes, at: int) -> tuple[list[tuple[int, int, int]], int]:
    """For each r from 0 to 2047: symbol, frequency and start."""
    codes = [0] * 128
    for half in (0, 64):
        first, number = body[at], body[at + 1]
        for index in range(number):
            codes[half + first + index] = body[at + 2 + index // 2] >> 4 * (index % 2) & 15
        at += 2 + (number + 1) // 2
    present, total = sum(code > 0 for code in codes), sum(WEIGHTS[code] for code in codes)
    slots, weight, reached = [], 0, 0
    for symbol, code in enumerate(codes):
        weight += WEIGHTS[code]
        now = weight * (2048 - present) // total
        frequency = now - reached + 1 if code else 0
        slots += [(symbol, frequency, len(slots))] * frequency
        reached = now
    return slots, at


def low_bits(packed: bytes, index: int, count: int, half: bool) -> int:
    chunk, j = divmod(index, 256)
    if chunk < count // 256:
        part = packed[chunk * (288 if half else 192) :]
        if half:
            return part[j] | (part[256 + j % 32] >> j // 32 & 1) << 8
        return part[j] & 63 if j < 192 else sum((part[64 * k + j - 192] >> 6) << 2 * k for k in range(3))
    rest = packed[count // 256 * (288 if half else 192) :]
    return int.from_bytes(rest[2 * j : 2 * j + 2], "little") if half else rest[j]


def decode(payload: bytes, shape: tuple[int, int, int], half: bool) -> list[int]:
    segments, tokens, channels = shape
    count, mantissa = segments * tokens * channels, 10 if half else 7
    body = payload[8:]
    low, num_escapes, num_words, starts = struct.unpack_from("<B3xIIQ", body)
    priors, at = body[20 : 20 + segments], 20 + segments
    tables = []
    for context in range(64):
        if starts >> context & 1:
            table, at = read_table(body, at)
        tables.append(table)
    escapes, at = list(body[at : at + num_escapes]), at + num_escapes
    packed, at = body[at : len(body) - 128 - 2 * num_words], len(body) - 128 - 2 * num_words
    states = list(struct.unpack_from("<32I", body, at))
    words = list(struct.unpack_from(f"<{num_words}H", body, at + 128))
    data = [0] * count
    for segment in range(segments):
        shifts = K_SHIFTS if segment < segments // 2 else V_SHIFTS
        for tile in range(0, channels, 256):
            expected, sign = [2 * priors[segment]] * channels, [0] * channels
            for token in range(tokens):
                t = min(token, 7)
                for lane, c in enumerate(range(tile, min(tile + 256, channels))):
                    slots = tables[(expected[c] + 8) // 16 + (32 if abs(sign[c]) >= 40 else 0)]
                    state = states[lane % 32]
                    symbol, frequency, start = slots[state % 2048]
                    state = frequency * (state // 2048) + state % 2048 - start
                    states[lane % 32] = state if state >= 65536 else state << 16 | words.pop(0)
                    level, negative = symbol >> 1 & 31, symbol >> 6 ^ (sign[c] < 0)
                    exponent = level + low - 1 if level else escapes.pop(0)
                    index = (segment * tokens + token) * channels + c
                    data[index] = negative << 15 | exponent << mantissa | (symbol & 1) << (mantissa - 1)
                    data[index] |= low_bits(packed, index, count, half)
                    expected[c] += (16 * level - expected[c]) >> shifts[t]
                    sign[c] += (64 - 128 * negative - sign[c]) >> SIGN_SHIFTS[t]
    assert states == [65536] * 32
    assert not words
    assert not escapes
    return data


@pytest.mark.parametrize("name", ["kv_entropy.ru", "kv_entropy_bfloat16.ru"])
def test_the_specification_is_enough_to_read_coded_elements(name):
    blob, shape, half = (HERE / name).read_bytes(), (4, 16, 300), "bfloat16" not in name
    payload = blob[struct.unpack_from("<I", blob, 12)[0] :]
    read = get_codec("paged_kvcache_v2", "entropy").decode(payload, 38400, "float16" if half else "bfloat16", shape)
    assert decode(payload, shape, half) == read.view("<u2").tolist()
