"""Decode steps through CUDA graphs give what the same steps give without, and tokens drawn on the device."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from kitelib.abc import SequenceId, StepResult, StepWork, TokenDraw
from kitelib.backends.torch_engine.backend import TorchBackend
from kitelib.backends.torch_engine.device_runner import DeviceRunner
from kitelib.backends.torch_engine.device_sampling import (
    NUM_SETTINGS,
    DeviceSampling,
    SamplingMode,
    pack_draws,
    sample_rows,
)
from kitelib.backends.torch_engine.graphed import decode_graphs
from kitelib.backends.torch_engine.graphs import CudaGraphs, GraphApi, PlainReplay
from tests.gpu.rig import GREEDY, device, load, model_folder, on_gpu, prompt


def _runner(backend: TorchBackend, api: GraphApi | None, most: int = 12) -> DeviceRunner:
    """A runner of the backend's model with graphs of its own, or without any."""
    parts = backend.runner
    runner = DeviceRunner(parts._forward, parts.cache, parts._kernel, parts._rows, 64)
    if api is not None:
        runner.graphs = decode_graphs(
            parts._forward, parts.cache, parts._kernel, parts._rows, max_rows=most, max_context=512, api=api
        )
        assert runner.graphs is not None
        runner.graphs.warm()
    return runner


def _start(runner: DeviceRunner, tokens: list[int]) -> SequenceId:
    sequence = runner.tables.create(None)
    most = runner._rows.max_rows
    for first in range(0, len(tokens), most):
        runner.step([StepWork(sequence, tokens[first : first + most], first, False)])
    return sequence


def _step(
    runner: DeviceRunner, sequences: list[SequenceId], tokens: list[int], draw: TokenDraw | None = GREEDY
) -> StepResult:
    """One decode step of all sequences."""
    return runner.step(
        [
            StepWork(each, [token], runner.tables[each].num_tokens, draw is None, () if draw is None else (draw,))
            for each, token in zip(sequences, tokens, strict=True)
        ]
    )


def _tokens(result: StepResult) -> list[int]:
    return [token for (token,) in result.tokens]


def _api() -> GraphApi:
    return CudaGraphs(device()) if on_gpu() else PlainReplay()


