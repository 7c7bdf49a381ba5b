"""Contracts that third parties implement: `Store`, `Backend`, `Codec`, `Clock`, and the records they exchange."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Literal, NewType, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

__all__ = [
    "Backend",
    "BlockPayload",
    "Clock",
    "Codec",
    "HitLedger",
    "Message",
    "ModelInfo",
    "OverlappingBackend",
    "SequenceId",
    "SharedStore",
    "StepResult",
    "StepWork",
    "Store",
    "StoreStats",
    "StoredItem",
    "TokenDraw",
]

SequenceId = NewType("SequenceId", int)
"""Handle of a sequence inside one backend; never reused for another sequence while it is alive."""

Message = Mapping[str, Any]
"""One chat message: ``role``, ``content`` and what the template knows (``tool_calls``, ...)."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine has to know about a loaded model.

    Attributes:
        name: display name; never part of a key.
        architecture: as the model file names it, e.g. "llama".
        context_tokens: most tokens one sequence may hold, prompt and completion together.
        capacity_tokens: most tokens all sequences together may hold.
        max_sequences: most sequences alive at once.
        max_step_tokens: most tokens one step may process.
        vocab_size: number of token ids; logits have this length.
        end_token_ids: token ids that end a text (end of text, end of turn).
        block_tokens: tokens in one full KV block.
        block_bytes: bytes of one full block of KV, all layers.
        model_state: digest over everything that shapes the numbers (weights content, KV dtype, RoPE, ...), 32 bytes.
        execution_path: names and values of what else can move a bit (library version, kernels, numerics, ...).
        numerics: "bitwise" if the load-time self-test proved it, else "standard".
        reuse_blocks: False if KV blocks of this model can't be cut out and put back.
        resident_idle_tokens: tokens of idle sequences worth keeping in the context; past it, restoring from the
            pool is cheaper than the drag of idle tokens on every step.
        notes: plain sentences about what was detected, for people.
        prefill_guess: tokens of a prompt per second, as a guess from the model's size; only used until the first
            prompt was computed and measured.
        mixes_adapters: work items of one step may have different adapters.
        draws_tokens: it can draw tokens itself (`StepWork.draws`), which spares copying logits from a device.
        state_parts: what `model_state` is made of, as short texts by name ("weights", "kv_type", ...): for telling people
            which of them differs.
        max_outputs: most tokens of one step after which logits or draws may be wanted, drafts included; 0 if sequences
            can't be truncated (a recurrent state), so that drafts can't be verified.
    """

    name: str
    architecture: str
    context_tokens: int
    capacity_tokens: int
    max_sequences: int
    max_step_tokens: int
    vocab_size: int
    end_token_ids: frozenset[int]
    block_tokens: int
    block_bytes: int
    model_state: bytes
    execution_path: Mapping[str, str | int | bool]
    numerics: Literal["bitwise", "standard"]
    reuse_blocks: bool
    resident_idle_tokens: int
    notes: tuple[str, ...] = ()
    prefill_guess: float = 100.0
    mixes_adapters: bool = False
    draws_tokens: bool = False
    max_outputs: int = 0
    state_parts: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class BlockPayload:
    """The KV of consecutive tokens of one sequence, all layers, as plain bytes.

    Attributes:
        num_tokens: tokens covered; a full block's `ModelInfo.block_tokens`, fewer for a prompt's tail.
        data: uint8, shape (num_bytes,), C-contiguous; owned by the payload.
        dtype: element type that `data` holds, e.g. "float16"; tells codecs how to split it.
        shape: shape of the elements; the product times the item size is `len(data)`. Three dimensions mean
            (segments, tokens, channels): the first half of the segments are K of every layer, the second half V, and
            codecs may use that neighbours along the tokens resemble each other. One dimension says nothing.
        layout: id of the byte layout; a backend refuses a layout it does not know.
    """

    num_tokens: int
    data: npt.NDArray[np.uint8]
    dtype: str
    shape: tuple[int, ...]
    layout: str


@dataclasses.dataclass(frozen=True, slots=True)
class TokenDraw:
    """How to draw a token where the logits are, as `kitelib.engine.sampling` describes it.

    Attributes:
        temperature: below 1e-5 the most likely token is taken, the lowest id among equals.
        top_k: tokens that stay; 0 means all.
        top_p: mass of the most likely tokens that stay, of (0, 1].
        min_p: tokens with at least this share of the highest probability stay, of [0, 1].
        uniform: random number of [0, 1) that chooses among them.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    uniform: float


