"""The part of the benchmark that packs scattered blocks into one piece and back."""

from __future__ import annotations

import numpy as np
import torch

from kitelib.backends.torch_engine.pages import LayerShape, PagedCache
from kitelib.native.upcycle_ext import PageMover, upcycle_note
from tests.gpu.bench_memory import DEVICE_COPY
from tests.gpu.bench_report import Report, seconds

__all__ = ["pages"]


def pages(report: Report) -> None:
    """Blocks of an 8B model, in the arena and with one tensor per layer; bytes read and written."""
    device = report.device
    count, layers, heads, dim = (8, 2, 2, 8) if report.tiny else (1024, 32, 8, 128)  # 2 MiB each
    cache = PagedCache([LayerShape(heads, dim, heads, dim)] * layers, 2 * count, 16, torch.bfloat16, device)
    cache.arena.normal_()
    arena = [cache.keys(layer) for layer in range(layers)] + [cache.values(layer) for layer in range(layers)]
    _measure(report, "arena", arena, count, ("raw", "planes", "int8", "fp8"))
    del cache, arena
    apart = [torch.randn((2 * count, 16, heads, dim), dtype=torch.bfloat16, device=device) for _ in range(2 * layers)]
    _measure(report, "a tensor per layer", apart, count, ("raw",))


def _measure(report: Report, where: str, segments: list[torch.Tensor], count: int, forms: tuple[str, ...]) -> None:
    mover = PageMover(segments)
    if not mover.is_native:
        report.leave_out(f"packing, {where}", f"csrc/ is not used: {upcycle_note(report.device.type)}")
        return
    blocks = torch.randperm(mover.num_blocks, generator=torch.Generator().manual_seed(0))[:count].numpy()
    for form in forms:
        size = -(-mover.packed_bytes(16, form) // 16) * 16
        items = np.stack([blocks, np.zeros(count), np.full(count, 16), np.arange(count) * size], 1).astype(np.int64)
        packed = torch.zeros(count * size, dtype=torch.uint8, device=report.device)
        moved = count * (16 * mover.token_bytes + mover.packed_bytes(16, form))
        ceiling = (report.figures[DEVICE_COPY], "device copy")
        for checksum in (False, True) if form == "raw" else (True,):
            suffix = " and checksum" if checksum else ""
            taken = seconds(lambda: mover.pack(items, packed, form, checksum=checksum), report.device)  # noqa: B023
            report.add(f"pack {form}{suffix}, {where}", moved / taken / 1e9, "GB/s", ceiling)
            taken = seconds(lambda: mover.unpack(items, packed, form, checksum=checksum), report.device)  # noqa: B023
            report.add(f"unpack {form}{suffix}, {where}", moved / taken / 1e9, "GB/s", ceiling)