def test_graphs_and_plain_calls_give_the_same_bytes() -> None:
    """For several sizes of batch and growing contexts, in both numerics; the KV written, too."""
    for numerics in ("standard", "bitwise"):
        with load(model_folder(), numerics=numerics) as backend:
            found = []
            for api in (_api(), PlainReplay()):
                runner = _runner(backend, api)
                everything: list[object] = []
                for count in (1, 3, 12, 2):
                    sequences = [_start(runner, prompt(5 + 30 * index, seed=index)) for index in range(count)]
                    tokens = [7] * count
                    for _ in range(5):
                        tokens = _tokens(_step(runner, sequences, tokens))
                        everything.append(tokens)
                    logits = _step(runner, sequences, tokens, None).logits
                    everything.extend(row.tobytes() for row in logits if row is not None)
                    held = runner.tables[sequences[-1]].num_tokens
                    blocks = -(-held // backend.info.block_tokens)
                    everything.extend(each.data.tobytes() for each in runner.export(sequences[-1], 0, blocks, held))
                    for sequence in sequences:
                        runner.tables.release(sequence)
                found.append(everything)
            assert found[0] == found[1], numerics


def test_bitwise_graphs_give_the_bytes_of_ordinary_steps() -> None:
    """Whether a decode step went through a graph must not show in bitwise mode."""
    with load(model_folder(), numerics="bitwise") as backend:
        assert backend.info.numerics == "bitwise", f"the self-test found no plan: {backend.info.notes}"
        graphed, plain = _runner(backend, _api()), _runner(backend, None)
        found = []
        for runner, count in ((graphed, 3), (plain, 1), (plain, 5)):
            sequences = [_start(runner, prompt(50)) for _ in range(count)]
            rows = _step(runner, sequences, [9] * count, None).logits
            found.extend(row.tobytes() for row in rows if row is not None)
            for sequence in sequences:
                runner.tables.release(sequence)
        assert len(found) == 9
        assert len(set(found)) == 1


def test_sequences_come_and_go_between_steps() -> None:
    """Released blocks are used again at once; what graphs read must follow."""
    with load(model_folder(), numerics="standard") as backend:
        runner = _runner(backend, _api(), most=4)
        wanted = None
        for round_number in range(4):
            others = [_start(runner, prompt(33, seed=round_number)) for _ in range(round_number)]
            sequence, tokens, out = _start(runner, prompt(45)), [5], []
            for _ in range(6):
                tokens = _tokens(_step(runner, [sequence], tokens))
                out.extend(tokens)
            wanted = wanted or out
            assert out == wanted
            for each in (sequence, *others):
                runner.tables.release(each)


def test_tokens_drawn_are_those_of_the_logits() -> None:
    """In a graph and without one, greedy and drawn rows beside rows whose logits are wanted."""
    draws = [GREEDY, TokenDraw(0.9, 0, 1.0, 0.0, 0.3), TokenDraw(1.0, 7, 0.9, 0.0, 0.8), None]
    with load(model_folder(), numerics="standard") as backend:
        for api in (_api(), None):
            runner = _runner(backend, api)
            for together in ([0, 1, 2], [0], [0, 1, 2, 3]):
                sequences = [_start(runner, prompt(20 + each, seed=each)) for each in together]
                chosen = [draws[each] for each in together]
                work = [
                    StepWork(sequence, [11], 20 + each, draw is None, () if draw is None else (draw,))
                    for sequence, each, draw in zip(sequences, together, chosen, strict=True)
                ]
                result = runner.step(work)
                for sequence in sequences:
                    runner.tables.shrink(sequence, runner.tables[sequence].num_tokens - 1)
                again = _step(runner, sequences, [11] * len(together), None).logits
                logits = torch.from_numpy(np.stack([row for row in again if row is not None]))
                packed = torch.empty((NUM_SETTINGS, len(chosen)), dtype=torch.float64)
                mode = pack_draws(chosen, packed)
                expected = sample_rows(logits, DeviceSampling.from_packed(packed), mode).tolist()
                for place, draw in enumerate(chosen):
                    if draw is None:
                        assert len(result.tokens[place]) == 0
                        assert np.array_equal(result.logits[place], logits[place].numpy())
                    else:
                        assert result.logits[place] is None
                        assert list(result.tokens[place]) == [expected[place]]
                for sequence in sequences:
                    runner.tables.release(sequence)


def _verify(
    runner: DeviceRunner, sequences: list[SequenceId], tokens: list[int], draw: TokenDraw | None = None
) -> list[Any]:
    """One step in which all but the first of `tokens` are drafts of every sequence; taken back afterwards. Per sequence
    the logits (tokens, vocabulary), or the tokens drawn."""
    held = [runner.tables[each].num_tokens for each in sequences]
    drafts = len(tokens) - 1
    draws = () if draw is None else (draw,) * len(tokens)
    work = [
        StepWork(each, tokens, start, draw is None, draws, drafts) for each, start in zip(sequences, held, strict=True)
    ]
    result = runner.step(work)
    found: list[Any] = []
    for place in range(len(sequences)):
        last = result.logits[place]
        if draw is not None:
            found.append(list(result.tokens[place]))
        elif last is not None:
            found.append(np.stack([*result.draft_logits[place], last]))
    for each, start in zip(sequences, held, strict=True):
        runner.truncate(each, start)
    return found


def test_verified_drafts_are_what_decoding_gives() -> None:
    """Through graphs, without, and one by one: the same bytes in bitwise mode, else the same up to rounding."""
    tokens = prompt(6, seed=40)
    for numerics in ("standard", "bitwise"):
        with load(model_folder(), numerics=numerics) as backend:
            graphed, plain = _runner(backend, _api(), most=32), _runner(backend, None)
            rows = []
            for runner, count in ((graphed, 1), (graphed, 4), (plain, 1), (plain, 3)):
                sequences = [_start(runner, prompt(300 + each, seed=each)) for each in range(count)]
                rows.append(_verify(runner, sequences, tokens)[0])
                drawn = _verify(runner, sequences, tokens, GREEDY)
                assert drawn[0] == rows[-1].argmax(-1).tolist()
                for sequence in sequences:
                    runner.tables.release(sequence)
            alone = _start(plain, prompt(300))
            one_by_one = np.concatenate([_step(plain, [alone], [token], None).logits for token in tokens])
            rows.append(one_by_one.reshape(len(tokens), -1))
            for each in rows[:-1]:
                if numerics == "bitwise":
                    assert each.tobytes() == rows[-1].tobytes()
                else:
                    assert np.abs(each - rows[-1]).max() < 0.2  # bfloat16, logits of some 10


def test_decoding_goes_on_after_wrong_drafts() -> None:
    """What is taken back leaves no trace, in graphs or without."""
    with load(model_folder(), numerics="standard") as backend:
        for api in (_api(), None):
            found = []
            for wrong in (0, 5):
                runner = _runner(backend, api, most=32)
                sequence, tokens, out = _start(runner, prompt(61)), [5], []
                for _ in range(8):
                    if wrong:
                        _verify(runner, [sequence], [*tokens, *prompt(wrong, seed=wrong)], GREEDY)
                    tokens = _tokens(_step(runner, [sequence], tokens))
                    out.extend(tokens)
                found.append(out)
            assert found[0] == found[1]


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
