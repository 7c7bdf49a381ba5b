"""Prompts made of parts, of which some are passages: texts that come in many prompts, at other places and after other
texts, such as the documents of retrieval-augmented generation.

With ``ReusePolicy(passages="reuse")`` a passage is computed once, alone, and its KV is moved to wherever it stands
(`splicing`). The first tokens of each passage are computed in their place, which repairs most of what is lost (EPIC,
Hu et al. 2024). What was computed alone is an ordinary prompt, with the fingerprints of one; a run that has moved KV in it
has fingerprints under a root of its own, so that no exact request ever finds it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import anyio

from kitelib.config import PassageMode
from kitelib.errors import InvalidRequestError, UnsupportedOptionError
from kitelib.fingerprint import BlockChain, Fingerprint, derived_fingerprint

if TYPE_CHECKING:
    from kitelib.engine.serving import Serving

__all__ = ["Parts", "Passage", "Splice", "Splices", "is_parted", "prepare_splices", "tokenize_parts"]

HEAD_TOKENS: Final = 16
"""Default of `Passage.head_tokens`; docs/passages.md has the measurement."""
BLEND_SHARE: Final = 0.15
"""Share of moved tokens that "blend" computes again (CacheBlend, Yao et al. 2024)."""

Compute = Callable[[list[int]], Awaitable[int]]
"""Computes a prompt for what it leaves in the context; gives how many of its tokens were computed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Passage:
    """A part of a prompt that may be moved; see `ReusePolicy.passages`.

    Attributes:
        content: a text, or token ids.
        head_tokens: how many of its first tokens are computed in their place all the same; default 16. With all of them
            nothing is moved.

    Raises:
        InvalidRequestError: `content` is neither, or `head_tokens` is no whole number of 0 or more.
    """

    content: str | Sequence[int]
    head_tokens: int = HEAD_TOKENS

    def __post_init__(self) -> None:
        if isinstance(self.head_tokens, bool) or not isinstance(self.head_tokens, int) or self.head_tokens < 0:
            raise InvalidRequestError(
                f"Passage.head_tokens is {self.head_tokens!r}; give a whole number of tokens, 0 or more"
            )
        if isinstance(self.content, str):
            return
        if isinstance(self.content, (bytes, bytearray)) or not isinstance(self.content, Sequence):
            raise InvalidRequestError(
                f"Passage.content is a {type(self.content).__name__}; give a text or a list of token ids"
            )
        object.__setattr__(self, "content", tuple(self.content))


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Where a passage stands: its tokens are start .. stop - 1, of which the first `head` are computed there."""

    start: int
    stop: int
    head: int


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """A prompt of parts as tokens.

    Attributes:
        token_ids: of all parts, tokenized apart.
        spans: its passages, in order.
        lead: what the model wants before any text (BOS); also before a passage that is computed alone.
    """

    token_ids: list[int]
    spans: tuple[Span, ...]
    lead: tuple[int, ...]


@dataclasses.dataclass(eq=False, slots=True)
class Splice:
    """A passage of one request.

    Attributes:
        span: where it stands.
        token_ids: what is computed alone: the lead and the passage.
        lead: tokens of the lead.
        chain: fingerprints of `token_ids`.
        fresh: of its tokens, those that were computed for this request and are not counted as reused yet.
    """

    span: Span
    token_ids: list[int]
    lead: int
    chain: BlockChain
    fresh: int = 0


@dataclasses.dataclass(eq=False, slots=True)
class Splices:
    """The passages of one request whose KV is moved.

    Attributes:
        chain: fingerprints of the whole prompt, under the root of prompts with just these moves.
        items: in order; they don't overlap.
        prefix: fingerprints of the tokens before the first of them, which are computed and shared as in any prompt.
        share: of moved tokens, those that are computed again.
        fresh_prefix: tokens before the first passage that were computed for this request.
        moved: prompt tokens whose KV was moved, and stayed so.
        failed: the backend failed on one of them; what is left is computed.
    """

    chain: BlockChain
    items: tuple[Splice, ...]
    prefix: BlockChain
    share: float
    fresh_prefix: int = 0
    moved: int = 0
    failed: bool = False


def is_parted(prompt: Any) -> TypeGuard[Sequence[str | Passage | Sequence[int]]]:
    """Whether a prompt is a list of parts: one with a passage in it."""
    return isinstance(prompt, (list, tuple)) and any(isinstance(part, Passage) for part in prompt)


def tokenize_parts(
    parts: Sequence[str | Passage | Sequence[int]], backend: Any, check_ids: Callable[[Any, int], list[int]]
) -> Parts:
    """Token ids of a prompt of parts, each tokenized by itself, so that a passage has the same ones everywhere. What the
    model wants before a text comes before the first part, unless that is token ids.

    Raises:
        InvalidRequestError: a part is something else.
    """
    lead = _lead(backend)
    token_ids: list[int] = [] if parts and _is_ids(parts[0]) else list(lead)
    spans = []
    for index, part in enumerate(parts):
        content = part.content if isinstance(part, Passage) else part
        if isinstance(content, str):
            ids = list(backend.tokenize(content, add_special=False)) if content else []
        elif isinstance(content, Sequence) and not isinstance(content, (bytes, bytearray)):
            ids = check_ids(content, backend.info.vocab_size)
        else:
            raise InvalidRequestError(
                f"part {index} of the prompt is a {type(part).__name__}; give a text, a list of token ids or a Passage"
            )
        if isinstance(part, Passage):
            start = len(token_ids)
            spans.append(Span(start, start + len(ids), min(part.head_tokens, len(ids))))
        token_ids += ids
    return Parts(token_ids, tuple(spans), lead)


def _is_ids(part: Any) -> bool:
    return not isinstance(part, (str, Passage))


def _lead(backend: Any) -> tuple[int, ...]:
    """What `tokenize` puts before a text."""
    plain, whole = list(backend.tokenize("a", add_special=False)), list(backend.tokenize("a", add_special=True))
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return tuple(whole[:start])
    return ()


async def prepare_splices(
    serving: Serving, parts: Parts, root: Fingerprint, mode: PassageMode, compute: Compute
) -> Splices | None:
    """Computes the passages of a prompt that are not in the context yet, each alone, and what stands before the first.

    Args:
        serving: the model.
        parts: the prompt.
        root: of exact prompts of this tenant.
        mode: "reuse" or "blend".
        compute: see `Compute`; several run at once.

    Returns:
        None if nothing is worth moving: passages of less than a block behind their head, or a context that can't hold
        both the passages and the prompt.

    Raises:
        UnsupportedOptionError: the backend or the model can't move KV; says why.
        KiteError: computing a passage failed.
    """
    await _check_model(serving, mode)
    splices = _plan(serving, parts, root, mode)
    if splices is None:
        return None
    residency, size = serving.memory.residency, serving.backend.info.block_tokens
    covered = residency.resident_blocks(splices.chain) * size
    missing: dict[bytes, Splice] = {}
    for splice in splices.items:
        if splice.span.stop > covered and residency.resident_blocks(splice.chain) < len(splice.chain.fingerprints):
            missing.setdefault(splice.chain.end(), splice)
    start = splices.items[0].span.start
    prefix = covered < start and residency.resident_blocks(splices.prefix) < len(splices.prefix.fingerprints)
    failures: list[Exception] = []

    async def compute_passage(splice: Splice) -> None:
        try:
            splice.fresh = min(await compute(splice.token_ids), splice.span.stop - splice.span.start)
        except Exception as error:  # noqa: BLE001 - raised below: a group would wrap it
            failures.append(error)

    async def compute_prefix() -> None:
        try:
            splices.fresh_prefix = await compute(parts.token_ids[:start])
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    async with anyio.create_task_group() as group:
        if prefix:
            group.start_soon(compute_prefix)
        for splice in missing.values():
            group.start_soon(compute_passage, splice)
    if failures:
        raise failures[0]
    return splices


def _plan(serving: Serving, parts: Parts, root: Fingerprint, mode: PassageMode) -> Splices | None:
    info = serving.backend.info
    size = info.block_tokens
    spans = [each for each in parts.spans if each.stop - each.start - each.head >= size]
    alone = {tuple(parts.token_ids[each.start : each.stop]) for each in spans}
    needed = [len(parts.lead) + len(ids) for ids in alone]
    # A block more for each: the last ones are not full.
    room = info.capacity_tokens - len(parts.token_ids) - sum(needed) - size * (len(needed) + 2)
    if not spans or room < 0 or max(needed) >= info.context_tokens:
        return None
    items = []
    for span in spans:
        ids = [*parts.lead, *parts.token_ids[span.start : span.stop]]
        items.append(Splice(span, ids, len(parts.lead), BlockChain(root, size, ids)))
    # What else the KV depends on than the tokens: where moved KV begins and ends, and what is computed again.
    share = BLEND_SHARE if mode == "blend" else 0.0
    own = derived_fingerprint(root, "passages", share, [[each.start, each.stop, each.head] for each in spans])
    return Splices(
        BlockChain(own, size, parts.token_ids),
        tuple(items),
        BlockChain(root, size, parts.token_ids[: spans[0].start]),
        share,
    )


async def _check_model(serving: Serving, mode: PassageMode) -> None:
    backend = serving.backend
    moves = getattr(backend, "passages", None)
    if moves is None:
        name = backend.info.execution_path.get("backend", type(backend).__name__)
        raise UnsupportedOptionError(
            f"ReusePolicy.passages is {mode!r}, which the {name} backend does not have; use 'exact', or open the model "
            "with backend='torch'"
        )
    if not moves.checked:
        await serving.on_model_thread(lambda: int(moves.refusal() is None))
    reason = moves.refusal()
    if reason is not None:
        raise UnsupportedOptionError(
            f"ReusePolicy.passages is {mode!r}, but the KV of {backend.info.name!r} can't be moved: {reason}; use 'exact'"
        )
