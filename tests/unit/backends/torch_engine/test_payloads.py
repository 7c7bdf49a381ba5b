"""Form of blocks outside the cache: what its id covers, what is refused, and cutting."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from kitelib.backends.torch_engine.pages import LayerShape, PagedCache
from kitelib.backends.torch_engine.payloads import PayloadLayout
from kitelib.errors import BackendError, FormatError

PLAIN = (LayerShape(2, 4, 2, 4), LayerShape(2, 4, 2, 4))
LATENT = (LayerShape(1, 8, 1, 2, latent=True), LayerShape(1, 8, 1, 2, latent=True))


def layout_of(layers: Any = PLAIN, block_tokens: int = 4, dtype: Any = torch.float32) -> PayloadLayout:
    return PayloadLayout.of(PagedCache(layers, 2, block_tokens, dtype, "cpu"))


def payload_of(layout: PayloadLayout, num_tokens: int) -> Any:
    data = np.random.default_rng(num_tokens).integers(0, 256, num_tokens * layout.token_bytes).astype(np.uint8)
    return layout.payload(data, num_tokens)


def test_layout_id_covers_everything_that_shapes_the_bytes() -> None:
    layouts = [
        layout_of(),
        layout_of(block_tokens=8),
        layout_of(dtype=torch.bfloat16),
        layout_of(dtype=torch.float16),
        layout_of(PLAIN[:1]),
        layout_of((PLAIN[0], LayerShape(4, 2, 2, 4))),  # as many bytes, other heads
        layout_of((PLAIN[0], LayerShape(2, 4, 2, 4, latent=True))),
    ]
    assert len({each.id for each in layouts}) == len(layouts)
    assert layout_of().id == layout_of().id


def test_shape_says_segments_where_all_are_alike() -> None:
    assert payload_of(layout_of(), 3).shape == (4, 3, 8)
    latent = payload_of(layout_of(LATENT), 3)
    assert latent.shape == (len(latent.data) // 4,)


@pytest.mark.parametrize("layers", [PLAIN, LATENT])
def test_cut_keeps_the_first_tokens_of_every_segment(layers: Any) -> None:
    layout = layout_of(layers)
    whole = payload_of(layout, 4)
    short = layout.cut(whole, 3)
    start = at = 0
    for width in layout.widths:
        size = width * 4
        assert np.array_equal(short.data[at : at + 3 * size], whole.data[start : start + 3 * size])
        at, start = at + 3 * size, start + 4 * size
    assert (short.num_tokens, len(short.data), short.layout) == (3, 3 * layout.token_bytes, layout.id)
    assert np.array_equal(layout.cut(short, 1).data, layout.cut(whole, 1).data)
    assert np.array_equal(layout.cut(whole, 4).data, whole.data)


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_cut_to_what_is_not_there_is_refused(num_tokens: int) -> None:
    layout = layout_of()
    with pytest.raises(FormatError, match=f"{num_tokens} tokens can't be cut from a payload of 4"):
        layout.cut(payload_of(layout, 4), num_tokens)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "llama.cpp"}, "layout 'llama.cpp'"),
        ({"dtype": "float16"}, r"\(float16\) does not fit"),
        ({"num_tokens": 0}, "has 0 tokens"),
        ({"num_tokens": 5}, "has 5 tokens"),
        ({"num_tokens": 3}, "needed are"),
        ({"data": np.zeros(7, np.uint8)}, "7 bytes"),
        ({"data": np.zeros((4, 128), np.uint8)}, r"shape \(4, 128\)"),
    ],
)
def test_payload_of_another_form_is_refused(changes: dict[str, Any], message: str) -> None:
    layout = layout_of()
    layout.check(payload_of(layout, 4), full=True)
    bad = dataclasses.replace(payload_of(layout, 4), **changes)
    with pytest.raises(BackendError, match=message):
        layout.check(bad, full=False)
    with pytest.raises(FormatError, match=message):
        layout.cut(bad, 1)


def test_tail_is_no_full_block() -> None:
    layout = layout_of()
    layout.check(payload_of(layout, 3), full=False)
    with pytest.raises(BackendError, match="3 tokens where 4 are needed"):
        layout.check(payload_of(layout, 3), full=True)
