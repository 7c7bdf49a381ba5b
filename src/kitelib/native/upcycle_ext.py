"""Packs scattered pages of a cache into one piece and back, for PyTorch tensors on the CPU and on CUDA.

Runs csrc/ where it was built and PyTorch's own operations elsewhere, with the same bytes; `upcycle_note` says which and
why. `register_ops` makes it available as ``torch.ops.kitelib.pack_pages`` and ``torch.ops.kitelib.unpack_pages``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from kitelib.errors import FormatError
from kitelib.native import pages_torch
from kitelib.native.pages import FORMS, ITEM, KINDS, NOT_FINITE, RESULT, PageLayout, Segment, pages_library, pages_note
from kitelib.native.pages_cuda import CudaLayout, cuda_pages

if TYPE_CHECKING:
    import torch

__all__ = ["PageMover", "check_results", "checksum", "register_ops", "upcycle_note"]

_PACK: Final = (
    "pack_pages(Tensor[] segments, Tensor items, str form, Tensor(a!) packed, bool checksum=False, int threads=1, "
    "int runner=0) -> Tensor"
)
_UNPACK: Final = (
    "unpack_pages(Tensor(a!)[] segments, Tensor items, str form, Tensor packed, bool checksum=False, int threads=1, "
    "int runner=0) -> Tensor"
)
_libraries: list[Any] = []  # registrations last as long as these objects


class PageMover:
    """Packs and unpacks blocks of one cache.

    Args:
        segments: pieces of a token in their packed order (K of every layer, then V of every layer), each (blocks,
            block tokens, ...); all of one type, on one device, without gaps within a block. Views of one tensor, or
            tensors of their own.
        native: False for PyTorch's own operations even where csrc/ was built.

    Raises:
        ValueError: the segments don't make a cache.
    """

    def __init__(self, segments: Sequence[torch.Tensor], *, native: bool = True) -> None:
        first = _check_segments(segments)
        self.device: torch.device = first.device
        self._dtype = str(first.dtype).removeprefix("torch.")
        self._segments = list(segments)
        self._pages = [each.reshape(*each.shape[:2], -1) for each in segments]  # views: blocks have no gaps
        self.num_blocks, self.block_tokens = first.shape[:2]
        self.token_bytes = sum(each[0, 0].numel() * each.element_size() for each in segments)
        self._library = pages_library() if native and self.device.type == "cpu" else None
        self._cuda = cuda_pages(self.device.index or 0)[0] if native and self.device.type == "cuda" else None
        self._layouts: dict[int, tuple[PageLayout, CudaLayout | None]] = {}

    @property
    def is_native(self) -> bool:
        """Whether csrc/ does the work."""
        return self._library is not None or self._cuda is not None

    def packed_bytes(self, tokens: int, form: str = "raw") -> int:
        """Bytes of the packed form of `tokens` tokens of one block."""
        number = self._form(form)
        if not 1 <= tokens <= self.block_tokens:
            raise ValueError(f"{tokens} tokens can't be packed of a block of {self.block_tokens}")
        return pages_torch.form_bytes(len(self._pages), self.token_bytes, tokens, number)

    def pack(
        self,
        items: npt.NDArray[np.int64],
        packed: torch.Tensor,
        form: str = "raw",
        *,
        checksum: bool = False,
        runner: int = 0,
        threads: int = 1,
    ) -> torch.Tensor:
        """Packs pages. On CUDA it is enqueued on the current stream.

        Args:
            items: int64 (items, 4): block, first token, tokens, and where in `packed` the item starts. Their packed
                bytes do not overlap.
            packed: uint8 (bytes,), contiguous, on the device of the cache.
            form: "raw", "planes", or one of the lossy "int8" and "fp8"; see csrc/include/kite_pages.h.
            checksum: whether to compute checksums, else they are 0. The lossy forms always do.
            runner: address of a function like GOMP_parallel, for packing on several threads of the CPU.
            threads: most threads to use of it.

        Returns:
            int64 (items, 2), on the device: checksum of the packed bytes (its 64 bits) and status; see `check_results`.

        Raises:
            ValueError: the arguments make no sense; nothing was written.
        """
        return self._move(items, packed, form, False, checksum, runner, threads)

    def unpack(
        self,
        items: npt.NDArray[np.int64],
        packed: torch.Tensor,
        form: str = "raw",
        *,
        checksum: bool = False,
        runner: int = 0,
        threads: int = 1,
    ) -> torch.Tensor:
        """Writes packed pages to the cache; see `pack`. Items must not share tokens."""
        return self._move(items, packed, form, True, checksum, runner, threads)

    def _move(
        self,
        items: npt.NDArray[np.int64],
        packed: torch.Tensor,
        form: str,
        unpack: bool,
        checksum: bool,
        runner: int,
        threads: int,
    ) -> torch.Tensor:
        import torch

        number = self._form(form)
        wanted = checksum or number >= FORMS["int8"]
        table = self._table(items, packed, number)
        if not self.is_native:
            return self._move_torch(table, packed, number, unpack, wanted)
        results = torch.zeros((len(table), 2), dtype=torch.int64, device=self.device)
        layout, cuda_layout = self._layout(number)
        table["packed"] += np.uint64(packed.data_ptr())
        if self._library is not None:
            # The checks of _table are those of the library, so it can't refuse; a status is among the results.
            view = results.numpy().view(RESULT).reshape(-1) if wanted else None
            self._library.move(layout, table, view, unpack=unpack, runner=runner or None, threads=threads)
        else:
            assert self._cuda is not None
            assert cuda_layout is not None
            stream = torch.cuda.current_stream(self.device).cuda_stream or 1  # 1 is cudaStreamLegacy, torch's default
            address = results.data_ptr() if wanted else 0
            self._cuda.move(cuda_layout, table, address, unpack=unpack, stream=stream)
        return results

    def _move_torch(
        self, table: npt.NDArray[Any], packed: torch.Tensor, form: int, unpack: bool, checksum: bool
    ) -> torch.Tensor:
        import torch

        results = torch.zeros((len(table), 2), dtype=torch.int64, device=self.device)
        for place, item in enumerate(table):
            block, first, tokens, start, size = (int(item[name]) for name in ITEM.names or ())
            pages = [page[block, first : first + tokens] for page in self._pages]
            piece = packed[start : start + size]
            status = (
                pages_torch.unpack_item(piece, form, pages) if unpack else pages_torch.pack_item(pages, form, piece)
            )
            if status:
                results[place, 1] = status
            if checksum:
                results[place, 0] = pages_torch.checksum(piece)
        return results

    def _form(self, form: str) -> int:
        if form not in FORMS:
            raise ValueError(f"the form {form!r} is unknown; known: {', '.join(FORMS)}")
        if FORMS[form] >= FORMS["int8"]:
            widths = {each[0, 0].numel() for each in self._segments}
            if self._dtype not in KINDS or len(widths) > 1:
                raise ValueError(
                    f"the form {form!r} is for {' and '.join(KINDS)} with segments of one width, not for {self._dtype} "
                    f"with widths {sorted(widths)}"
                )
        return FORMS[form]

    def _layout(self, form: int) -> tuple[PageLayout, CudaLayout | None]:
        if form not in self._layouts:
            segments = [
                Segment(each.data_ptr(), each.stride(0) * each.element_size(), each[0, 0].numel() * each.element_size())
                for each in self._segments
            ]
            item_bytes, kind = self._segments[0].element_size(), KINDS.get(self._dtype, 0)
            layout = PageLayout(segments, self.num_blocks, self.block_tokens, item_bytes, kind, form)
            self._layouts[form] = (layout, self._cuda.layout(layout) if self._cuda is not None else None)
        return self._layouts[form]

    def _table(self, items: npt.NDArray[np.int64], packed: torch.Tensor, form: int) -> npt.NDArray[Any]:
        """The items as `ITEM`; "packed" is still relative."""
        import torch

        if packed.dtype != torch.uint8 or packed.dim() != 1 or not packed.is_contiguous():
            raise ValueError(f"packed pages are {packed.dtype} of shape {tuple(packed.shape)}, not bytes in a row")
        if packed.device != self.device:
            raise ValueError(f"packed pages are on {packed.device}, the cache is on {self.device}")
        if items.dtype != np.int64 or items.ndim != 2 or items.shape[1] != 4:
            raise ValueError(f"items are {items.dtype} of shape {items.shape}; needed is int64 of shape (items, 4)")
        blocks, firsts, tokens, starts = items.T
        good = (blocks >= 0) & (blocks < self.num_blocks) & (firsts >= 0) & (tokens >= 1)
        good &= (firsts <= self.block_tokens) & (tokens <= self.block_tokens - firsts)
        if not good.all():
            raise ValueError(
                f"item {items[~good][0].tolist()} is not in a cache of {self.num_blocks} blocks of {self.block_tokens}"
            )
        kinds = {count: self.packed_bytes(count, self._name(form)) for count in set(tokens.tolist())}
        sizes = np.array([kinds[count] for count in tokens.tolist()], np.int64)
        fits = (starts >= 0) & (starts <= len(packed) - sizes)
        if form >= FORMS["int8"]:
            fits &= (starts + packed.data_ptr()) % 2 == 0
        if not fits.all():
            raise ValueError(
                f"item {items[~fits][0].tolist()} of {sizes[~fits][0]} bytes does not fit {len(packed)} packed bytes "
                "(lossy forms start at even addresses)"
            )
        table = np.zeros(len(items), ITEM)
        for name, column in zip(ITEM.names or (), (blocks, firsts, tokens, starts, sizes), strict=True):
            table[name] = column
        return table

    @staticmethod
    def _name(form: int) -> str:
        return next(name for name, number in FORMS.items() if number == form)


def check_results(results: torch.Tensor) -> None:
    """Waits for the results of a move and raises FormatError if an item was not packed or not unpacked."""
    for place, status in enumerate(results[:, 1].tolist()):
        if status == NOT_FINITE:
            raise FormatError(f"item {place} has values that are not finite; pack it exactly")
        if status:
            raise FormatError(f"item {place} is damaged")


def checksum(data: torch.Tensor, *, native: bool = True) -> int:
    """The 64-bit checksum of contiguous bytes (uint8) on any device; waits for it."""
    library = pages_library() if native and data.device.type == "cpu" else None
    if library is not None:
        return library.checksum(data.numpy().reshape(-1))
    return int(pages_torch.checksum(data.reshape(-1))) & 2**64 - 1


def upcycle_note(device: str = "cpu", index: int = 0) -> str:
    """Why csrc/ is not used on "cpu" or "cuda" and what to do, for people; "" if it is."""
    return cuda_pages(index)[1] if device == "cuda" else pages_note()


@functools.lru_cache(maxsize=1)
def register_ops() -> None:
    """Defines ``kitelib::pack_pages`` and ``kitelib::unpack_pages`` for CPU and CUDA; once per process.

    Arguments and results are those of `PageMover`, with the segments in front and the items as an int64 tensor on the
    CPU. Who moves pages of one cache often keeps a `PageMover`: it describes the cache once, not in each call.
    """
    import torch

    library: Any = torch.library.Library("kitelib", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(_PACK)
    library.define(_UNPACK)
    for key in ("CPU", "CUDA"):
        library.impl("pack_pages", _pack_op, key)
        library.impl("unpack_pages", _unpack_op, key)
    for name in ("pack_pages", "unpack_pages"):
        library.impl(name, _meta_op, "Meta")
    _libraries.append(library)


def _pack_op(
    segments: list[torch.Tensor],
    items: torch.Tensor,
    form: str,
    packed: torch.Tensor,
    checksum: bool = False,
    threads: int = 1,
    runner: int = 0,
) -> torch.Tensor:
    mover = PageMover(segments)
    return mover.pack(items.cpu().numpy(), packed, form, checksum=checksum, runner=runner, threads=threads)


def _unpack_op(
    segments: list[torch.Tensor],
    items: torch.Tensor,
    form: str,
    packed: torch.Tensor,
    checksum: bool = False,
    threads: int = 1,
    runner: int = 0,
) -> torch.Tensor:
    mover = PageMover(segments)
    return mover.unpack(items.cpu().numpy(), packed, form, checksum=checksum, runner=runner, threads=threads)


def _meta_op(
    segments: list[torch.Tensor],  # noqa: ARG001 - the operations'
    items: torch.Tensor,
    form: str,  # noqa: ARG001
    packed: torch.Tensor,
    checksum: bool = False,  # noqa: ARG001
    threads: int = 1,  # noqa: ARG001
    runner: int = 0,  # noqa: ARG001
) -> torch.Tensor:
    return packed.new_empty((items.shape[0], 2), dtype=items.dtype)


def _check_segments(segments: Sequence[torch.Tensor]) -> torch.Tensor:
    """The first segment, once all are known to fit each other."""
    if not segments:
        raise ValueError("a cache needs at least one segment")
    first = segments[0]
    for each in segments:
        if each.dim() < 3 or each.numel() == 0:
            raise ValueError(f"a segment has shape {tuple(each.shape)}; needed is (blocks, block tokens, ...)")
        if (each.device, each.dtype, each.shape[:2]) != (first.device, first.dtype, first.shape[:2]):
            raise ValueError(
                f"segments differ: {first.dtype} {tuple(first.shape)} on {first.device}, and {each.dtype} "
                f"{tuple(each.shape)} on {each.device}"
            )
        if not each[0].is_contiguous() or (each.shape[0] > 1 and each.stride(0) < each[0].numel()):
            raise ValueError(f"the pages of a segment of strides {each.stride()} have gaps or overlap")
    return first
