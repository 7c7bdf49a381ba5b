"""Parts of the benchmark that move bytes: copy ceilings, packing, host copies, paged attention."""

from __future__ import annotations

import time
from typing import Any

import torch

from kitelib.backends.torch_engine.pages import LayerShape, PagedCache
from kitelib.backends.torch_engine.plan import StepPlan
from tests.gpu.bench_report import Report, seconds, wait_for

__all__ = ["attention", "copies", "make_kernel", "transfer"]

DEVICE_COPY = "device copy, bytes read and written"
HOST_TO_DEVICE = "host to device, pinned"
DEVICE_TO_HOST = "device to host, pinned"
_HEADS, _KV_HEADS, _DIM = 32, 8, 128  # of Llama 3 8B


def copies(report: Report) -> None:
    """What the machine's memories can do at best."""
    device, size = report.device, 2**20 if report.tiny else 2**31
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    report.add(DEVICE_COPY, 2 * size / seconds(lambda: target.copy_(source), device) / 1e9, "GB/s")
    if device.type != "cuda":
        for name in (HOST_TO_DEVICE, DEVICE_TO_HOST):
            report.leave_out(name, "the CPU has no other memory to copy to")
        return
    size = 2**20 if report.tiny else 2**30
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    there = target[:size]
    up = seconds(lambda: there.copy_(host, non_blocking=True), device, runs=5)
    down = seconds(lambda: host.copy_(there, non_blocking=True), device, runs=5)
    report.add(HOST_TO_DEVICE, size / up / 1e9, "GB/s")
    report.add(DEVICE_TO_HOST, size / down / 1e9, "GB/s")


def transfer(report: Report) -> None:
    """Blocks of an 8B model from the device to payloads on the host and back, everything included."""
    from kitelib.backends.torch_engine.transfer import BlockTransfer

    count, layers = (8, 2) if report.tiny else (1024, 32)  # 2 MiB each
    layer = LayerShape(_KV_HEADS, _DIM, _KV_HEADS, _DIM)
    cache = PagedCache([layer] * layers, 2 * count, 16, torch.bfloat16, report.device)
    cache.arena.normal_()
    transfer = BlockTransfer(cache)
    blocks = torch.randperm(2 * count, generator=torch.Generator().manual_seed(0))[:count].tolist()
    tokens = [16] * count
    payloads = transfer.export(blocks, tokens)
    num_bytes = sum(each.size for each in payloads)
    up, down = [], []
    for _ in range(2 if report.tiny else 4):
        wait_for(report.device)
        begin = time.perf_counter()
        payloads = transfer.export(blocks, tokens)
        wait_for(report.device)
        down.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        transfer.restore(blocks, payloads)
        wait_for(report.device)
        up.append(time.perf_counter() - begin)
    ceilings = report.figures
    for name, times, ceiling in (
        ("blocks to payloads", down, DEVICE_TO_HOST),
        ("payloads to blocks", up, HOST_TO_DEVICE),
    ):
        limit = (ceilings[ceiling], ceiling) if ceiling in ceilings else None
        report.add(f"{name}, {count} of 2 MiB", num_bytes / min(times) / 1e9, "GB/s", limit)


def make_kernel(device: torch.device, *, bitwise: bool, max_context: int) -> Any:
    """The attention kernel that the engine uses on the device."""
    if device.type == "cuda":
        from kitelib.backends.torch_engine.kernels.triton_attention import TritonAttention

        return TritonAttention(16, bitwise=bitwise, max_context=max_context)
    from kitelib.backends.torch_engine.kernels.gathered import GatheredAttention

    return GatheredAttention()


def _plan(device: torch.device, sequences: int, context: int, rows: int) -> StepPlan:
    """`sequences` of the same length, their blocks in a random order, with `rows` new rows each."""
    width = -(-context // 16)
    order = torch.randperm(sequences * width, generator=torch.Generator().manual_seed(1), dtype=torch.int64)
    tables = order.view(sequences, width)
    positions = torch.arange(context - rows, context).repeat(sequences)
    owners = torch.arange(sequences).repeat_interleave(rows)
    slots = tables[owners, positions // 16] * 16 + positions % 16
    return StepPlan(
        num_rows=sequences * rows,
        num_sequences=sequences,
        max_rows=rows,
        max_context=context,
        row_starts=torch.arange(0, sequences * rows + 1, rows, dtype=torch.int32, device=device),
        contexts=torch.full((sequences,), context, dtype=torch.int32, device=device),
        tables=tables.to(torch.int32).to(device),
        slots=slots.to(device),
        positions=positions.to(device),
    )


def attention(report: Report) -> None:
    """One layer: decode by the bytes of KV that it reads, prefill by its operations."""
    device = report.device
    shapes = [(1, 40), (3, 20)] if report.tiny else [(1, 32_768), (16, 8192), (64, 4096), (256, 1024)]
    most = max(sequences * -(-context // 16) for sequences, context in shapes)
    layer = LayerShape(_KV_HEADS, _DIM, _KV_HEADS, _DIM)
    cache = PagedCache([layer], most, 16, torch.bfloat16, device)
    cache.arena.normal_()

    def run(plan: StepPlan, *, bitwise: bool) -> float:
        kernel = make_kernel(device, bitwise=bitwise, max_context=65_536)
        query = torch.randn((plan.num_rows, _HEADS, _DIM), dtype=torch.bfloat16, device=device)
        key = torch.randn((plan.num_rows, _KV_HEADS, _DIM), dtype=torch.bfloat16, device=device)
        pages = cache.keys(0), cache.values(0)

        def once() -> None:
            kernel.attend(query, key, key, *pages, plan, scale=_DIM**-0.5, window=0, softcap=0.0)

        call: Any = once
        if device.type == "cuda":  # what the engine does with decode steps; else small shapes measure Python
            from kitelib.backends.torch_engine.graphs import CudaGraphs

            call = CudaGraphs(device).capture(once)
        return seconds(call, device, inner=1 if report.tiny else 10)

    for sequences, context in shapes:
        num_bytes = sequences * context * 2 * _KV_HEADS * _DIM * 2
        for bitwise in (False, True):
            taken = run(_plan(device, sequences, context, 1), bitwise=bitwise)
            name = f"paged attention, {sequences} x {context} tokens{', bitwise' if bitwise else ''}"
            report.add(name, num_bytes / taken / 1e9, "GB/s", (report.figures[DEVICE_COPY], "device copy"))
    rows = 16 if report.tiny else 4096
    plan = _plan(device, 1, 2 * rows, rows)
    for bitwise in (False, True):
        operations = 4 * _HEADS * _DIM * rows * 1.5 * rows
        name = f"prefill attention, {rows} rows after {rows}{', bitwise' if bitwise else ''}"
        report.add(name, operations / run(plan, bitwise=bitwise) / 1e12, "TFLOP/s")
