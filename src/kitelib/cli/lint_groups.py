"""Groups recorded prompts by what they have in common, and replays them through a prefix cache. Memory is bounded:
by the number of groups, by what is looked at of a prompt, and by the number of blocks the cache remembers."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import re
import zlib
from collections.abc import Sequence
from typing import Final, TypeVar

from kitelib.cli.tokens import Tokens
from kitelib.fingerprint import Fingerprint, block_fingerprints
from kitelib.yoco.templates import Piece, Template, TemplateBuilder, split_pieces
from kitelib.yoco.volatile import Volatile, find_volatile, move_to_end

__all__ = ["Group", "Groups", "PrefixCache", "Totals"]

_Key = TypeVar("_Key", tuple[str, ...], int)

_ROOT: Final = Fingerprint(hashlib.sha256(b"kite.lint").digest())
_MAX_BLOCKS: Final = 1_000_000
_MAX_GROUPS: Final = 128
_MAX_PIECES: Final = 4_000  # of a prompt, to find what it is like
_TEMPLATE_PROMPTS: Final = 48  # of a group, to find its template
_KEY_WORDS: Final = 8
_SAME_WORDS: Final = 64  # so long a beginning in common makes prompts alike, whatever follows
_SHINGLE_WORDS: Final = 4
_SKETCH: Final = 64
_ALIKE: Final = 0.4
_CHANGES: Final = re.compile(r"now|today|date|time|clock|uuid|guid|random|nonce|request|session|trace", re.IGNORECASE)


class PrefixCache:
    """Remembers the blocks of all prompts seen, the youngest of them where there are too many.

    Attributes:
        forgot: whether any block had to be forgotten.
    """

    def __init__(self, max_blocks: int = _MAX_BLOCKS) -> None:
        self._half = max(1, max_blocks // 2)
        self._young: set[int] = set()
        self._old: set[int] = set()
        self.forgot = False

    def use(self, token_ids: Sequence[int], block_tokens: int) -> int:
        """The leading tokens of a prompt that are there, in full blocks; then the whole prompt is."""
        keys = [int.from_bytes(cf[:8], "little") for cf in block_fingerprints(_ROOT, token_ids, block_tokens)]
        run = 0
        while run < len(keys) and (keys[run] in self._young or keys[run] in self._old):
            run += 1
        for key in keys:
            self._young.add(key)
            if len(self._young) >= self._half:
                self.forgot |= bool(self._old)
                self._young, self._old = set(), self._young
        return run * block_tokens


@dataclasses.dataclass(slots=True)
class Totals:
    """Sums over prompts, in characters and in tokens (words, without a model).

    Attributes:
        prompts, chars, tokens: how many.
        reusable: tokens that a cache without bounds has, as the prompts are.
        after_moving: the same with the volatile parts of each prompt moved to its end. Until `Groups.found` has put
            `reusable` there where moving loses, as it does where such a part never changes.
    """

    prompts: int = 0
    chars: int = 0
    tokens: int = 0
    reusable: int = 0
    after_moving: int = 0

    def add(self, other: Totals) -> None:
        """Adds `other` to this one."""
        for field in dataclasses.fields(Totals):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class Group:
    """Prompts that have most of their text, or a long beginning, in common.

    Attributes:
        line: line of the first of them.
        totals: sums over all of them.
        looked: what the first of them is compared by.
        template: what they have in common, as far as the first 48 of them tell.
    """

    def __init__(self, line: int, pieces: Sequence[Piece], looked: _Looked) -> None:
        self.line = line
        self.totals = Totals()
        self.looked = looked
        self._builder = TemplateBuilder(pieces)
        self._template: Template | None = None

    def add(self, pieces: Sequence[Piece]) -> None:
        """Takes the pieces of one more prompt in."""
        if self._builder.num_prompts < _TEMPLATE_PROMPTS:
            self._builder.add(pieces)
            self._template = None

    @property
    def template(self) -> Template:
        """See the class."""
        if self._template is None:
            self._template = self._builder.template()
        return self._template

    @property
    def expressions(self) -> list[Volatile]:
        """Template expressions that stand unfilled: all in the text that several prompts share, and of a single prompt
        those whose name says that they change, since its own text may be about templates."""
        found = self._builder.expressions()
        return [part for part in found if self.totals.prompts > 1 or _CHANGES.search(part.text)]


@dataclasses.dataclass(frozen=True, slots=True)
class _Looked:
    """What a prompt is compared by: its words with volatile parts masked, the first of them, and a sketch of all."""

    words: tuple[str, ...]
    key: tuple[str, ...]
    sketch: frozenset[int]


class Groups:
    """All prompts of a file, one after the other.

    Attributes:
        total: sums over all prompts.
        others: sums over the prompts that are in no group: like no other, or few among very many groups.
        expressions: template expressions of these, with the lines of their prompts; at most 100.
        cache, moved_cache: what prompts are replayed through, as they are and with volatile parts at the end.
    """

    def __init__(self, tokens: Tokens, *, max_groups: int = _MAX_GROUPS, max_blocks: int = _MAX_BLOCKS) -> None:
        self._tokens = tokens
        self._max_groups = max_groups
        self._groups: dict[Group, None] = {}
        self._by_key: dict[tuple[str, ...], list[Group]] = {}
        self._by_shingle: dict[int, list[Group]] = {}
        self.total = Totals()
        self.others = Totals()
        self.expressions: list[tuple[int, Volatile]] = []
        self.cache = PrefixCache(max_blocks)
        self.moved_cache = PrefixCache(max_blocks)

    def add(self, line: int, text: str, *, chat: bool) -> None:
        """Takes the rendered prompt of a line in; `chat` as of `Tokens.encode`."""
        parts = find_volatile(text)
        size = self._tokens.block_tokens
        ids, _ = self._tokens.encode(text, chat=chat)
        moved = self._tokens.encode(move_to_end(text, parts), chat=chat)[0] if parts else ids
        own = Totals(
            1, len(text), len(ids), self.cache.use(ids, size), min(self.moved_cache.use(moved, size), len(ids))
        )
        self.total.add(own)
        pieces = split_pieces(text, parts, max_pieces=_MAX_PIECES)
        looked = _look(pieces)
        group = self._like(looked)
        if group is None:
            group = Group(line, pieces, looked)
            self._keep(group)
        else:
            group.add(pieces)
        group.totals.add(own)

    def found(self) -> list[Group]:
        """The groups of more than one prompt, those with the most tokens first; the rest goes to `others`. Nobody moves
        parts of a template that loses by it, so what is reusable now then counts for it as after moving."""
        for group in [group for group in self._groups if group.totals.prompts == 1]:
            self._drop(group)
        sums = [self.others, *(group.totals for group in self._groups)]
        for each in sums:
            each.after_moving = max(each.after_moving, each.reusable)
        self.total.after_moving = sum(each.after_moving for each in sums)
        return sorted(self._groups, key=lambda group: (-group.totals.tokens, group.line))

    def _like(self, looked: _Looked) -> Group | None:
        """The group that a prompt belongs to; it is compared with those that are kept, `max_groups` at most."""
        held = (self._by_shingle.get(shingle, ()) for shingle in sorted(looked.sketch))
        shared = collections.Counter(itertools.chain.from_iterable(held))
        best = max(shared, key=lambda group: shared[group], default=None)
        if best is not None and _similarity(looked.sketch, best.looked.sketch) >= _ALIKE:
            return best
        for group in self._by_key.get(looked.key, ()):
            length = _common_words(looked.words, group.looked.words)
            if length >= min(_SAME_WORDS, max(_KEY_WORDS, min(len(looked.words), len(group.looked.words)) // 2)):
                return group
        return None

    def _keep(self, group: Group) -> None:
        if len(self._groups) >= self._max_groups:
            # The oldest of the smallest goes: what comes once a file long is no template.
            self._drop(min(self._groups, key=lambda each: each.totals.prompts))
        self._groups[group] = None
        self._by_key.setdefault(group.looked.key, []).append(group)
        for shingle in group.looked.sketch:
            self._by_shingle.setdefault(shingle, []).append(group)

    def _drop(self, group: Group) -> None:
        del self._groups[group]
        _remove(self._by_key, group.looked.key, group)
        for shingle in group.looked.sketch:
            _remove(self._by_shingle, shingle, group)
        self.others.add(group.totals)
        room = 100 - len(self.expressions)
        self.expressions += [(group.line, part) for part in group.expressions[:room]]


def _remove(table: dict[_Key, list[Group]], key: _Key, group: Group) -> None:
    held = table[key]
    held.remove(group)
    if not held:
        del table[key]


def _look(pieces: Sequence[Piece]) -> _Looked:
    words = tuple(_masked(piece) for piece in pieces if not piece.text.isspace())
    # Bottom-k sketch of word shingles (Broder, "On the resemblance and containment of documents", 1997).
    shingles = {
        zlib.crc32("\0".join(words[at : at + _SHINGLE_WORDS]).encode("utf-8", "surrogatepass"))
        for at in range(max(1, len(words) - _SHINGLE_WORDS + 1))
    }
    return _Looked(words, words[:_KEY_WORDS], frozenset(sorted(shingles)[:_SKETCH]))


def _masked(piece: Piece) -> str:
    return piece.text if piece.volatile is None or piece.volatile == "template" else f"\0{piece.volatile}"


def _similarity(a: frozenset[int], b: frozenset[int]) -> float:
    smallest = sorted(a | b)[:_SKETCH]
    return sum(each in a and each in b for each in smallest) / len(smallest) if smallest else 0.0


def _common_words(a: Sequence[str], b: Sequence[str]) -> int:
    count = 0
    for first, second in zip(a, b, strict=False):
        if first != second:
            break
        count += 1
    return count
