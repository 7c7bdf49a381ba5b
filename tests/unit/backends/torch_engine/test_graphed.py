"""Decode steps through `DecodeGraphs` on the CPU, and whether models' code can be captured at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kitelib.abc import SequenceId, StepWork, TokenDraw
from kitelib.backends.torch_engine.attention import ATTENTION, register_attention
from kitelib.backends.torch_engine.device_runner import DeviceRunner
from kitelib.backends.torch_engine.forward import Forward, probe_layers
from kitelib.backends.torch_engine.graphed import capture, decode_batch, decode_graphs
from kitelib.backends.torch_engine.graphs import DecodeGraphs
from kitelib.backends.torch_engine.kernels.gathered import GatheredAttention
from kitelib.backends.torch_engine.packing import RowPlan
from kitelib.backends.torch_engine.pages import LayerShape, PagedCache
from kitelib.backends.torch_engine.plan import StepPlan, StepState, use_step
from tests.support.hf_folders import ARCHITECTURES, write_model

_GREEDY = TokenDraw(0.0, 0, 1.0, 0.0, 0.0)


def _parts(tmp_path: Path, architecture: str, rows: RowPlan) -> tuple[DeviceRunner, DecodeGraphs | None]:
    from transformers import AutoModelForCausalLM

    register_attention()
    folder = write_model(tmp_path, architecture)
    model = AutoModelForCausalLM.from_pretrained(str(folder), attn_implementation=ATTENTION).eval()
    model.requires_grad_(False)
    layers = probe_layers(model, architecture)
    forward = Forward(model, latent=any(layer.latent for layer in layers))
    cache, kernel = PagedCache(layers, 60, 8, torch.float32, "cpu"), GatheredAttention()
    graphs = decode_graphs(forward, cache, kernel, rows, max_rows=6, max_context=80)
    return DeviceRunner(forward, cache, kernel, rows, 20), graphs


def _start(runner: DeviceRunner, length: int) -> SequenceId:
    sequence = runner.tables.create(None)
    runner.step([StepWork(sequence, [(5 * i + length) % 300 + 3 for i in range(length)], 0, False)])
    return sequence


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_steps_through_graphs_are_the_runners_steps(architecture: str, tmp_path: Path) -> None:
    """The same logits, the same KV, and tokens drawn from those logits; padding of a row plan included."""
    runner, graphs = _parts(tmp_path, architecture, RowPlan(3, 64, 3))
    assert graphs is not None
    assert graphs.max_rows == 6
    lengths = [1, 8, 33, 60]
    sequences = [_start(runner, length) for length in lengths]
    twins = [runner.tables.fork(sequence, length) for sequence, length in zip(sequences, lengths, strict=True)]
    for step in range(4):
        work = [StepWork(each, [17 + step], length + step, True) for each, length in zip(twins, lengths, strict=True)]
        expected = np.stack([row for row in runner.step(work).logits if row is not None])
        work = [
            StepWork(each, [17 + step], length + step, False, (_GREEDY,))
            for each, length in zip(sequences, lengths, strict=True)
        ]
        packed = runner.admit(work)
        assert packed.is_decode
        result = graphs.run(decode_batch(packed, [_GREEDY] * 4))
        assert np.abs(result.logits.numpy() - expected).max() < 1e-4
        assert result.tokens() == expected.argmax(-1).tolist()
    for sequence, twin, length in zip(sequences, twins, lengths, strict=True):
        for ours, theirs in zip(
            runner.export(sequence, 0, 10, length + 4), runner.export(twin, 0, 10, length + 4), strict=True
        ):
            assert np.allclose(ours.data.view(np.float32), theirs.data.view(np.float32), atol=1e-4)


def test_latent_attention_has_no_graphs(tmp_path: Path) -> None:
    """What it expands in a step has no static size."""
    _, graphs = _parts(tmp_path, "deepseek_v3", RowPlan(1, 64))
    assert graphs is None


def test_a_model_that_waits_for_the_device_is_not_captured(tmp_path: Path) -> None:
    """The reason becomes a note, and loading goes on."""
    _, graphs = _parts(tmp_path, "llama", RowPlan(1, 64))
    assert graphs is not None
    assert capture(graphs) == ""

    def fail(*_: Any) -> torch.Tensor:
        raise RuntimeError("operation not permitted when stream is capturing\nmore about it")

    graphs = DecodeGraphs(
        fail,
        max_blocks=4,
        max_context=32,
        vocab_size=10,
        logits_dtype=torch.float32,
        device=torch.device("cpu"),
        api=_CallsAtOnce(),
        buckets=(1,),
    )
    note = capture(graphs)
    assert note.endswith("operation not permitted when stream is capturing")


class _CallsAtOnce:
    """Captures as CUDA does: by running the function."""

    def __getattr__(self, name: str) -> Any:
        from kitelib.backends.torch_engine.graphs import PlainReplay

        return getattr(PlainReplay(), name)

    def capture(self, function: Any) -> Any:
        function()
        return function


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if not name.startswith("deepseek")])
def test_the_models_code_never_asks_for_values(architecture: str) -> None:
    """Run with tensors that have no values: whatever would wait for a device, and so can't be captured, fails."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.support.hf_folders import _COMMON, _SETTINGS

    register_attention()
    config = AutoConfig.for_model(architecture, **{**_COMMON, **_SETTINGS[architecture]})
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION).eval()
        heads, dim = 2, 32
        cache = PagedCache(
            [LayerShape(heads, dim, heads, dim)] * config.num_hidden_layers, 4, 16, torch.bfloat16, "cpu"
        )
        numbers = torch.zeros(5, dtype=torch.int32)
        plan = StepPlan(4, 4, 1, 64, numbers, numbers[:4], numbers[None], numbers[:4].long(), numbers[:4].long())
        ids = torch.zeros((1, 4), dtype=torch.int64)
        with use_step(StepState(plan, cache, GatheredAttention())):
            logits = Forward(model, latent=False).logits(ids, ids, torch.arange(4))
        assert logits.shape == (4, 512)
