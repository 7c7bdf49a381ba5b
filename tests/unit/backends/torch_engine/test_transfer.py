"""Blocks leave the cache as units' bytes and come back, on the CPU and through the staging that GPUs use."""

import contextlib

import numpy as np
import pytest

from kitelib.backends.torch_engine import transfer as transfer_module
from kitelib.backends.torch_engine.pages import LayerShape, PagedCache
from kitelib.backends.torch_engine.staging import StagedTransfer
from kitelib.backends.torch_engine.transfer import BlockTransfer
from kitelib.errors import BackendError

torch = pytest.importorskip("torch")

UNIFORM = [LayerShape(2, 16, 2, 16)] * 3
MIXED = [LayerShape(2, 16, 2, 16), LayerShape(1, 24, 1, 8), LayerShape(4, 16, 4, 16)]
LATENT = [LayerShape(1, 40, 1, 8, latent=True)] * 10
KEYS_ONLY = [LayerShape(1, 16, 1, 0)] * 2
BLOCKS, COUNTS = [6, 0, 3, 8], [16, 16, 16, 5]


class TestLane:
    """Work is done at once, but what is not waited for counts as not there yet."""

    __test__ = False

    def __init__(self):
        self.calls = []

    def host_bytes(self, num_bytes):
        return torch.full((num_bytes,), 0xEE, dtype=torch.uint8)

    def device_bytes(self, num_bytes):
        return torch.full((num_bytes,), 0xDD, dtype=torch.uint8)

    @contextlib.contextmanager
    def work(self):
        self.calls.append("work")
        yield
        self.calls.append("end")

    def mark(self):
        self.calls.append("mark")
        return len(self.calls)

    def wait(self, mark):
        self.calls.append(("wait", mark))

    def sync(self, mark):
        self.calls.append(("sync", mark))


def _cache(layers, dtype=torch.bfloat16, seed=3):
    cache = PagedCache(layers, 9, 16, dtype, "cpu")
    generator = torch.Generator().manual_seed(seed)
    cache.arena.copy_(torch.randn(cache.arena.shape, generator=generator))
    return cache


def _expected(cache, block, tokens):
    parts = [part[:tokens].contiguous().view(torch.uint8).reshape(-1) for part in cache.segments(block)]
    return torch.cat(parts).numpy()


def _transfers(cache, monkeypatch):
    """The CPU's way for few bytes, the one for many, and the GPU's with big and with small buffers."""
    plain, shared = BlockTransfer(cache), BlockTransfer(cache)
    monkeypatch.setattr(shared, "_runs_shared", lambda blocks: shared._library is not None)
    shared._threads = lambda: 2
    return [plain, shared, StagedTransfer(cache, TestLane()), StagedTransfer(cache, TestLane(), slot_bytes=1)]


def _restore(transfer, blocks, payloads, counts):
    if isinstance(transfer, StagedTransfer):
        transfer.restore(blocks, payloads, counts)
    else:
        transfer.restore(blocks, payloads)