@dataclasses.dataclass(frozen=True, slots=True)
class StepWork:
    """A run of tokens to process for one sequence in one step.

    Attributes:
        sequence: the sequence to extend.
        token_ids: tokens to process, at least one.
        start: position of the first of them; must equal the number of tokens the sequence holds.
        logits: whether the logits after the last token are wanted, and before each draft.
        drafts: how many of the last tokens are guesses of what the model would say; fewer than there are tokens. Their
            KV is kept; `Backend.truncate` takes back what was guessed wrong. Not 0 only where `ModelInfo.max_outputs`
            is not 0, and then all items with logits or draws together have at most so many outputs, 1 + drafts each.
        draws: empty, or 1 + drafts: draw the token that follows each output and give only that, not the logits; set
            only for a backend whose `ModelInfo.draws_tokens` says that it can, with `logits` False.
    """

    sequence: SequenceId
    token_ids: Sequence[int]
    start: int
    logits: bool
    draws: Sequence[TokenDraw] = ()
    drafts: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gave.

    Attributes:
        logits: per work item, float32 of shape (vocab_size,) where asked, else None. The arrays may be views
            that are only valid until the next step; copy what must live longer. Writing to them is allowed.
        tokens: per work item, the tokens drawn where asked, in order, else none; empty if no item asked.
        draft_logits: per work item, the logits before each of its drafts, in order, where asked, as `logits`; empty if
            no item has drafts.
    """

    logits: list[npt.NDArray[np.float32] | None]
    tokens: Sequence[Sequence[int]] = ()
    draft_logits: Sequence[Sequence[npt.NDArray[np.float32]]] = ()


@runtime_checkable
class Backend(Protocol):
    """Owns sequences and KV memory and does one step at a time; knows nothing of pools or fingerprints.

    All methods except `tokenize`, `detokenize` and `render_chat` (thread-safe) are called from one thread.
    """

    info: ModelInfo

    def tokenize(self, text: str, *, add_special: bool) -> list[int]:
        """Token ids of `text`. `add_special` adds what the model wants around a plain text (BOS, EOS) and, if
        False, special-token text such as ``<|im_start|>`` in a rendered chat is parsed as one token."""
        ...

    def detokenize(self, ids: Sequence[int]) -> bytes:
        """Bytes of the tokens; half a character is possible. Special tokens give no bytes."""
        ...

    def render_chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The chat as one prompt text, ending where the assistant's answer starts.

        Raises:
            UnsupportedOptionError: the model has no chat template, or it can't do what was asked.
            InvalidRequestError: the messages don't fit the template.
        """
        ...

    def create(self, adapter: str | None = None) -> SequenceId:
        """A new, empty sequence, computed with the named adapter."""
        ...

    def fork(self, source: SequenceId, num_tokens: int) -> SequenceId:
        """A new sequence that shares the first `num_tokens` tokens of `source` without copying."""
        ...

    def shareable(self, source: SequenceId, num_tokens: int) -> bool:
        """Whether `fork(source, num_tokens)` works: a sliding window may have dropped what it needs."""
        ...

    def release(self, sequence: SequenceId) -> None:
        """Gives the sequence's memory back; tokens shared with other sequences stay."""
        ...

    def truncate(self, sequence: SequenceId, num_tokens: int) -> None:
        """Takes a sequence back to its first `num_tokens` tokens, as if the others had never been processed. Called
        only for drafts, where `ModelInfo.max_outputs` is not 0.

        Raises:
            BackendError: it holds fewer tokens; nothing has changed.
        """
        ...

    def step(self, work: Sequence[StepWork]) -> StepResult:
        """Processes all work items together. They must use the same adapter, unless `ModelInfo.mixes_adapters`.

        Raises:
            BackendStepError: nothing was processed.
        """
        ...

    def room(
        self, sequence: SequenceId | None = None, beside: Sequence[tuple[SequenceId, int]] = (), *, shared: int = 0
    ) -> int:
        """Tokens that one sequence can still get, processed or restored, before memory must be released.

        Args:
            sequence: that sequence; None for a new one.
            beside: other sequences and the tokens that each of them gets first; negative if they don't fit.
            shared: tokens that a new sequence is going to share with another one (`fork`).
        """
        ...

    def free_sequences(self) -> int:
        """Sequences that can still be created before one must be released."""
        ...

    def export_blocks(self, sequence: SequenceId, first: int, count: int, end: int | None = None) -> list[BlockPayload]:
        """Copies blocks `first` .. `first + count - 1` out. Block i covers tokens [i * block_tokens, ...); the last
        one is cut at token `end` if given. Returns fewer when the tokens are not there any more."""
        ...

    def cut(self, payload: BlockPayload, num_tokens: int) -> BlockPayload:
        """The first `num_tokens` tokens of a payload; KV of a token never depends on later tokens.

        Raises:
            FormatError: the payload is not of this backend, or has fewer tokens.
        """
        ...

    def restore_blocks(self, sequence: SequenceId, first: int, payloads: Sequence[BlockPayload]) -> None:
        """Appends blocks to a sequence that holds exactly `first * block_tokens` tokens. All or nothing.

        Raises:
            BackendError: nothing was restored; the sequence is as before.
        """
        ...

    def close(self) -> None:
        """Frees everything. Idempotent."""
        ...


