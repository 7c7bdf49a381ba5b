"""Both backends keep the contract, for every kind of model; and the check finds each way to break it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kitelib.errors import BackendError, BackendStepError
from kitelib.testing import check_backend
from tests.support.backends import BackendKit
from tests.support.hf_folders import ARCHITECTURES


@pytest.fixture(scope="module")
def load(kit: BackendKit, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    folder = tmp_path_factory.mktemp("cache")
    options = {"n_ctx": 512, "kv_tokens": 512, "max_sequences": 4, "cache_dir": folder}
    return lambda path, **changes: kit.load(path, **{**options, **changes})


@pytest.mark.parametrize("kit", ["llama_cpp"], indirect=True)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "phi3", "gemma3", "mamba", "lfm2"])
@pytest.mark.parametrize("numerics", ["bitwise", "standard"])
def test_small_files(tiny_model: Callable[..., Path], load: Any, architecture: str, numerics: str) -> None:
    check_backend(lambda: load(tiny_model(architecture), numerics=numerics))


@pytest.mark.parametrize("kit", ["torch"], indirect=True)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("numerics", ["bitwise", "standard"])
def test_small_folders(hf_model: Callable[..., Path], load: Any, architecture: str, numerics: str) -> None:
    check_backend(lambda: load(hf_model(architecture), numerics=numerics))


@pytest.mark.parametrize("kit", ["torch"], indirect=True)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_folders_of_other_types(hf_model: Callable[..., Path], load: Any, dtype: str) -> None:
    check_backend(lambda: load(hf_model("llama", dtype=dtype)))


class Broken:
    """Passes everything on to a sound backend; subclasses break one thing."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.info = inner.info

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class OneLayoutForAll(Broken):
    def restore_blocks(self, sequence, first, payloads):
        torch = hasattr(self.inner, "runner")
        layout = self.inner.runner.layout.id if torch else self.inner._context.layout.layout_id
        self.inner.restore_blocks(sequence, first, [dataclasses.replace(each, layout=layout) for each in payloads])


class RestoresWhatComesFirst(Broken):
    def restore_blocks(self, sequence, first, payloads):
        for index, payload in enumerate(payloads):
            self.inner.restore_blocks(sequence, first + index, [payload])


class RestoresTheFirstBlockTwice(Broken):
    def restore_blocks(self, sequence, first, payloads):
        self.inner.restore_blocks(sequence, first, [payloads[0], *payloads[:-1]] if payloads else [])


class RestoresNothing(Broken):
    def restore_blocks(self, sequence, first, payloads):
        pass


class ExportsTheFirstBlocks(Broken):
    def export_blocks(self, sequence, first, count, end=None):
        return self.inner.export_blocks(sequence, 0, count, end)


class ExportsFullBlocksOnly(Broken):
    def export_blocks(self, sequence, first, count, end=None):
        found = self.inner.export_blocks(sequence, first, count, end)
        return [each for each in found if each.num_tokens == self.info.block_tokens]


class IgnoresTheEnd(Broken):
    def export_blocks(self, sequence, first, count, end=None):
        return self.inner.export_blocks(sequence, first, count)


class CutsTheEnd(Broken):
    def cut(self, payload, num_tokens):
        found = self.inner.cut(payload, num_tokens)
        return dataclasses.replace(found, data=payload.data[-len(found.data) :].copy())


class LosesABit(Broken):
    def export_blocks(self, sequence, first, count, end=None):
        found = self.inner.export_blocks(sequence, first, count, end)
        for each in found:
            each.data[-1] ^= first & 1
        return found