@pytest.mark.parametrize("layers", [UNIFORM, MIXED, LATENT, KEYS_ONLY], ids=["uniform", "mixed", "latent", "keys"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_leave_as_the_bytes_of_units_and_come_back(layers, dtype, monkeypatch):
    cache = _cache(layers, dtype)
    for place, transfer in enumerate(_transfers(cache, monkeypatch)):
        payloads = transfer.export(BLOCKS, COUNTS)
        for block, count, payload in zip(BLOCKS, COUNTS, payloads, strict=True):
            assert payload.tobytes() == _expected(cache, block, count).tobytes()
            assert payload.flags.c_contiguous
            assert payload.flags.owndata or payload.base is not cache.arena
        before = cache.arena.clone()
        payloads[0][:] = 0  # a payload is not a view of the cache
        assert torch.equal(cache.arena, before)
        target = _cache(layers, dtype, seed=4)
        other = target.arena.clone()
        counterpart = _transfers(target, monkeypatch)[place]
        payloads = transfer.export(BLOCKS, COUNTS)
        for payload in payloads:
            payload.flags.writeable = False
        _restore(counterpart, [1, 2, 5, 7], payloads, COUNTS)
        for block, count, payload in zip([1, 2, 5, 7], COUNTS, payloads, strict=True):
            assert _expected(target, block, count).tobytes() == payload.tobytes()
        for block in (0, 3, 4, 6, 8):
            assert torch.equal(target.arena[block], other[block])
        rest = [part[5:] for part in target.segments(7)]
        kept = PagedCache(layers, 9, 16, dtype, "cpu")
        kept.arena.copy_(other)
        assert all(torch.equal(*pair) for pair in zip(rest, [part[5:] for part in kept.segments(7)], strict=True))


def test_a_block_of_one_segment_is_copied_out_too():
    cache = _cache([LayerShape(1, 16, 1, 16)])
    transfer = BlockTransfer(cache)
    for tokens in (4, 16):
        (payload,) = transfer.export([2], [tokens])
        payload[:] = 1
        assert _expected(cache, 2, tokens).tobytes() != payload.tobytes()


def test_nothing_to_copy_is_fine():
    transfer = BlockTransfer(_cache(UNIFORM))
    assert transfer.export([], []) == []
    transfer.restore([], [])
    transfer.wait_layer(0)
    transfer.wait()


def test_bad_arguments_are_refused_and_nothing_is_written():
    cache = _cache(UNIFORM)
    transfer, before = BlockTransfer(cache), cache.arena.clone()
    good = transfer.export([0], [16])[0] + np.uint8(1)
    for blocks, counts, words in (
        ([9], [16], "block 9"),
        ([-1], [16], "block -1"),
        ([0], [17], "17 tokens"),
        ([0], [0], "0 tokens"),
    ):
        with pytest.raises(BackendError, match=words):
            transfer.export(blocks, counts)
    with pytest.raises(BackendError, match="1 blocks and 2 payloads"):
        transfer.export([0], [1, 2])
    for blocks, payloads, words in (
        ([1, 9], [good, good], "block 9"),
        ([1, 1], [good, good], "twice"),
        ([1, 2], [good, good[:-1]], "no row of tokens"),
        ([1, 2], [good, good[::2]], "no row of tokens"),
        ([1, 2], [good, good.view(np.int8)], "no row of tokens"),
        ([1, 2], [good, good[:0]], "0 tokens"),
        ([1, 2], [good, np.concatenate([good, good])], "32 tokens"),
        ([1], [good, good], "1 blocks and 2"),
    ):
        with pytest.raises(BackendError, match=words):
            transfer.restore(blocks, payloads)
        assert torch.equal(cache.arena, before)


def test_many_bytes_are_shared_between_threads(monkeypatch):
    cache = _cache(UNIFORM)
    transfer = BlockTransfer(cache)
    transfer._threads = lambda: 2
    assert not transfer._runs_shared([1])
    monkeypatch.setattr(transfer_module, "_SHARED_BYTES", 1)
    assert transfer._runs_shared([1]) == (transfer._library is not None)
    transfer._threads = lambda: 1
    assert not transfer._runs_shared([1])


def test_each_layer_is_waited_for_by_its_own_mark_and_only_once():
    cache = _cache(LATENT)
    lane = TestLane()
    transfer = StagedTransfer(cache, lane)
    payloads = transfer.export(BLOCKS, COUNTS)
    lane.calls.clear()
    transfer.restore(BLOCKS, payloads, COUNTS)
    assert lane.calls.count("mark") == 8
    assert not [call for call in lane.calls if call[0] == "wait"]
    marks = []
    for layer in range(10):
        transfer.wait_layer(layer)
        transfer.wait_layer(layer)
        marks.append(lane.calls[-1][1])
    assert marks == sorted(marks)
    assert len(set(marks)) == 8
    assert len([call for call in lane.calls if call[0] == "wait"]) == 10
    transfer.wait()
    assert lane.calls[-1] == ("wait", marks[-1])


def test_one_wait_covers_all_layers():
    lane = TestLane()
    transfer = StagedTransfer(_cache(LATENT), lane)
    transfer.restore(BLOCKS, transfer.export(BLOCKS, COUNTS), COUNTS)
    last = max(place for place, call in enumerate(lane.calls) if call == "mark") + 1
    transfer.wait()
    assert lane.calls[-1] == ("wait", last)
    transfer.wait_layer(0)
    transfer.wait()
    assert [call for call in lane.calls if call[0] == "wait"] == [("wait", last)]


def test_a_buffer_is_not_filled_again_before_its_copies_are_done():
    cache = _cache(UNIFORM)
    lane = TestLane()
    transfer = StagedTransfer(cache, lane, slot_bytes=1)  # a block in each
    payloads = transfer.export(list(range(9)), [16] * 9)
    assert [payload.tobytes() for payload in payloads] == [_expected(cache, block, 16).tobytes() for block in range(9)]
    first = [call for call in lane.calls if call in {"work", "mark"} or call[0] == "sync"]
    # Block 0 is waited for only once block 1 is on its way.
    assert [call if isinstance(call, str) else call[0] for call in first[:6]] == [
        *("work", "mark", "work", "mark", "sync", "work")
    ]
    lane.calls.clear()
    transfer.restore(list(range(9)), payloads, [16] * 9)
    marks = [place + 1 for place, call in enumerate(lane.calls) if call == "mark"]
    synced = [call[1] for call in lane.calls if call[0] == "sync"]
    assert synced == marks[: len(marks) - 3]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("layers", [UNIFORM, MIXED, LATENT, [LayerShape(8, 128, 8, 128)] * 8])
def test_blocks_leave_a_gpu_and_come_back_layer_by_layer(layers):
    cache = _cache(layers)
    there = PagedCache(layers, 9, 16, torch.bfloat16, "cuda")
    there.arena.copy_(cache.arena)
    transfer = BlockTransfer(there)
    payloads = transfer.export(BLOCKS, COUNTS)
    for block, count, payload in zip(BLOCKS, COUNTS, payloads, strict=True):
        assert payload.tobytes() == _expected(cache, block, count).tobytes()
    there.arena.zero_()
    transfer.restore(BLOCKS, payloads)
    for layer in range(len(layers)):
        transfer.wait_layer(layer)
        for block, count in zip(BLOCKS, COUNTS, strict=True):
            assert torch.equal(there.keys(layer)[block, :count].cpu(), cache.keys(layer)[block, :count])
            assert torch.equal(there.values(layer)[block, :count].cpu(), cache.values(layer)[block, :count])
