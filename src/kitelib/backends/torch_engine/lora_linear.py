"""One adapted linear: the matrices of every adapter that has some for it, and how rows get theirs."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import threading
from typing import TYPE_CHECKING, Any, Final

from kitelib.errors import BackendStepError

if TYPE_CHECKING:
    import torch

    from kitelib.backends.torch_engine.kernels.triton_lora import SiteTables, TileTable

__all__ = ["RANK_STEP", "TILE_ROWS", "Active", "AdaptedLinear", "Current"]

TILE_ROWS: Final = 16
"""Rows that are multiplied together where a row's bits must not depend on its neighbours. On CPUs with AVX-512, MKL
gives a row the same bits at any place of a tile of 16 or 32 rows, but not of 8."""
RANK_STEP: Final = 16
"""Ranks are filled up with zeros to a multiple of it: odd sizes take other code paths per row."""


@dataclasses.dataclass(eq=False, slots=True)
class Active:
    """What a step uses.

    Attributes:
        segments: (first row, end, adapter number) of each segment; end None means all rows.
        rows: rows of the pass; None if the one segment has all rows, however many there are.
    """

    segments: tuple[tuple[int, int | None, int], ...]
    rows: int | None
    _tiles: dict[int, TileTable] = dataclasses.field(default_factory=dict)

    def tiles(self, rows: int, device: torch.device) -> TileTable:
        """The segments in tiles, on the device; made once per step."""
        table = self._tiles.get(rows)
        if table is None:
            import torch

            from kitelib.backends.torch_engine.kernels.triton_lora import TileTable

            tiles = [
                (row, min(TILE_ROWS, end - row), number)
                for first, stop, number in self.segments
                for end in [rows if stop is None else stop]
                for row in range(first, end, TILE_ROWS)
            ]
            columns = torch.tensor(tiles, dtype=torch.int32).T.contiguous()
            columns = columns if device.type == "cpu" else columns.to(device, non_blocking=True)
            table = self._tiles[rows] = TileTable(*columns.unbind(0))
        return table


class Current(threading.local):
    """What the pass on this thread uses; None means no adapter.

    Attributes:
        cast: the last input of a linear and its rows in the adapters' type: several linears have the same input.
    """

    active: Active | None = None
    cast: tuple[torch.Tensor, torch.Tensor] | None = None

    def rows_of(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`x`, (..., features), as (rows, features) in that type, with contiguous rows."""
        if self.cast is None or self.cast[0] is not x:
            rows = x.reshape(-1, x.shape[-1]).to(dtype)
            self.cast = x, rows if rows.stride(1) == 1 else rows.contiguous()
        return self.cast[1]


class AdaptedLinear:
    """A linear's adapters, and the forward hook that applies them.

    Args:
        module: name of the linear, for messages.
        current: which of them to apply.
        row_invariant: see `AdapterSet`.
    """

    def __init__(self, module: str, current: Current, *, row_invariant: bool) -> None:
        self._module = module
        self._current = current
        self._tile_rows = TILE_ROWS if row_invariant else None
        self._matrices: dict[int, tuple[torch.Tensor, torch.Tensor, float]] = {}
        self._tables: SiteTables | None = None
        self._handle: Any = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all matrices."""
        return sum(a.nbytes + b.nbytes for a, b, _ in self._matrices.values())

    def add(self, number: int, a: torch.Tensor, b: torch.Tensor, factor: float) -> None:
        """Adds the matrices of an adapter: `a` is (rank, in features), `b` (out features, rank)."""
        self._matrices[number] = (a, b, factor)

    def attach(self, linear: Any) -> None:
        """From now on the linear's output has what the current adapter adds."""
        import torch

        a = next(iter(self._matrices.values()))[0]
        if a.device.type == "cuda" and _has_triton():
            self._tables = self.tables()
        current, is_compiling = self._current, torch.compiler.is_compiling

        def hook(_linear: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor | None:
            # Compiled graphs are for steps without adapter, and cost nothing for those that could have one.
            if is_compiling() or current.active is None:
                return None
            self._apply(inputs[0], out, current.active)
            return out

        self._handle = linear.register_forward_hook(hook)

    def detach(self) -> None:
        """Takes the hook off."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def tables(self) -> SiteTables:
        """What the Triton kernels need; keep this object as long as they run."""
        import torch

        from kitelib.backends.torch_engine.kernels.triton_lora import SiteTables

        some = next(iter(self._matrices.values()))[0]
        count = 1 + max(self._matrices)
        addresses = torch.zeros((2, count), dtype=torch.int64)
        ranks = torch.zeros(count, dtype=torch.int32)
        factors = torch.zeros(count, dtype=torch.float32)
        for number, (a, b, factor) in self._matrices.items():
            if factor != 0.0:
                addresses[0, number], addresses[1, number] = a.data_ptr(), b.data_ptr()
                ranks[number], factors[number] = len(a), factor
        first, second = addresses.to(some.device).unbind(0)
        most = max(len(a) for a, _, _ in self._matrices.values())
        return SiteTables(first, second, ranks.to(some.device), factors.to(some.device), most, some.dtype)

    def _apply(self, x: torch.Tensor, out: torch.Tensor, active: Active) -> None:
        """Adds to `out`, in place. `x` is (..., in features), `out` (..., out features)."""
        out_rows = out.view(-1, out.shape[-1])
        x_rows = self._current.rows_of(x, next(iter(self._matrices.values()))[0].dtype)
        if active.rows is not None and active.rows != len(out_rows):
            raise BackendStepError(f"{self._module!r} got {len(out_rows)} rows in a step of {active.rows}")
        if self._tables is not None:
            from kitelib.backends.torch_engine.kernels.triton_lora import add_adapters

            add_adapters(x_rows, out_rows, active.tiles(len(out_rows), out.device), self._tables)
            return
        for first, stop, number in active.segments:
            matrices = self._matrices.get(number)
            if matrices is not None and matrices[2] != 0.0:
                self._add(x_rows[first:stop], out_rows[first:stop], *matrices)

    def _add(self, x: torch.Tensor, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, factor: float) -> None:
        from torch.nn.functional import linear, pad

        if self._tile_rows is None:
            out.add_(linear(linear(x, a), b).mul_(factor))
            return
        for first in range(0, len(x), self._tile_rows):
            tile, target = x[first : first + self._tile_rows], out[first : first + self._tile_rows]
            rows = len(tile)
            if rows < self._tile_rows:
                tile = pad(tile, (0, 0, 0, self._tile_rows - rows))
            # Two steps: one that multiplies and adds may round differently at the end of a vector.
            target.add_(linear(linear(tile, a), b)[:rows].mul_(factor))


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
