"""Form of one block's KV outside the cache: its layout id, checks, and cutting it shorter."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kitelib.abc import BlockPayload
from kitelib.errors import BackendError, FormatError
from kitelib.fingerprint import encode_fields

if TYPE_CHECKING:
    from kitelib.backends.torch_engine.pages import PagedCache

__all__ = ["PayloadLayout"]

_VERSION = "torch.1"


@dataclasses.dataclass(frozen=True, slots=True)
class PayloadLayout:
    """K of every layer, then V of every layer, each (tokens, channels) without gaps.

    Attributes:
        widths: channels per token of every segment.
        dtype: element type, e.g. "bfloat16".
        item_bytes: bytes of an element.
        block_tokens: tokens of a full block.
        id: names all of that; a payload with another id is refused.
    """

    widths: tuple[int, ...]
    dtype: str
    item_bytes: int
    block_tokens: int
    id: str

    @classmethod
    def of(cls, cache: PagedCache) -> PayloadLayout:
        """The form of this cache's blocks."""
        dtype = str(cache.arena.dtype).removeprefix("torch.")
        fields = encode_fields("kite.torch.layout", _VERSION, dtype, cache.block_tokens, repr(cache.layers))
        name = f"{_VERSION}-{hashlib.sha256(fields).hexdigest()[:16]}"
        return cls(tuple(cache.widths), dtype, cache.arena.element_size(), cache.block_tokens, name)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token, all layers."""
        return sum(self.widths) * self.item_bytes

    def payload(self, data: npt.NDArray[np.uint8], num_tokens: int) -> BlockPayload:
        """A payload made of its bytes."""
        uniform = len(set(self.widths)) == 1
        shape = (len(self.widths), num_tokens, self.widths[0]) if uniform else (len(data) // self.item_bytes,)
        return BlockPayload(num_tokens, data, self.dtype, shape, self.id)

    def check(self, payload: BlockPayload, *, full: bool) -> None:
        """Raises BackendError unless the payload is of this form, and of a full block if `full`."""
        if payload.layout != self.id or payload.dtype != self.dtype:
            raise BackendError(
                f"a payload of layout {payload.layout!r} ({payload.dtype}) does not fit; needed is {self.id!r} "
                f"({self.dtype})"
            )
        most = self.block_tokens
        if not 1 <= payload.num_tokens <= most or (full and payload.num_tokens != most):
            raise BackendError(f"a payload has {payload.num_tokens} tokens where {most} are needed")
        needed = payload.num_tokens * self.token_bytes
        if payload.data.dtype != np.uint8 or payload.data.shape != (needed,):
            raise BackendError(
                f"a payload of {payload.num_tokens} tokens has {payload.data.nbytes} bytes of shape "
                f"{payload.data.shape}; needed are {needed}"
            )

    def cut(self, payload: BlockPayload, num_tokens: int) -> BlockPayload:
        """The first tokens of a payload.

        Raises:
            FormatError: it is of another form, or has fewer tokens.
        """
        try:
            self.check(payload, full=False)
        except BackendError as error:
            raise FormatError(str(error)) from error
        if not 1 <= num_tokens <= payload.num_tokens:
            raise FormatError(f"{num_tokens} tokens can't be cut from a payload of {payload.num_tokens}")
        parts, start = [], 0
        for width in self.widths:
            part = width * self.item_bytes
            parts.append(payload.data[start : start + num_tokens * part])
            start += payload.num_tokens * part
        return self.payload(np.concatenate(parts), num_tokens)
