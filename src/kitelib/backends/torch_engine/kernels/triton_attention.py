"""Paged attention on CUDA: chooses the shapes of the Triton kernels from fixed tables and starts them."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, Literal

from kitelib.errors import UnsupportedOptionError

if TYPE_CHECKING:
    import torch

    from kitelib.backends.torch_engine.plan import StepPlan

__all__ = ["FIXED_SPAN", "Mode", "Shape", "Tile", "TritonAttention", "choose_tile"]

FIXED_SPAN = 256
"""Positions whose attention is summed up before it is merged with that of others, in numerics "bitwise".

Part of what the bits of a result depend on, so it is no option.
"""

_LOG2_E = 1.0 / math.log(2.0)
_PARTIAL_LIMIT_BYTES = 128 << 20
_MOST_SPANS = 64

Mode = Literal["whole", "combine", "partial"]


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """Shape of the kernel for one kind of work.

    Attributes:
        m: pairs of a row and a query head in a tile.
        n: positions per step.
        warps: warps of a program.
        stages: depth of the pipeline that loads keys and values.
    """

    m: int
    n: int
    warps: int
    stages: int


# (compute capability, kind) -> (padded head dim up to, tile), for 2-byte types. The addresses of keys and values depend
# on a load from the block table, so that a pipeline of 3 stages holds one step of them, one of 5 holds two.
# - Decoding is bound by memory: few rows, and 64 KiB or more under way per multiprocessor (at 4.8 TB/s and a latency of
#   1 microsecond an H200 needs 36 KiB).
# - Prefill is bound by the matrix units: on capability 90, 64 rows per group of four warps make them the asynchronous
#   ones; eight warps keep the accumulator in registers.
# - "fixed" is one compromise for both, as it must be the same for both.
# Those of capability 80 fit the 99 KiB of its small relatives (86, 89), too.
_TILES: dict[tuple[int, str], tuple[tuple[int, Tile], ...]] = {
    (80, "decode"): ((64, Tile(16, 64, 4, 5)), (128, Tile(16, 32, 4, 5)), (256, Tile(16, 32, 4, 3))),
    (80, "prefill"): ((64, Tile(128, 64, 8, 3)), (128, Tile(128, 32, 8, 3)), (256, Tile(64, 32, 8, 3))),
    (80, "fixed"): ((128, Tile(32, 64, 4, 3)), (256, Tile(32, 32, 8, 3))),
    (90, "decode"): ((64, Tile(16, 128, 4, 5)), (128, Tile(16, 64, 4, 5)), (256, Tile(16, 32, 4, 5))),
    (90, "prefill"): ((64, Tile(128, 64, 8, 3)), (128, Tile(128, 64, 8, 5)), (256, Tile(128, 32, 8, 3))),
    (90, "fixed"): ((64, Tile(64, 64, 4, 5)), (128, Tile(64, 32, 4, 5)), (256, Tile(64, 32, 8, 5))),
}
# float32 goes without the matrix units, for exactness; there is no speed to tune.
_FLOAT32_TILE = Tile(16, 32, 4, 2)


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """What is fixed about a layer's attention.

    Attributes:
        group: query heads per KV head.
    """

    kv_heads: int
    group: int
    key_dim: int
    value_dim: int
    item_bytes: int
    windowed: bool
    capped: bool

    @property
    def key_pad(self) -> int:
        """Channels of a key in the kernel: a power of two, as Triton needs it."""
        return max(16, _power_of_two(self.key_dim))

    @property
    def value_pad(self) -> int:
        """Channels of a value in the kernel."""
        return max(16, _power_of_two(self.value_dim))


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


@functools.lru_cache(maxsize=256)
def choose_tile(shape: Shape, *, architecture: int, bitwise: bool, single: bool) -> tuple[Tile, int]:
    """Tile of a layer, and how many query heads of a KV head it takes.

    Args:
        architecture: 80 or 90, the compute capability whose table is used.
        bitwise: one tile for all kinds of work.
        single: all sequences have one row.

    Raises:
        UnsupportedOptionError: the heads are too large.
    """
    kind = "fixed" if bitwise else "decode" if single else "prefill"
    largest = max(shape.key_pad, shape.value_pad)
    if shape.item_bytes == 4:
        tile: Tile | None = _FLOAT32_TILE
    else:
        tile = next((tile for limit, tile in _TILES[architecture, kind] if largest <= limit), None)
    if tile is None or largest > 256:
        raise UnsupportedOptionError(
            f"attention with key dim {shape.key_dim} and value dim {shape.value_dim}: the Triton kernel goes up to "
            "256; use the 'gathered' attention kernel for this model"
        )
    if kind == "decode" and shape.group > tile.m:
        # Keys and values are read once for all their query heads, as long as the tile stays small.
        tile = dataclasses.replace(tile, m=min(64, _power_of_two(shape.group)))
    return tile, min(shape.group, tile.m)


@dataclasses.dataclass(frozen=True, slots=True)
class _Launch:
    """What of a launch depends on the plan's sizes and the layer's shape only."""

    tile: Tile
    group_tile: int
    mode: Mode
    tiles: int
    head_tiles: int
    programs: int
    num_spans: int


class TritonAttention:
    """Attention over the paged cache on CUDA; implements `AttentionKernel`.

    Nothing here waits for the device, and grids depend on the plan's sizes only (rows, length of `contexts`,
    max_rows, max_context), so passes can be captured in CUDA graphs. A captured plan's `max_rows` and `max_context`
    must be the largest of any replay. Passes must follow each other, as on one stream: they share memory.

    Args:
        block_tokens: tokens of a block of the cache, a power of two.
        bitwise: a row's bits depend on its query, keys and values only; see `triton_kernels`. Otherwise work is cut by
            what fills the device.
        max_context: tokens of the longest sequence ever.
        num_sms: multiprocessors of the device.
        architecture: compute capability as 80 or 90 whose tables are used; None: the device's.

    Raises:
        UnsupportedOptionError: the block size is no power of two.
    """

    name = "triton"

    def __init__(
        self,
        block_tokens: int,
        *,
        bitwise: bool,
        max_context: int,
        num_sms: int = 132,
        architecture: int | None = None,
    ) -> None:
        if block_tokens < 1 or block_tokens & (block_tokens - 1):
            raise UnsupportedOptionError(
                f"block_tokens={block_tokens}: the Triton attention kernel needs a power of two, such as 16"
            )
        self.row_invariant = bitwise
        self._block_tokens = block_tokens
        self._max_context = max_context
        self._num_sms = num_sms
        self._architecture = architecture
        # One for all passes, which follow each other. Outgrown ones stay, as captured graphs may use them.
        self._scratch: list[torch.Tensor] = []

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        plan: StepPlan,
        *,
        scale: float,
        window: int,
        softcap: float,
    ) -> torch.Tensor:
        import torch

        assert plan.max_context <= self._max_context
        shape = Shape(
            kv_heads=key.shape[1],
            group=query.shape[1] // key.shape[1],
            key_dim=key.shape[2],
            value_dim=value.shape[2],
            item_bytes=query.element_size(),
            # One kernel for all lengths where bits matter; otherwise the faster one as long as nothing is hidden.
            windowed=window > 0 and (self.row_invariant or window < plan.max_context),
            capped=softcap > 0,
        )
        launch = self._plan_launch(shape, plan, window, query.device)
        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
            out = query.new_empty((plan.num_rows, query.shape[1], shape.value_dim))
            self._write(key, value, key_pages, value_pages, out, plan, shape)
            self._attend(query, key_pages, value_pages, out, plan, shape, launch, (scale, window, softcap))
        return out

    def _options(self) -> dict[str, Any]:
        # Contraction gives one expression other bits in another kernel.
        return {"enable_fp_fusion": not self.row_invariant}

    def _plan_launch(self, shape: Shape, plan: StepPlan, window: int, device: torch.device) -> _Launch:
        """How the work of a layer is cut. Depends on static sizes only."""
        single = plan.max_rows == 1
        tile, group_tile = choose_tile(
            shape, architecture=self._architecture_of(device), bitwise=self.row_invariant, single=single
        )
        sequences = plan.contexts.shape[0]
        tiles = sequences if single else plan.num_rows // (tile.m // group_tile) + sequences
        head_tiles = shape.kv_heads * -(-shape.group // group_tile)
        positions = plan.max_context
        if shape.windowed:
            positions = min(positions, window + plan.max_rows)
        units = tiles * head_tiles
        if self.row_invariant:
            # One span more, as the first need not begin where the window does.
            num_spans = -(-positions // FIXED_SPAN) + 1
            heads = shape.kv_heads * shape.group
            scratch_bytes = plan.num_rows * heads * num_spans * (shape.value_dim + 2) * 4
            # Few rows have little to write and read again; many fill the device by themselves.
            enough = (8 if single else 2) * self._num_sms
            split = units < enough and scratch_bytes <= _PARTIAL_LIMIT_BYTES and positions > FIXED_SPAN
            # Programs beyond a few per multiprocessor would mostly start to find nothing to do.
            programs = min(num_spans, max(1, -(-16 * self._num_sms // units))) if split else 1
            return _Launch(tile, group_tile, "partial" if split else "combine", tiles, head_tiles, programs, num_spans)
        # Many short programs per multiprocessor, so that none is left with one long one at the end. A tile of prefill
        # has much to write and read again, so it is only split where tiles alone leave multiprocessors idle.
        wanted = (16 if single else 4) * self._num_sms
        spans = min(-(-wanted // units), -(-positions // FIXED_SPAN), _MOST_SPANS)
        if spans <= 1 or (not single and units >= 2 * self._num_sms):
            return _Launch(tile, group_tile, "whole", tiles, head_tiles, 1, 1)
        return _Launch(tile, group_tile, "partial", tiles, head_tiles, spans, spans)

    def _architecture_of(self, device: torch.device) -> int:
        if self._architecture is None:
            import torch

            major, _ = torch.cuda.get_device_capability(device)
            self._architecture = 90 if major >= 9 else 80
        return self._architecture

    def _write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        out: torch.Tensor,
        plan: StepPlan,
        shape: Shape,
    ) -> None:
        from kitelib.backends.torch_engine.kernels.triton_kernels import write_pages

        heads_tile = max(1, min(_power_of_two(shape.kv_heads), 2048 // max(shape.key_pad, shape.value_pad)))
        out_width = out.shape[1] * out.shape[2]
        write_pages[plan.num_rows, -(-shape.kv_heads // heads_tile)](
            key,
            value,
            key_pages,
            value_pages,
            out,
            plan.slots,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            key_pages.stride(0),
            value_pages.stride(0),
            block_tokens=self._block_tokens,
            kv_heads=shape.kv_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            key_pad=shape.key_pad,
            value_pad=shape.value_pad,
            heads_tile=heads_tile,
            out_width=out_width,
            out_tile=min(1024, _power_of_two(out_width)),
            num_warps=4,
            **self._options(),
        )

    def _attend(
        self,
        query: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        out: torch.Tensor,
        plan: StepPlan,
        shape: Shape,
        launch: _Launch,
        numbers: tuple[float, int, float],
    ) -> None:
        from kitelib.backends.torch_engine.kernels import triton_kernels

        scale, window, softcap = numbers
        inner_scale = 0.0
        if shape.capped:
            scale, inner_scale = softcap * _LOG2_E, 2.0 * _LOG2_E * scale / softcap
        else:
            scale *= _LOG2_E
        sequences = plan.contexts.shape[0]
        single = plan.max_rows == 1
        fixed_span = FIXED_SPAN if self.row_invariant else 0
        partial, stats = self._partials(out, launch)
        triton_kernels.attend[launch.tiles, launch.head_tiles, launch.programs](
            query,
            key_pages,
            value_pages,
            out,
            partial,
            stats,
            plan.row_starts,
            plan.contexts,
            plan.tables,
            plan.slots,
            plan.num_rows,
            sequences,
            plan.tables.stride(0),
            query.stride(0),
            query.stride(1),
            key_pages.stride(0),
            value_pages.stride(0),
            scale,
            inner_scale,
            window,
            launch.num_spans,
            **attend_constants(shape, self._block_tokens, launch.mode, single=single, fixed_span=fixed_span),
            group_tile=launch.group_tile,
            tile_m=launch.tile.m,
            tile_n=launch.tile.n,
            num_warps=launch.tile.warps,
            num_stages=launch.tile.stages,
            **self._options(),
        )
        if launch.mode != "partial":
            return
        heads = out.shape[1]
        heads_tile = min(4, _power_of_two(heads))
        triton_kernels.reduce[plan.num_rows, -(-heads // heads_tile)](
            out,
            partial,
            stats,
            plan.row_starts,
            plan.contexts,
            plan.slots,
            plan.num_rows,
            sequences,
            window,
            launch.num_spans,
            windowed=shape.windowed,
            num_heads=heads,
            value_dim=shape.value_dim,
            value_pad=shape.value_pad,
            single=single,
            fixed_span=fixed_span,
            heads_tile=heads_tile,
            tile_n=launch.tile.n,
            num_warps=heads_tile,
            **self._options(),
        )

    def _partials(self, out: torch.Tensor, launch: _Launch) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for the spans' results; `out` twice where none is needed."""
        import torch

        if launch.mode != "partial":
            return out, out
        size = out.shape[0] * out.shape[1] * launch.num_spans
        wanted = size * (out.shape[2] + 2)
        if not self._scratch or self._scratch[-1].numel() < wanted or self._scratch[-1].device != out.device:
            self._scratch.append(torch.empty(_power_of_two(wanted), dtype=torch.float32, device=out.device))
        scratch = self._scratch[-1]
        return scratch[: size * out.shape[2]], scratch[size * out.shape[2] : wanted]


def attend_constants(
    shape: Shape, block_tokens: int, mode: Mode, *, single: bool, fixed_span: int
) -> dict[str, int | bool | str]:
    """Compile-time arguments of the attention kernel, without its tile."""
    return {
        "windowed": shape.windowed,
        "capped": shape.capped,
        "block_tokens": block_tokens,
        "kv_heads": shape.kv_heads,
        "group": shape.group,
        "key_dim": shape.key_dim,
        "value_dim": shape.value_dim,
        "key_pad": shape.key_pad,
        "value_pad": shape.value_pad,
        "single": single,
        "mode": mode,
        "fixed_span": fixed_span,
    }