class ForksByCopying(Broken):
    def fork(self, source, num_tokens):
        size = self.info.block_tokens
        payloads = self.inner.export_blocks(source, 0, -(-num_tokens // size), num_tokens)
        if sum(each.num_tokens for each in payloads) < num_tokens:
            raise BackendError("not that many")
        sequence = self.inner.create()
        self.inner.restore_blocks(sequence, 0, payloads)
        return sequence


class ForksOneTooFew(Broken):
    def fork(self, source, num_tokens):
        return self.inner.fork(source, max(0, num_tokens - 1))


class SharesAnything(Broken):
    def shareable(self, source, num_tokens):
        return True


class KeepsWhatIsReleased(Broken):
    def release(self, sequence):
        pass


class SwapsLogits(Broken):
    def step(self, work):
        result = self.inner.step(work)
        return dataclasses.replace(result, logits=result.logits[::-1])


class AlwaysGivesLogits(Broken):
    def step(self, work):
        return self.inner.step([dataclasses.replace(item, logits=True) for item in work])


class StartsAnywhere(Broken):
    def step(self, work):
        return self.inner.step([dataclasses.replace(item, start=self._held(item.sequence)) for item in work])

    def _held(self, sequence):
        if hasattr(self.inner, "runner"):
            return self.inner.runner.tables[sequence].num_tokens
        return self.inner._context.num_tokens(sequence)


class StepsBeforeItFails(Broken):
    def step(self, work):
        item = work[0]
        if item.token_ids[-1] >= self.info.vocab_size:
            self.inner.step([dataclasses.replace(item, token_ids=[1])])
            raise BackendStepError("an unknown token id")
        return self.inner.step(work)


class DependsOnTheCompany(Broken):
    def step(self, work):
        result = self.inner.step(work)
        for logits in result.logits:
            if logits is not None and len(work) > 1:
                logits[3] = np.nextafter(logits[3], np.float32(np.inf))
        return result


class DependsOnThePiece(Broken):
    def step(self, work):
        result = self.inner.step(work)
        for item, logits in zip(work, result.logits, strict=True):
            if logits is not None and len(item.token_ids) < self.info.block_tokens // 2:
                logits[3] = np.nextafter(logits[3], np.float32(np.inf))
        return result


class NeverFull(Broken):
    def room(self, sequence=None, beside=(), *, shared=0):
        return self.info.capacity_tokens


class AbstractOnly(Broken):
    def __getattr__(self, name: str) -> Any:
        if name == "free_sequences":
            raise AttributeError(name)
        return super().__getattr__(name)


@pytest.mark.parametrize(
    ("kind", "promise"),
    [
        (OneLayoutForAll, "another layout"),
        (RestoresWhatComesFirst, "a restore that failed"),
        (RestoresTheFirstBlockTwice, "byte for byte as they went in"),
        (RestoresNothing, "fall by at least the tokens restored"),
        (ExportsTheFirstBlocks, "start at the block it is asked for"),
        (ExportsFullBlocksOnly, "full blocks, then the rest"),
        (IgnoresTheEnd, "cut the last block"),
        (CutsTheEnd, "cut must give"),
        (LosesABit, "start at the block it is asked for"),
        (ForksByCopying, "must not copy"),
        (ForksOneTooFew, "fork"),
        (SharesAnything, "can't be shareable"),
        (KeepsWhatIsReleased, "room must come back"),
        (SwapsLogits, "nobody asked for"),
        (AlwaysGivesLogits, "nobody asked for"),
        (StartsAnywhere, "does not start where its sequence ends"),
        (StepsBeforeItFails, "must not take room"),
        (DependsOnThePiece, "cut into steps"),
        (DependsOnTheCompany, "what else is in the step"),
        (NeverFull, "must fall by at least the tokens"),
        (AbstractOnly, "all methods"),
    ],
)
def test_each_broken_promise_is_found(kit: BackendKit, load: Any, kind: type[Broken], promise: str) -> None:
    with pytest.raises((AssertionError, BackendStepError), match=promise) as caught:
        check_backend(lambda: kind(load(kit.small())))  # type: ignore[arg-type,return-value]
    assert caught.type is AssertionError


def test_the_backend_is_closed_even_if_a_promise_is_broken(kit: BackendKit, load: Any) -> None:
    backend = load(kit.small())
    with pytest.raises(AssertionError):
        check_backend(lambda: NeverFull(backend))  # type: ignore[arg-type,return-value]
    assert (backend._runner if kit.name == "torch" else backend._context._handle) is None
