"""A budget of 40 blocks: sequences that don't fit together leave the device and come back, and nothing shows."""

from __future__ import annotations

import dataclasses

import numpy as np

from kitelib.abc import BlockPayload, SequenceId, StepWork
from kitelib.backends.torch_engine.backend import TorchBackend
from tests.gpu.rig import compute, export_all, load, model_folder, on_gpu, prompt

_BLOCKS = 40


@dataclasses.dataclass
class _Request:
    tokens: list[int]
    wanted: int
    sequence: SequenceId | None = None
    held: int = 0
    payloads: list[BlockPayload] | None = None
    turns: int = 0

    @property
    def done(self) -> bool:
        return len(self.tokens) == self.wanted


def _requests(limit: int) -> list[_Request]:
    random = np.random.default_rng(4)
    requests = []
    for seed in range(14 if on_gpu() else 6):
        length = int(random.integers(limit // 10, limit // 2))
        requests.append(_Request(prompt(length, seed), length + int(random.integers(limit // 6, limit // 3))))
    return requests


def _preempt(backend: TorchBackend, victim: _Request) -> None:
    """Takes the whole blocks out; the rest is computed again."""
    assert victim.sequence is not None
    size = backend.info.block_tokens
    whole = victim.held // size * size
    victim.payloads = export_all(backend, victim.sequence, whole) if whole else []
    backend.release(victim.sequence)
    victim.sequence, victim.held = None, whole


def _work_on(backend: TorchBackend, request: _Request) -> int:
    """Tokens that its next step has."""
    if request.sequence is None:
        request.sequence = backend.create()
        if request.payloads:
            backend.restore_blocks(request.sequence, 0, request.payloads)
        request.payloads = None
    return min(len(request.tokens) - request.held, 32)


def _run(backend: TorchBackend, requests: list[_Request]) -> int:
    """Runs all requests, oldest first; the number of preemptions."""
    preemptions = 0
    waiting, running = list(requests), []
    while waiting or running:
        while waiting and len(running) < 8:
            needed = waiting[0].held + min(len(waiting[0].tokens) - waiting[0].held, 32)
            if running and backend.room() < needed + backend.info.block_tokens:
                break
            request = waiting.pop(0)
            _work_on(backend, request)
            running.append(request)
        counts = [_work_on(backend, request) for request in running]
        while backend.room(None, [(each.sequence, n) for each, n in zip(running, counts, strict=True)]) < 0:
            victim = running.pop()
            counts.pop()
            _preempt(backend, victim)
            waiting.insert(0, victim)
            preemptions += 1
        work = [
            StepWork(
                each.sequence, each.tokens[each.held : each.held + n], each.held, each.held + n == len(each.tokens)
            )
            for each, n in zip(running, counts, strict=True)
        ]
        for request, count, logits in zip(list(running), counts, backend.step(work).logits, strict=True):
            request.held += count
            if logits is not None:
                request.tokens.append(int(logits.argmax()))
            if request.done:
                backend.release(request.sequence)
                running.remove(request)
    return preemptions


def test_a_budget_of_40_blocks_finishes_every_request() -> None:
    """Bitwise mode: with the tokens that each request gets alone."""
    folder = model_folder()
    size, limit = (16, 320) if on_gpu() else (2, 40)
    with load(folder, numerics="bitwise", block_tokens=size, n_ctx=limit, kv_tokens=size * _BLOCKS) as backend:
        assert backend.info.capacity_tokens == size * _BLOCKS
        requests = _requests(limit)
        assert _run(backend, requests) > 0
        assert backend.room() == size * _BLOCKS
        if backend.info.numerics != "bitwise":
            raise AssertionError(f"the self-test found no plan: {backend.info.notes}")
        for request, fresh in zip(requests, _requests(limit), strict=True):
            assert request.done
            sequence = backend.create()
            logits = compute(backend, sequence, fresh.tokens)
            while True:
                fresh.tokens.append(int(logits.argmax()))
                if fresh.done:
                    break
                logits = compute(backend, sequence, fresh.tokens[-1:], len(fresh.tokens) - 1)
            backend.release(sequence)
            assert request.tokens == fresh.tokens
