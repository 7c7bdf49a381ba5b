"""Packing of pages with PyTorch's own operations: the bytes of csrc/, on any device, more slowly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kitelib.native.pages import DAMAGED, FORMS, NOT_FINITE

if TYPE_CHECKING:
    import torch

__all__ = ["GROUP", "KEY_TOKENS", "checksum", "form_bytes", "pack_item", "unpack_item"]

GROUP: Final = 64
"""Channels that share a scale in the lossy forms."""
KEY_TOKENS: Final = 8
"""From so many tokens on, K has scales per channel there."""
_HEAD_BYTES: Final = 8
_MASK: Final = 2**64 - 1


def _signed(number: int) -> int:
    return (number & _MASK) - ((number & 2**63) << 1)


_KEY: Final = _signed(0x9E3779B97F4A7C15)
_LENGTH_KEY: Final = _signed(0xD6E8FEB86659FD93)
_FACTORS: Final = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))


def checksum(data: torch.Tensor) -> torch.Tensor:
    """The checksum of csrc/include/kite_pages.h, as a signed int64 without dimensions.

    Args:
        data: uint8, (bytes,).
    """
    import torch

    words = torch.zeros(-(-len(data) // 8) * 8, dtype=torch.uint8, device=data.device)
    words[: len(data)] = data
    numbers = words.view(torch.int64)
    keys = torch.arange(1, len(numbers) + 1, dtype=torch.int64, device=data.device) * _KEY
    return _mix(_mix(numbers ^ keys).sum() + _signed(len(data) * _LENGTH_KEY))


def _mix(numbers: torch.Tensor) -> torch.Tensor:
    """Integers wrap around in PyTorch; its shifts copy the sign, which has to be cut off."""
    for shift, factor in _FACTORS:
        numbers = (numbers ^ (numbers >> shift & (1 << 64 - shift) - 1)) * factor
    return numbers ^ (numbers >> 31 & (1 << 33) - 1)


def form_bytes(num_segments: int, token_bytes: int, tokens: int, form: int) -> int:
    """Bytes of a packed item; `token_bytes` is of all segments together."""
    if form < FORMS["int8"]:
        return token_bytes * tokens
    channels = token_bytes // num_segments // 2
    _, scales = _scale_counts(num_segments, tokens, channels)
    return _HEAD_BYTES + 2 * scales + num_segments * tokens * channels


def _scale_counts(num_segments: int, tokens: int, channels: int) -> tuple[int, int]:
    """Scales of K, and of all."""
    keys, grouped = num_segments // 2, tokens * -(-channels // GROUP)
    key_scales = keys * (channels if tokens >= KEY_TOKENS else grouped)
    return key_scales, key_scales + (num_segments - keys) * grouped


def pack_item(pages: Sequence[torch.Tensor], form: int, packed: torch.Tensor) -> int:
    """Packs one item.

    Args:
        pages: its segments, each (tokens, channels).
        packed: uint8, contiguous, of exactly `form_bytes`; written.

    Returns:
        0 or `NOT_FINITE`.
    """
    import torch

    if form < FORMS["int8"]:
        data = torch.cat([page.contiguous().view(torch.uint8).reshape(-1) for page in pages])
        if form == FORMS["planes"]:
            data = data.view(-1, pages[0].element_size()).t().reshape(-1)
        packed.copy_(data)
        return 0
    values = torch.stack(list(pages)).float()
    if not bool(torch.isfinite(values).all()):
        return NOT_FINITE
    head = torch.zeros(_HEAD_BYTES, dtype=torch.uint8, device=packed.device)
    head[1] = int(form == FORMS["fp8"])
    scales, codes = [], []
    for part, by_channel in _parts(values):
        highest = part.abs().amax(dim=1, keepdim=True) if by_channel else _group_highest(part)
        spread = highest if by_channel else _spread(highest, part.shape[2])
        share = torch.where(spread > 0, part / spread, torch.zeros_like(part))
        scales.append(highest.to(pages[0].dtype).reshape(-1).view(torch.uint8))
        if form == FORMS["int8"]:
            code = torch.round(share * 127).to(torch.int8)
        else:
            code = (share * 448).to(torch.float8_e4m3fn)
        codes.append(code.reshape(-1).view(torch.uint8))
    packed.copy_(torch.cat([head, *scales, *codes]))
    return 0


def unpack_item(packed: torch.Tensor, form: int, pages: Sequence[torch.Tensor]) -> int:
    """Restores one item into its segments; the inverse of `pack_item`.

    Returns:
        0 or `DAMAGED`; then nothing was written.
    """
    import torch

    if form < FORMS["int8"]:
        if form == FORMS["planes"]:
            packed = packed.view(pages[0].element_size(), -1).t()
        sizes = [page.numel() * page.element_size() for page in pages]
        for page, data in zip(pages, torch.split(packed.reshape(-1), sizes), strict=True):
            page.view(torch.uint8).copy_(data.view(page.shape[0], -1))
        return 0
    dtype, shape = pages[0].dtype, (len(pages), *pages[0].shape)
    _, num_scales = _scale_counts(*shape)
    starts = [_HEAD_BYTES, 2 * num_scales, len(packed) - _HEAD_BYTES - 2 * num_scales]
    head, scale_bytes, codes = torch.split(packed, starts)
    scales = scale_bytes.clone().view(dtype).float()
    magnitudes = codes & 0x7F
    bad_codes = codes == 0x80 if form == FORMS["int8"] else magnitudes == 0x7F
    wanted = [0, int(form == FORMS["fp8"]), *[0] * 6]
    if head.tolist() != wanted or bool(bad_codes.any()) or not bool((torch.isfinite(scales) & (scales >= 0)).all()):
        return DAMAGED
    if form == FORMS["int8"]:
        shares = codes.view(torch.int8).float() / 127
    else:
        shares = codes.view(torch.float8_e4m3fn).float() / 448
    at = segment = 0
    for part, by_channel in _parts(shares.view(shape)):
        scale_shape = (len(part), 1, shape[2]) if by_channel else (len(part), shape[1], -(-shape[2] // GROUP))
        size = scale_shape[0] * scale_shape[1] * scale_shape[2]
        scale = scales[at : at + size].view(scale_shape)
        restored = (part * (scale if by_channel else _spread(scale, shape[2]))).to(dtype)
        for page, data in zip(pages[segment : segment + len(part)], restored, strict=True):
            page.copy_(data)
        at, segment = at + size, segment + len(part)
    return 0


def _parts(values: torch.Tensor) -> list[tuple[torch.Tensor, bool]]:
    """K and V, each if there is any, and whether it has its scales per channel."""
    half = len(values) // 2
    parts = [(values[:half], values.shape[1] >= KEY_TOKENS), (values[half:], False)]
    return [part for part in parts if len(part[0])]


def _group_highest(part: torch.Tensor) -> torch.Tensor:
    """Highest magnitudes: (segments, tokens, groups)."""
    import torch

    channels = part.shape[2]
    filled = torch.nn.functional.pad(part.abs(), (0, -channels % GROUP))
    return filled.view(*part.shape[:2], -1, GROUP).amax(dim=3)


def _spread(scales: torch.Tensor, channels: int) -> torch.Tensor:
    return scales.repeat_interleave(GROUP, dim=2)[:, :, :channels]
