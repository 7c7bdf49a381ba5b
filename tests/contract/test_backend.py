"""Both backends keep the contract, for every kind of model; and the check finds each way to break it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kitelib.abc import StepWork
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


class ShiftsDraftLogits(Broken):
    def step(self, work):
        result = self.inner.step(work)
        rows = [[*before, last][1:] if before else before for before, last in self._rows(result)]
        return dataclasses.replace(result, draft_logits=rows)

    @staticmethod
    def _rows(result):
        return zip(result.draft_logits, result.logits, strict=True) if result.draft_logits else ()


class GivesNoDraftLogits(Broken):
    def step(self, work):
        return dataclasses.replace(self.inner.step(work), draft_logits=())


class AlwaysGivesDraftLogits(Broken):
    def step(self, work):
        result = self.inner.step(work)
        return dataclasses.replace(result, draft_logits=result.draft_logits or [[] for _ in work])


class DraftsDependOnTheCompany(Broken):
    def step(self, work):
        result = self.inner.step(work)
        for rows in result.draft_logits if len(work) == 3 else ():
            for row in rows:
                row[3] = np.nextafter(row[3], np.float32(np.inf))
        return result


class DraftsChangeTheirNeighbours(Broken):
    def step(self, work):
        result = self.inner.step(work)
        for item, logits in zip(work, result.logits, strict=True):
            if logits is not None and not item.drafts and result.draft_logits:
                logits[3] = np.nextafter(logits[3], np.float32(np.inf))
        return result


class KeepsWhatIsTakenBack(Broken):
    """Counts the tokens as gone, and attends to them all the same: takes the next ones for the old ones."""

    def __init__(self, inner):
        super().__init__(inner)
        self.wrong = {}

    def step(self, work):
        self.held = {item.sequence: [*item.token_ids][1:] for item in work if item.drafts}
        swapped = []
        for item in work:
            kept = self.wrong.pop(item.sequence, [])[: len(item.token_ids)]
            swapped.append(dataclasses.replace(item, token_ids=[*kept, *item.token_ids[len(kept) :]]))
        return self.inner.step(swapped)

    def truncate(self, sequence, num_tokens):
        self.wrong[sequence] = self.held.get(sequence, [])[-1:]
        self.inner.truncate(sequence, num_tokens)


class TakesTooMuchBack(Broken):
    """What is taken back too much is computed again, but not what it was."""

    def truncate(self, sequence, num_tokens):
        self.inner.truncate(sequence, num_tokens)
        if num_tokens:
            self.inner.truncate(sequence, num_tokens - 1)
            self.inner.step([StepWork(sequence, [5], num_tokens - 1, False)])


class TakesNothingBack(Broken):
    def truncate(self, sequence, num_tokens):
        pass


class ExportsWhatIsTakenBack(Broken):
    def __init__(self, inner):
        super().__init__(inner)
        self.blocks = {}

    def truncate(self, sequence, num_tokens):
        blocks = self.inner.export_blocks(sequence, 0, 8)
        self.inner.truncate(sequence, num_tokens)
        self.blocks[sequence] = blocks

    def export_blocks(self, sequence, first, count, end=None):
        found = self.blocks.pop(sequence, None)
        return self.inner.export_blocks(sequence, first, count, end) if found is None else found


class TakesRelativesBack(Broken):
    """What one sequence takes back, those that share it lose as well; other tokens take their place."""

    def __init__(self, inner):
        super().__init__(inner)
        self.relatives = []  # a sequence, one that shares tokens with it, and how many

    def truncate(self, sequence, num_tokens):
        self.inner.truncate(sequence, num_tokens)
        for own, relative, held in self.relatives:
            if own == sequence and num_tokens < held:
                self.inner.truncate(relative, num_tokens)
                self.inner.step([StepWork(relative, [5] * (held - num_tokens), num_tokens, False)])
        self.relatives = [each for each in self.relatives if each[0] != sequence]


class TakesForksBack(TakesRelativesBack):
    def fork(self, source, num_tokens):
        fork = self.inner.fork(source, num_tokens)
        self.relatives.append((source, fork, num_tokens))
        return fork


class TakesSourcesBack(TakesRelativesBack):
    def fork(self, source, num_tokens):
        fork = self.inner.fork(source, num_tokens)
        self.relatives.append((fork, source, num_tokens))
        return fork


class HidesTheRoomOfDrafts(Broken):
    lost = 0

    def truncate(self, sequence, num_tokens):
        self.inner.truncate(sequence, num_tokens)
        self.lost += 1

    def release(self, sequence):
        self.lost = 0
        self.inner.release(sequence)

    def room(self, sequence=None, beside=(), *, shared=0):
        return self.inner.room(sequence, beside, shared=shared) - self.lost


class DraftsTakeNoRoom(Broken):
    drafts = 0

    def step(self, work):
        result = self.inner.step(work)
        self.drafts = sum(item.drafts for item in work)
        return result

    def truncate(self, sequence, num_tokens):
        self.inner.truncate(sequence, num_tokens)
        self.drafts = 0

    def release(self, sequence):
        self.drafts = 0
        self.inner.release(sequence)

    def room(self, sequence=None, beside=(), *, shared=0):
        return self.inner.room(sequence, beside, shared=shared) + self.drafts


class TakesBackWhatIsNotThere(Broken):
    def truncate(self, sequence, num_tokens):
        with contextlib.suppress(BackendError):
            self.inner.truncate(sequence, num_tokens)


class TakesBackBeforeItFails(Broken):
    def truncate(self, sequence, num_tokens):
        try:
            self.inner.truncate(sequence, num_tokens)
        except BackendError:
            self.inner.truncate(sequence, 1)
            raise


class TakesOnlyDrafts(Broken):
    def step(self, work):
        return self.inner.step(
            [dataclasses.replace(item, drafts=min(item.drafts, len(item.token_ids) - 1)) for item in work]
        )


class GuessesWithoutTruncating(Broken):
    """Says that it can't verify drafts, and takes them."""

    def __init__(self, inner):
        super().__init__(inner)
        self.info = dataclasses.replace(inner.info, max_outputs=0)


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
        (ShiftsDraftLogits, "those of decoding one by one"),
        (GivesNoDraftLogits, "logits before each draft"),
        (AlwaysGivesDraftLogits, "must have no draft_logits"),
        (DraftsDependOnTheCompany, "logits of drafts must not depend"),
        (DraftsChangeTheirNeighbours, "logits of others must not depend"),
        (KeepsWhatIsTakenBack, "as if there had been no drafts"),
        (TakesTooMuchBack, "as if there had been no drafts"),
        (TakesNothingBack, "taken back"),
        (ExportsWhatIsTakenBack, "must not be exported"),
        (TakesForksBack, "a fork must keep"),
        (TakesSourcesBack, "a source must keep"),
        (HidesTheRoomOfDrafts, "must come back with truncate"),
        (DraftsTakeNoRoom, "must take room until"),
        (TakesBackWhatIsNotThere, "more tokens than there are"),
        (TakesBackBeforeItFails, "after one that failed"),
        (TakesOnlyDrafts, "as many drafts as tokens"),
        (GuessesWithoutTruncating, "where info.max_outputs is 0"),
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
