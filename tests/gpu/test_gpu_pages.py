"""csrc/ on the device packs the bytes that PyTorch's own operations pack."""

from __future__ import annotations

import numpy as np
import torch

from kitelib.native.upcycle_ext import PageMover, check_results, checksum, upcycle_note
from tests.gpu.rig import device


def _segments(dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Keys and values of three layers in one arena, as the paged cache has them, with 20 blocks of 16 tokens."""
    generator = torch.Generator().manual_seed(seed)
    arena = torch.randn((20, 6, 16, 2, 64), generator=generator).to(dtype).to(device())
    return [arena[:, index] for index in range(6)]


def test_csrc_is_used() -> None:
    """It was built, and it fits the driver and the device."""
    mover = PageMover(_segments(torch.bfloat16, 0))
    assert mover.is_native, upcycle_note(device().type)


def test_native_and_torch_give_the_same_bytes_in_every_form() -> None:
    """Whole and partial blocks; and unpacking gives the pages back, in the exact forms bit for bit."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for form in ("raw", "planes", "int8", "fp8"):
            if dtype is torch.float32 and form in ("int8", "fp8"):
                continue
            segments = _segments(dtype, 1)
            native, plain = PageMover(segments), PageMover(segments, native=False)
            counts = [(3, 0, 16), (17, 0, 5), (0, 4, 12), (9, 0, 16)]
            rows, start = [], 0
            for block, first, tokens in counts:
                rows.append((block, first, tokens, start))
                start += -(-native.packed_bytes(tokens, form) // 16) * 16
            items = np.array(rows, np.int64)
            packed = [torch.zeros(start, dtype=torch.uint8, device=device()) for _ in range(2)]
            results = [
                each.pack(items, target, form, checksum=True)
                for each, target in zip((native, plain), packed, strict=True)
            ]
            for each in results:
                check_results(each)
            assert torch.equal(packed[0], packed[1]), (dtype, form)
            assert torch.equal(results[0], results[1]), (dtype, form)
            size = native.packed_bytes(16, form)
            assert int(results[0][0, 0]) & 2**64 - 1 == checksum(packed[0][:size].cpu())
            targets = [_segments(dtype, 2), _segments(dtype, 2)]
            for each, target in ((True, targets[0]), (False, targets[1])):
                found = PageMover(target, native=each).unpack(items, packed[0], form, checksum=True)
                check_results(found)
                assert torch.equal(found[:, 0], results[0][:, 0])
            for index in range(6):
                assert torch.equal(targets[0][index], targets[1][index]), (dtype, form)
                if form in ("raw", "planes"):
                    for block, first, tokens in counts:
                        place = block, slice(first, first + tokens)
                        assert torch.equal(targets[0][index][place], segments[index][place])
