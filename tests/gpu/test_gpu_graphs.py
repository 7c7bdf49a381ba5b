"""Decode steps through CUDA graphs give what the same steps give without, and tokens drawn on the device."""

from __future__ import annotations

import math

import numpy as np
import torch

from kitelib.abc import SequenceId, StepWork, TokenDraw
from kitelib.backends.torch_engine.backend import TorchBackend
from kitelib.backends.torch_engine.device_sampling import (
    NUM_SETTINGS,
    DeviceSampling,
    SamplingMode,
    pack_draws,
    sample_rows,
)
from kitelib.backends.torch_engine.graphed import decode_batch, decode_graphs
from kitelib.backends.torch_engine.graphs import CudaGraphs, DecodeGraphs, GraphApi, PlainReplay
from tests.gpu.rig import GREEDY, compute, device, export_all, load, model_folder, on_gpu, prompt


def _graphs(backend: TorchBackend, api: GraphApi, most: int = 12) -> DecodeGraphs:
    runner = backend.runner
    graphs = decode_graphs(
        runner._forward, runner._cache, runner._kernel, runner._rows, max_sequences=most, max_context=512, api=api
    )
    assert graphs is not None
    return graphs


def _step(
    backend: TorchBackend, graphs: DecodeGraphs, sequences: list[SequenceId], tokens: list[int], draw: TokenDraw | None
) -> tuple[list[int], np.ndarray]:
    """One decode step of all sequences: tokens and logits."""
    work = [
        StepWork(each, [token], backend.runner.tables[each].num_tokens, draw is None, draw)
        for each, token in zip(sequences, tokens, strict=True)
    ]
    packed = backend.runner.admit(work)
    step = graphs.run(decode_batch(packed, [draw] * len(work)))
    return step.tokens(), step.logits.float().cpu().numpy().copy()


def test_graphs_and_plain_calls_give_the_same_bytes() -> None:
    """For several sizes of batch and growing contexts, in both numerics; the KV written, too."""
    api: GraphApi = CudaGraphs(device()) if on_gpu() else PlainReplay()
    for numerics in ("standard", "bitwise"):
        with load(model_folder(), numerics=numerics) as backend:
            found = {}
            for name, each in (("graphs", api), ("plain", PlainReplay())):
                graphs = _graphs(backend, each)
                if name == "graphs":
                    graphs.warm()
                everything = []
                for count in (1, 3, 12, 2):
                    sequences = [backend.create() for _ in range(count)]
                    for index, sequence in enumerate(sequences):
                        compute(backend, sequence, prompt(5 + 30 * index, seed=index))
                    tokens = [7] * count
                    for _ in range(5):
                        tokens, logits = _step(backend, graphs, sequences, tokens, GREEDY)
                        everything.append((tokens, logits.tobytes()))
                    length = backend.runner.tables[sequences[-1]].num_tokens
                    everything.extend(each.data.tobytes() for each in export_all(backend, sequences[-1], length))
                    for sequence in sequences:
                        backend.release(sequence)
                found[name] = everything
            assert found["graphs"] == found["plain"], numerics


def test_bitwise_graphs_give_the_bytes_of_ordinary_steps() -> None:
    """Whether a decode step went through a graph must not show in bitwise mode."""
    with load(model_folder(), numerics="bitwise") as backend:
        assert backend.info.numerics == "bitwise", f"the self-test found no plan: {backend.info.notes}"
        graphs = _graphs(backend, CudaGraphs(device()) if on_gpu() else PlainReplay())
        sequences = [backend.create() for _ in range(3)]
        for sequence in sequences:
            compute(backend, sequence, prompt(50))
        _, logits = _step(backend, graphs, sequences, [9, 9, 10], None)
        other = backend.create()
        compute(backend, other, prompt(50))
        assert compute(backend, other, [9], 50).tobytes() == logits[0].tobytes() == logits[1].tobytes()


def test_sequences_come_and_go_between_steps() -> None:
    """Released blocks are used again at once; what graphs read must follow."""
    with load(model_folder(), numerics="standard") as backend:
        graphs = _graphs(backend, CudaGraphs(device()) if on_gpu() else PlainReplay(), most=4)
        wanted = None
        for round_number in range(4):
            others = [backend.create() for _ in range(round_number)]
            for other in others:
                compute(backend, other, prompt(33, seed=round_number))
            sequence = backend.create()
            compute(backend, sequence, prompt(45))
            tokens = [5]
            out = []
            for _ in range(6):
                tokens, _ = _step(backend, graphs, [sequence], tokens, GREEDY)
                out.extend(tokens)
            wanted = wanted or out
            assert out == wanted
            for each in (sequence, *others):
                backend.release(each)


def test_draws_on_the_device_are_those_on_the_cpu() -> None:
    """Weights are summed as whole numbers, so both agree; ties, unusable rows and a large vocabulary included."""
    size = 128_256 if on_gpu() else 9000
    random = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        logits = (torch.randn((24, size), generator=random) * 3).to(dtype)
        logits[3] = (torch.arange(size) % 7).to(dtype)
        logits[4, 100] = math.nan
        uniforms = torch.rand(24, generator=random, dtype=torch.float64).tolist()
        options = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.8, 50, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (1.5, 9, 0.8, 0.05)]
        draws = [TokenDraw(*options[row % 5], uniforms[row]) for row in range(24)]
        packed = torch.empty((NUM_SETTINGS, 24), dtype=torch.float64)
        assert pack_draws(draws, packed) is SamplingMode.RANK
        wanted = sample_rows(logits, DeviceSampling.from_packed(packed)).tolist()
        assert wanted[4] == -1
        there, settings = logits.to(device()), DeviceSampling.from_packed(packed.to(device()))
        assert sample_rows(there, settings).tolist() == wanted
        assert sample_rows(there, settings, SamplingMode.GREEDY).tolist()[5] == int(logits[5].argmax())
        target = torch.zeros(24, dtype=torch.int64, device=there.device)
        api: GraphApi = CudaGraphs(device()) if on_gpu() else PlainReplay()
        replay = api.capture(lambda: target.copy_(sample_rows(there, settings)))  # noqa: B023 - called in this turn
        target.zero_()
        replay()
        assert target.tolist() == wanted


def test_greedy_ties_take_the_lowest_id() -> None:
    """In rows of any length and type."""
    for size in (5, 1000, 32_000, 128_256 if on_gpu() else 9000):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            logits = torch.randint(0, 3, (64, size), generator=torch.Generator().manual_seed(size)).to(dtype)
            settings = DeviceSampling.from_packed(torch.zeros((NUM_SETTINGS, 64), dtype=torch.float64, device=device()))
            wanted = [row.tolist().index(max(row.tolist())) for row in logits]
            assert sample_rows(logits.to(device()), settings, SamplingMode.GREEDY).tolist() == wanted
