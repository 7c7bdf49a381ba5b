"""What a device's runner does differently (one wait per step, drawn tokens, captured decode steps), on the CPU."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kitelib import KiteEngine
from kitelib.abc import OverlappingBackend, StepWork, TokenDraw
from kitelib.backends.torch_engine.backend import DeviceTorchBackend
from kitelib.backends.torch_engine.device_runner import DeviceRunner
from kitelib.backends.torch_engine.graphed import decode_graphs
from kitelib.backends.torch_engine.graphs import PlainReplay
from kitelib.backends.torch_engine.packing import RowPlan
from kitelib.errors import BackendStepError
from tests.support.answers import answer, prompt_of
from tests.support.engines import assert_nothing_left
from tests.support.torch_parts import GREEDY_DRAW, Parts, compute, device_loader, export_all, open_parts

VOCAB = 512
GREEDY = TokenDraw(**GREEDY_DRAW)
TOKENS = prompt_of(60, 3, VOCAB)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def parts(hf_model: Callable[..., Path], cache_dir: Path) -> Parts:
    return open_parts(hf_model("llama"), cache_dir)


@pytest.fixture(params=["captured", "plain"])
def runner(request: pytest.FixtureRequest, parts: Parts) -> DeviceRunner:
    """A device's runner with captured decode steps, and without."""
    rows = RowPlan(1, 64)
    runner: DeviceRunner = parts.runner(DeviceRunner, rows=rows)
    if request.param == "captured":
        runner.graphs = decode_graphs(
            parts.forward, runner.cache, runner._kernel, rows, max_rows=8, max_context=128, api=PlainReplay()
        )
        assert runner.graphs is not None
    return runner


