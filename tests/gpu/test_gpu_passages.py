"""Moved KV on a device: the kernels see what they would have written, and rows anywhere in a sequence can be computed."""

from __future__ import annotations

import numpy as np

from tests.gpu.rig import compute, load, model_folder, on_gpu, prompt

PREFIX, PASSAGE, QUESTION = prompt(70, 1), prompt(120, 2), prompt(9, 3)
TEXT = [*PREFIX, *PASSAGE, *QUESTION]
END = len(PREFIX) + len(PASSAGE)


def test_what_is_computed_again_is_what_a_prefill_computes() -> None:
    """With all of the passage computed again in its place, or none of it moved, the logits are those of a prefill."""
    for architecture in ("llama", "gemma3_text"):
        with load(model_folder(architecture, "float32"), numerics="standard") as backend:
            assert backend.passages.refusal() is None
            wanted = compute(backend, backend.create(), TEXT)
            alone = backend.create()
            compute(backend, alone, PASSAGE)
            for moves, share in (([(alone, 0, len(PASSAGE), 0)], 1.0), ([], 0.0)):
                sequence = backend.create()
                compute(backend, sequence, PREFIX)
                again = backend.passages.splice(sequence, PASSAGE, moves, share)
                assert again == (len(PASSAGE) if moves else 0)
                found = compute(backend, sequence, QUESTION, END)
                within = 5e-2 if on_gpu() else 1e-3  # matrix kernels of a GPU round to 10 bits in float32, too
                assert np.abs(found - wanted).max() < within, architecture


def test_moved_keys_are_those_of_their_new_place() -> None:
    """In the first layer KV depends on the token and its position only."""
    for dtype, within in (("float32", 1e-3), ("bfloat16", 0.1)):
        with load(model_folder("llama", dtype), numerics="standard") as backend:
            alone, moved, fresh = backend.create(), backend.create(), backend.create()
            compute(backend, alone, PASSAGE)
            compute(backend, moved, PREFIX)
            backend.passages.splice(moved, PASSAGE, [(alone, 0, len(PASSAGE), 0)], 0.0)
            compute(backend, fresh, TEXT[:END])
            tables, cache = backend.runner.tables, backend.runner.cache
            places = np.arange(len(PREFIX), END)
            found = []
            for sequence in (moved, fresh):
                blocks = tables[sequence].blocks[places // tables.block_tokens]
                found.append(cache.keys(0)[blocks, places % tables.block_tokens].float().cpu().numpy())
            distance = np.linalg.norm(found[0] - found[1], axis=-1) / np.linalg.norm(found[1], axis=-1)
            assert distance.max() < within, dtype
