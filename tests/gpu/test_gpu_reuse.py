"""KV that left the device and came back is the same, and so is what is computed from it."""

from __future__ import annotations

import numpy as np

from kitelib.abc import StepWork
from tests.gpu.rig import compute, export_all, greedy, load, model_folder, on_gpu, prompt


def test_restored_blocks_give_the_same_bytes_and_logits() -> None:
    """Standard numerics: the same steps over restored KV are the same computation, bit for bit."""
    for architecture in ("llama", "gemma3_text", "qwen3_moe"):
        with load(model_folder(architecture), numerics="standard") as backend:
            tokens = prompt(200)
            size = backend.info.block_tokens
            held = 200 // size * size - size
            cold = backend.create()
            compute(backend, cold, tokens[:held])
            wanted = export_all(backend, cold, held)
            cold_logits = compute(backend, cold, tokens[held:], held)
            warm = backend.create()
            backend.restore_blocks(warm, 0, wanted)
            warm_logits = compute(backend, warm, tokens[held:], held)
            assert np.array_equal(cold_logits, warm_logits), architecture
            for before, after in zip(export_all(backend, cold, 200), export_all(backend, warm, 200), strict=True):
                assert np.array_equal(before.data, after.data), architecture
            assert greedy(backend, cold, cold_logits, 200, 20) == greedy(backend, warm, warm_logits, 200, 20)


def test_restoring_does_not_disturb_running_sequences() -> None:
    """A sequence that decodes while blocks arrive computes what it computes alone."""
    with load(model_folder(), numerics="standard") as backend:
        tokens = prompt(128)
        source = backend.create()
        compute(backend, source, tokens)
        payloads = export_all(backend, source, 128)

        def run(disturb: bool) -> list[bytes]:
            sequence, out = backend.create(), []
            logits = compute(backend, sequence, prompt(40, seed=9))
            for step in range(12):
                if disturb:
                    guest = backend.create()
                    backend.restore_blocks(guest, 0, payloads)
                logits = compute(backend, sequence, [int(logits.argmax())], 40 + step)
                out.append(logits.tobytes())
                if disturb:
                    assert all(
                        np.array_equal(a.data, b.data)
                        for a, b in zip(payloads, export_all(backend, guest, 128), strict=True)
                    )
                    backend.release(guest)
            backend.release(sequence)
            return out

        assert run(disturb=False) == run(disturb=True)


def test_forks_share_until_they_write() -> None:
    """A fork in the middle of a block goes on as if it had computed everything itself."""
    with load(model_folder(), numerics="standard") as backend:
        tokens = prompt(70)
        source = backend.create()
        logits = compute(backend, source, tokens)
        fork = backend.fork(source, 70)
        expected = greedy(backend, source, logits, 70, 12)
        assert greedy(backend, fork, logits, 70, 12) == expected
        shorter = backend.fork(source, 61)
        again = compute(backend, shorter, tokens[61:], 61)
        assert np.abs(again - logits).max() < 0.25


def test_bitwise_rows_do_not_depend_on_chunks_or_load() -> None:
    """The whole model: one prefill, single tokens, and steps shared with other sequences give the same bytes."""
    with load(model_folder(), numerics="bitwise") as backend:
        assert backend.info.numerics == "bitwise", f"the self-test found no plan: {backend.info.notes}"
        tokens = prompt(75)

        def run(chunk: int, company: int) -> tuple[bytes, list[bytes]]:
            sequence = backend.create()
            others = [backend.create() for _ in range(company)]
            logits, held = None, 0
            for first in range(0, len(tokens), chunk):
                part = tokens[first : first + chunk]
                work = [StepWork(other, prompt(3, seed=5), held, False) for other in others]
                logits = backend.step([*work, StepWork(sequence, part, first, True)]).logits[-1]
                held += 3
            assert logits is not None
            result = logits.tobytes(), [each.data.tobytes() for each in export_all(backend, sequence, len(tokens))]
            for each in (sequence, *others):
                backend.release(each)
            return result

        wanted = run(75, 0)
        for chunk, company in [(1, 0), (7, 0), (75, 9), (1, 17), (16, 4)]:
            found = run(chunk, company)
            assert found[1] == wanted[1], f"KV, chunks of {chunk} beside {company} sequences"
            assert found[0] == wanted[0], f"logits, chunks of {chunk} beside {company} sequences"


def test_bitwise_restored_and_cold_are_the_same_however_they_were_cut() -> None:
    """The prefix was computed token by token, the rest in one step after it was restored."""
    with load(model_folder(), numerics="bitwise") as backend:
        if backend.info.numerics != "bitwise":
            raise AssertionError(f"the self-test found no plan: {backend.info.notes}")
        tokens = prompt(100 if on_gpu() else 60)
        half = len(tokens) // 2 // backend.info.block_tokens * backend.info.block_tokens
        cold = backend.create()
        wanted = compute(backend, cold, tokens)
        slow = backend.create()
        compute(backend, slow, tokens[:half], chunk=1)
        warm = backend.create()
        backend.restore_blocks(warm, 0, export_all(backend, slow, half))
        assert compute(backend, warm, tokens[half:], half).tobytes() == wanted.tobytes()
