"""Copies blocks out of the paged cache and back. A payload is a block's segments, each (tokens, channels), as bytes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from kitelib.backends.torch_engine.kernels.openmp import parallel_function
from kitelib.errors import BackendError
from kitelib.native.pages import FORMS, ITEM, PageLayout, PagesLibrary, Segment, pages_library

if TYPE_CHECKING:
    from kitelib.backends.torch_engine.pages import PagedCache
    from kitelib.backends.torch_engine.staging import StagedTransfer

__all__ = ["BlockTransfer"]

# Two threads copy about 1.5 times as fast as one, unless the other core is busy: then they wait for its time slice.
_SHARED_BYTES: Final = 2**24

Bytes = npt.NDArray[np.uint8]


class BlockTransfer:
    """Exports and restores blocks of one cache. For the thread that runs the model.

    On the CPU both are plain copies with the GIL released. On a GPU they go through pinned memory on a stream of their
    own: `restore` comes back before the last bytes arrived, and a layer's attention calls `wait_layer` first.
    """

    def __init__(self, cache: PagedCache) -> None:
        self._num_blocks = cache.num_blocks
        self._block_tokens = cache.block_tokens
        item_bytes = cache.arena.element_size()
        self._widths = [width * item_bytes for width in cache.widths]
        self._uniform = cache.uniform_width is not None
        self._token_bytes = sum(self._widths)
        self._staged: StagedTransfer | None = None
        self._library: PagesLibrary | None = None
        self._arena = cache.arena  # keeps the memory of the views below
        if cache.arena.device.type == "cpu":
            import torch

            # Of a block: one row of bytes, all its segments behind each other.
            self._rows: Bytes = cache.arena.view(torch.uint8).numpy()
            self._threads = torch.get_num_threads
            self._library = pages_library()
            self._layout = self._page_layout(item_bytes)
        else:
            from kitelib.backends.torch_engine.staging import CudaLane, StagedTransfer

            self._staged = StagedTransfer(cache, CudaLane(cache.arena.device))

    def export(self, blocks: Sequence[int], num_tokens: Sequence[int]) -> list[Bytes]:
        """The first num_tokens[i] tokens of blocks[i] for each i: uint8, contiguous, not shared with anything.

        Raises:
            BackendError: there is no such block, or it does not have so many tokens.
        """
        self._check(blocks, num_tokens)
        if self._staged is not None:
            return self._staged.export(blocks, num_tokens)
        full = self._block_tokens
        if self._runs_shared(blocks):
            payloads = [np.empty(tokens * self._token_bytes, np.uint8) for tokens in num_tokens]
            self._move(blocks, num_tokens, payloads, unpack=False)
            return payloads
        return [
            self._rows[block].copy() if tokens == full else self._head(block, tokens)
            for block, tokens in zip(blocks, num_tokens, strict=True)
        ]

    def restore(self, blocks: Sequence[int], payloads: Sequence[Bytes]) -> None:
        """Writes each payload to the first tokens of its block; a payload's size says how many these are.

        The payloads are not needed any more when this comes back.

        Raises:
            BackendError: there is no such block, a block is named twice, or a payload is no whole number of tokens;
                then nothing was written.
        """
        num_tokens = [self._tokens_of(payload) for payload in payloads]
        self._check(blocks, num_tokens)
        if len(set(blocks)) != len(blocks):
            raise BackendError(f"blocks {list(blocks)} can't be restored: one of them is there twice")
        if self._staged is not None:
            self._staged.restore(blocks, payloads, num_tokens)
            return
        if self._runs_shared(blocks):
            self._move(blocks, num_tokens, payloads, unpack=True)
            return
        for block, tokens, payload in zip(blocks, num_tokens, payloads, strict=True):
            if tokens == self._block_tokens:
                np.copyto(self._rows[block], payload)
            else:
                self._set_head(block, tokens, payload)

    def wait_layer(self, layer: int) -> None:
        """Makes what the current CUDA stream does next wait until restored blocks have this layer's KV."""
        if self._staged is not None:
            self._staged.wait_layer(layer)

    def wait(self) -> None:
        """`wait_layer` for all layers at once, as needed before a captured graph runs."""
        if self._staged is not None:
            self._staged.wait()

    def _tokens_of(self, payload: Bytes) -> int:
        tokens, rest = divmod(payload.size, self._token_bytes)
        if rest or payload.dtype != np.uint8 or payload.ndim != 1 or not payload.flags.c_contiguous:
            raise BackendError(
                f"a payload of {payload.dtype}, shape {payload.shape}, is no row of tokens of {self._token_bytes} bytes"
            )
        return tokens

    def _check(self, blocks: Sequence[int], num_tokens: Sequence[int]) -> None:
        if len(blocks) != len(num_tokens):
            raise BackendError(f"{len(blocks)} blocks and {len(num_tokens)} payloads do not belong together")
        for block, tokens in zip(blocks, num_tokens, strict=True):
            if not 0 <= block < self._num_blocks:
                raise BackendError(f"block {block} does not exist; the cache has {self._num_blocks}")
            if not 1 <= tokens <= self._block_tokens:
                raise BackendError(f"{tokens} tokens can't be copied of a block of {self._block_tokens}")

    def _head(self, block: int, tokens: int) -> Bytes:
        """The first tokens of a block."""
        row: Bytes = self._rows[block]
        if self._uniform:
            return row.reshape(len(self._widths), -1)[:, : tokens * self._widths[0]].flatten()
        return np.concatenate(
            [row[start : start + tokens * width] for start, width in zip(self._starts(), self._widths, strict=True)]
        )

    def _set_head(self, block: int, tokens: int, payload: Bytes) -> None:
        row = self._rows[block]
        if self._uniform:
            pages = row.reshape(len(self._widths), -1)
            pages[:, : tokens * self._widths[0]] = payload.reshape(len(self._widths), -1)
            return
        at = 0
        for start, width in zip(self._starts(), self._widths, strict=True):
            row[start : start + tokens * width] = payload[at : at + tokens * width]
            at += tokens * width

    def _starts(self) -> list[int]:
        """Where each segment starts in a row."""
        return [0, *itertools.accumulate(width * self._block_tokens for width in self._widths[:-1])]

    def _page_layout(self, item_bytes: int) -> PageLayout:
        base, stride = self._rows.ctypes.data, self._rows.strides[0]
        segments = [
            Segment(base + start, stride, width)
            for start, width in zip(self._starts(), self._widths, strict=True)
            if width  # a layer may keep keys only
        ]
        return PageLayout(segments, self._num_blocks, self._block_tokens, item_bytes, 0, FORMS["raw"])

    def _runs_shared(self, blocks: Sequence[int]) -> bool:
        """Whether several threads share the copy."""
        return (
            self._library is not None
            and len(blocks) * self._token_bytes * self._block_tokens >= _SHARED_BYTES
            and self._threads() > 1
        )

    def _move(self, blocks: Sequence[int], num_tokens: Sequence[int], payloads: Sequence[Bytes], unpack: bool) -> None:
        assert self._library is not None
        items = np.zeros(len(blocks), ITEM)
        items["block"], items["tokens"] = blocks, num_tokens
        items["packed"] = [payload.ctypes.data for payload in payloads]
        items["packed_bytes"] = [payload.size for payload in payloads]
        self._library.move(self._layout, items, unpack=unpack, runner=parallel_function(), threads=self._threads())