def test_logits_and_kv_are_those_of_a_plain_runner(parts: Parts, runner: DeviceRunner) -> None:
    plain = parts.runner()
    found = []
    for each in (runner, plain):
        sequences = [each.tables.create(None) for _ in range(3)]
        rows = [compute(each, sequence, TOKENS[: 10 + place]) for place, sequence in enumerate(sequences)]
        for step in range(12):
            work = [
                StepWork(sequence, [TOKENS[20 + step + place]], 10 + place + step, True)
                for place, sequence in enumerate(sequences)
            ]
            rows += [logits.copy() for logits in each.step(work).logits if logits is not None]
        found.append((rows, [export_all(each, sequence, 22) for sequence in sequences]))
    assert len(found[0][0]) == len(found[1][0]) == 39
    for ours, theirs in zip(found[0][0], found[1][0], strict=True):
        assert np.abs(ours - theirs).max() < 1e-4
    for ours, theirs in zip(found[0][1], found[1][1], strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert np.allclose(np.frombuffer(mine, np.float32), np.frombuffer(other, np.float32), atol=1e-5)


def test_drawn_tokens_come_instead_of_logits(parts: Parts, runner: DeviceRunner) -> None:
    sequences = [runner.tables.create(None) for _ in range(3)]
    work = [
        StepWork(sequences[0], TOKENS[:9], 0, False, (GREEDY,)),
        StepWork(sequences[1], TOKENS[:8], 0, True),
        StepWork(sequences[2], TOKENS[:7], 0, False),
    ]
    result = runner.step(work)
    assert [logits is None for logits in result.logits] == [True, False, True]
    assert [len(tokens) for tokens in result.tokens] == [1, 0, 0]
    plain = parts.runner()
    for count, found in ((9, result.tokens[0][0]), (8, int(np.argmax(result.logits[1])))):
        sequence = plain.tables.create(None)
        assert found == int(compute(plain, sequence, TOKENS[:count]).argmax())
    # A decode step with both kinds.
    work = [StepWork(sequences[0], [5], 9, True), StepWork(sequences[1], [6], 8, False, (GREEDY,))]
    result = runner.step(work)
    assert result.logits[0] is not None
    assert result.logits[1] is None
    assert len(result.tokens[0]) == 0
    sequence = plain.tables.create(None)
    assert list(result.tokens[1]) == [int(compute(plain, sequence, [*TOKENS[:8], 6]).argmax())]


def test_a_step_is_counted_at_its_start_and_taken_back_if_it_fails(
    runner: DeviceRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence = runner.tables.create(None)
    wait = runner.begin([StepWork(sequence, TOKENS[:20], 0, True)])
    assert runner.tables[sequence].num_tokens == 20
    assert wait().logits[0] is not None
    kept = export_all(runner, sequence, 20)

    def fail(*_: Any) -> Any:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "run", fail)
        with pytest.raises(BackendStepError, match="the device is gone"):
            runner.begin([StepWork(sequence, TOKENS[20:30], 20, True)])
    assert runner.tables[sequence].num_tokens == 20
    with monkeypatch.context() as patch:
        patch.setattr("kitelib.backends.torch_engine.device_runner._wanted", fail)
        wait = runner.begin([StepWork(sequence, TOKENS[20:30], 20, True)])
        assert runner.tables[sequence].num_tokens == 30
        with pytest.raises(BackendStepError, match="the device is gone"):
            wait()
    assert runner.tables[sequence].num_tokens == 20
    assert export_all(runner, sequence, 20) == kept
    with pytest.raises(BackendStepError, match="position 21"):
        runner.begin([StepWork(sequence, [1], 21, True)])


# Through the engine


@pytest.fixture
def open_device(hf_model: Callable[..., Path], cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``open_device(**options)``: the engine on a `DeviceTorchBackend`."""
    monkeypatch.setattr("kitelib.backends.torch_engine.loader.TorchLoader", device_loader())
    return _opening(hf_model, cache_dir)


@pytest.fixture
def open_plain(hf_model: Callable[..., Path], cache_dir: Path) -> Callable[..., Any]:
    return _opening(hf_model, cache_dir)


def _opening(hf_model: Callable[..., Path], cache_dir: Path) -> Callable[..., Any]:
    def opening(architecture: str = "llama", **options: Any) -> Any:
        defaults: dict[str, Any] = {"n_ctx": 256, "threads": 1, "max_sequences": 6, "cache_dir": cache_dir}
        return KiteEngine.open(hf_model(architecture), **{**defaults, **options})

    return opening


CALLS: list[dict[str, Any]] = [
    {"max_tokens": 12},
    {"max_tokens": 9, "temperature": 0.8, "seed": 1},
    {"max_tokens": 9, "temperature": 1.2, "seed": 2, "top_k": 40, "n": 3},
    {"max_tokens": 9, "temperature": 1.0, "seed": 3, "top_p": 0.8, "min_p": 0.02},
    {"max_tokens": 9, "temperature": 0.7, "seed": 4, "repetition_penalty": 1.3},
    {"max_tokens": 9, "logprobs": 3},
    {"max_tokens": 9, "temperature": 0.9, "seed": 5, "logit_bias": {7: 4.0}, "presence_penalty": 0.4},
]


async def ask_everything(engine: KiteEngine) -> list[Any]:
    """Greedy and sampled, with and without what only the host can do, all at once and again one by one."""
    prompts = [[*TOKENS[:20], *prompt_of(4 + place, place, VOCAB)] for place in range(len(CALLS))]
    asked = list(zip(prompts, CALLS, strict=True))
    gens = await asyncio.gather(*(engine.generate(prompt, ignore_eos=True, **call) for prompt, call in asked))
    again = [await engine.generate(prompt, ignore_eos=True, **call) for prompt, call in asked]
    found = [[choice.token_ids for choice in gen.choices] for gen in gens]
    assert [[choice.token_ids for choice in gen.choices] for gen in again] == found
    await assert_nothing_left(engine)
    return found


@pytest.mark.parametrize("architecture", ["llama", "deepseek_v2"])
async def test_engine_answers_as_on_a_plain_backend(open_plain: Any, architecture: str) -> None:
    async with open_plain(architecture) as engine:
        assert not isinstance(engine._current.backend, OverlappingBackend)
        expected = await ask_everything(engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kitelib.backends.torch_engine.loader.TorchLoader", device_loader())
        async with open_plain(architecture) as engine:
            backend = engine._current.backend
            assert isinstance(backend, DeviceTorchBackend)
            assert isinstance(backend, OverlappingBackend)
            assert backend.info.draws_tokens
            # Latents are expanded for as many tokens as there are: no static size to capture.
            assert (backend.runner.graphs is None) == (architecture == "deepseek_v2")
            assert await ask_everything(engine) == expected


async def test_preempted_and_restored_requests_draw_the_same(open_device: Any) -> None:
    call: dict[str, Any] = {"max_tokens": 60, "temperature": 1.0, "seed": 6, "n": 4, "ignore_eos": True}
    found = []
    for kv_tokens in (256, 1024):
        async with open_device(kv_tokens=kv_tokens) as engine:
            found.append(answer(await engine.generate(TOKENS, **call)))
            assert (engine.stats()["preemptions"] > 0) == (kv_tokens == 256)
    assert found[0] == found[1]


async def test_blocks_are_saved_while_the_device_computes(open_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    begin, export = DeviceTorchBackend.begin_step, DeviceTorchBackend.export_blocks

    def begin_step(backend: Any, work: Any) -> Any:
        events.append("begin")
        wait = begin(backend, work)

        def waiting() -> Any:
            events.append("wait")
            return wait()

        return waiting

    def export_blocks(backend: Any, *args: Any) -> Any:
        events.append("export")
        return export(backend, *args)

    monkeypatch.setattr(DeviceTorchBackend, "begin_step", begin_step)
    monkeypatch.setattr(DeviceTorchBackend, "export_blocks", export_blocks)
    async with open_device() as engine:
        await engine.generate(TOKENS, max_tokens=20, ignore_eos=True)
        steps = [event for event in events if event != "export"]
        assert steps == ["begin", "wait"] * 20
        assert events[:2] == ["begin", "wait"]
        second = events[2 : events.index("wait", 2) + 1]
        assert second == ["begin", *["export"] * (len(second) - 2), "wait"]
        assert len(second) > 2  # the prompt's blocks


async def test_a_step_that_fails_on_the_device_fails_its_requests_only(
    open_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, failing = DeviceTorchBackend.begin_step, [True]

    def begin_step(backend: Any, work: Any) -> Any:
        wait = begin(backend, work)

        def waiting() -> Any:
            if failing and len(work[0].token_ids) == 33:
                backend.runner.take_back(work)
                raise BackendStepError("out of luck")
            return wait()

        return waiting

    monkeypatch.setattr(DeviceTorchBackend, "begin_step", begin_step)
    async with open_device() as engine:
        with pytest.raises(BackendStepError, match="out of luck"):
            await engine.generate(TOKENS[:33], max_tokens=3)
        assert engine.stats()["step_failures"] == 1
        failing.clear()
        assert (await engine.generate(TOKENS[:33], max_tokens=3, ignore_eos=True)).usage.completion_tokens == 3
        await assert_nothing_left(engine)