@runtime_checkable
class OverlappingBackend(Backend, Protocol):
    """A backend whose steps run beside the thread that starts them, as on a GPU."""

    def begin_step(self, work: Sequence[StepWork]) -> Callable[[], StepResult]:
        """Starts what `step` does and returns at once. The call that it gives waits for the result; until then blocks
        may be exported and sequences that are not in `work` released, and nothing else.

        Raises:
            BackendStepError: nothing was processed; the call it gives may raise it, too.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters of one store since it was opened; `bytes` and `items` are what it holds now.

    `errors` counts keys and calls that failed: what could not be read, written or deleted although it was tried.
    `dropped` counts values that were not stored, because they don't fit or because writing them failed.
    """

    items: int
    bytes: int
    hits: int
    misses: int
    evictions: int
    dropped: int
    errors: int = 0


@runtime_checkable
class Store(Protocol):
    """A tier that maps keys to values. One value is one recyclable unit; values are opaque bytes.

    A call that can do part of its work (one node of several is down) does that part, gives None or 0 for the rest, and
    counts it in `StoreStats.errors`. A call that can do none of it raises `StoreError`. Every call may be cancelled at
    any await; what was not written completely then is not visible.
    """

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Values in the order of `keys`; None is a miss."""
        ...

    async def put_many(self, items: Sequence[tuple[str, bytes]]) -> None:
        """Stores or replaces; each value becomes visible only when complete."""
        ...

    async def leading_run(self, keys: Sequence[str]) -> int:
        """How many of the first keys exist, counted up to the first that does not."""
        ...

    async def delete_many(self, keys: Sequence[str]) -> int:
        """Deletes; returns how many existed."""
        ...

    async def stats(self) -> StoreStats: ...

    async def aclose(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class StoredItem:
    """What a store tells of one value without giving it.

    Attributes:
        key: its key.
        num_bytes: length of the value, bytes.
        written_at: when it was written, seconds since 1970; None if the store does not know.
        used_at: when it was last read, seconds since 1970; None if the store does not know.
    """

    key: str
    num_bytes: int
    written_at: float | None = None
    used_at: float | None = None


@runtime_checkable
class SharedStore(Store, Protocol):
    """A store that several processes use, or that outlives one: it can be listed, and keeps freshness epochs.

    An epoch is a whole number per name that only grows. Whatever happens (a lagging replica, a lost race, a restored
    backup of one node), `raise_epoch` never lowers what a later `get_epoch` gives on a healthy store. Epochs are no
    values: they have no time to live, don't count as items, and neither eviction nor `list_items` touches them.
    """

    async def warm(self) -> None:
        """Opens what the first call would open (connections, an index), so that no request waits for it. Idempotent.

        Raises:
            StoreError: that failed; later calls try again by themselves.
        """
        ...

    def list_items(self) -> AsyncIterator[list[StoredItem]]:
        """Everything the store holds, in pages, in any order, on every node. What changes meanwhile may be missing or
        come twice. Only keys that start with ``kite:`` are listed, so a shared database is safe."""
        ...

    async def get_heads(self, keys: Sequence[str], num_bytes: int) -> list[bytes | None]:
        """The first `num_bytes` bytes of each value (fewer if it is shorter), in order; None is a miss."""
        ...

    async def get_epoch(self, name: str) -> int:
        """The epoch of that name; 0 if none was ever raised. Names are 1 to 64 of the characters ``[0-9a-z_.-]``."""
        ...

    async def raise_epoch(self, name: str, epoch: int) -> int:
        """Makes the epoch at least `epoch` (0 to 2**63 - 1); returns what it is now."""
        ...


@runtime_checkable
class HitLedger(Protocol):
    """What a `SharedStore` may offer besides: it adds up how often the units of a pool were used, all processes together.

    Counts are kept per model and day and go after eight days. They say what is worth most, and are no values: they don't
    count as items, and neither `list_items` nor eviction nor deleting touches them. The table is bounded: what is used
    least goes first. A count may be lost with its store, and one whose answer was lost may be counted twice.

    A model is named as an epoch is. A day is days since 1970, UTC. A unit is ``<root>:<cf>``, both fingerprints as 64
    hexadecimal digits. Descriptions are texts of at most 8 KiB by the digits of a root, or "model".
    """

    async def add_hits(self, model: str, day: int, hits: Mapping[str, int], roots: Mapping[str, str]) -> None:
        """Adds to the counts of a day, and keeps the descriptions. A store that can't be written because somebody made
        it read-only keeps nothing and says nothing."""
        ...

    async def read_hits(self, model: str, days: Sequence[int], limit: int) -> tuple[dict[str, int], dict[str, str]]:
        """The units with the most hits on these days together, at most `limit`, and the descriptions of their roots
        and of the model, as far as they are known."""
        ...

    async def hit_models(self) -> list[str]:
        """Names of the models that have counts, sorted."""
        ...


class Codec(Protocol):
    """Turns the bytes of one payload into stored bytes and back."""

    @property
    def name(self) -> str:
        """Goes into the stored form, so that a reader knows how to decode."""
        ...

    def encode(self, data: npt.NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> bytes | memoryview:
        """The bytes to store; a view of `data` if nothing changes. `shape` is that of the elements, see
        `BlockPayload`."""
        ...

    def decode(
        self, blob: bytes | memoryview, num_bytes: int, dtype: str, shape: tuple[int, ...]
    ) -> npt.NDArray[np.uint8]:
        """Raises FormatError unless exactly `num_bytes` come out; allocates no more than that and, for a moment,
        one plane of it. The result is read-only and may be a view of `blob`."""
        ...


class Clock(Protocol):
    """Time source, so that tests can move it."""

    def monotonic(self) -> float:
        """Seconds that never go back."""
        ...

    def time(self) -> float:
        """Seconds since the epoch."""
        ...
