"""From a pool to a bundle: the units that were used most, each verified in full on the way."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from kitelib.errors import ConfigError, FormatError, InvalidRequestError
from kitelib.fingerprint import model_key, root_fingerprint
from kitelib.runtime.threads import ThreadDoor, to_the_end
from kitelib.stores.hits import HIT_DAYS, MODEL_FIELD, is_member, most_hit
from kitelib.stores.hot_units import PoolView, StoredUnits
from kitelib.stores.keys import unit_key
from kitelib.upcycle.bundle.hot_tree import HotUnit, grow
from kitelib.upcycle.bundle.manifest import BundleRoot, ModelIdentity
from kitelib.upcycle.bundle.manifest_json import model_of, root_of, unit_fault
from kitelib.upcycle.bundle.strict_json import parse
from kitelib.upcycle.bundle.writer import MAX_HITS, BundleSummary, BundleWriter, Compression
from kitelib.upcycle.unit import RecyclableUnit, inspect, peek

__all__ = ["ExportSummary", "LivePool", "described_model", "export_pool", "export_units", "leaves_to_read"]

_BATCH_BYTES: Final = 32 * 2**20
_BATCH_UNITS: Final = 64
_TOP: Final = 200
_THREADS: Final = 2
_FEWEST_LEAVES: Final = 2000
_MOST_LEAVES: Final = 20_000

Progress = Callable[[str, "float | None"], None]


@dataclasses.dataclass(frozen=True, slots=True)
class ExportSummary:
    """What an export wrote and what it left out.

    Attributes:
        bundle: the bundle.
        fewest_hits: hits of the unit in it that was used least.
        leaves: different blocks that requests used last, as far as the ledger tells.
        lost: those of them that are not in the pool any more, or lack a block before them.
        refused: units that were chosen, but failed a check, and those that go on from them.
        unknown: namespaces that were asked for and have no units in the pool under this `namespace_secret`.
    """

    bundle: BundleSummary
    fewest_hits: int
    leaves: int
    lost: int
    refused: int
    unknown: tuple[str, ...] = ()


class LivePool(Protocol):
    """The pool of a running engine, as an export sees it; `kitelib.engine.exporting.LivePool` is one."""

    async def view(self, days: int, limit: int) -> PoolView:
        """What it holds, with the hits of so many days, at most `limit` entries of each ledger."""
        ...


def leaves_to_read(top: int) -> int:
    """How many entries of a ledger an export of so many units should look at."""
    return min(max(_FEWEST_LEAVES, 10 * top), _MOST_LEAVES)


async def export_pool(
    pool: LivePool, path: str | os.PathLike[str], *, days: int = 7, top: int = _TOP, **options: Any
) -> ExportSummary:
    """Writes the units that the fleet used most, as far as this engine's tiers know, to a bundle.

    Hits that this process has not published yet, and units in its memory and in preloaded bundles, count too. Without a
    tier that counts hits, only this process's own are known.

    Args:
        pool: the pool of a running engine.
        path: the bundle to be.
        days: how many days of hits to add up, today included; 1 to 8.
        top: as of `export_units`.
        options: ``min_hits``, ``max_bytes``, ``namespaces``, ``with_completions``, ``compression``, ``sign_key``,
            ``labels``, ``progress``: as of `export_units`.

    Raises:
        ConfigError, FormatError, MissingExtraError: as `export_units`. A tier that fails is a miss.
    """
    _check("days", days, HIT_DAYS)
    _check("top", top)
    view = await pool.view(days, leaves_to_read(top))
    return await export_units(view, path, door=ThreadDoor(_THREADS), top=top, **options)


async def export_units(
    view: PoolView,
    path: str | os.PathLike[str],
    *,
    door: ThreadDoor,
    top: int = _TOP,
    min_hits: int = 1,
    max_bytes: int | None = None,
    namespaces: Sequence[str | None] = (None,),
    with_completions: bool = True,
    compression: Compression = "none",
    sign_key: str | os.PathLike[str] | None = None,
    labels: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> ExportSummary:
    """Writes the KV of the blocks that requests used most to a bundle, with what those prompts ended in. The units have
    the numerics of the engines that computed them.

    A block counts a hit for every request that used it or a block after it, so a block's ancestors have at least as
    many, are among the `top` before it, and are always in the bundle with it. A unit that is damaged, void, lossy
    without the root saying so, or not authenticated where a key is set, is left out with all that goes on from it.

    Args:
        view: the pool.
        path: the bundle to be.
        door: runs what blocks.
        top: most blocks of KV, ancestors included. Logits and completions come with theirs and don't count.
        min_hits: fewest hits of a block.
        max_bytes: most bytes of the file; what is worth most per byte stays.
        namespaces: tenants whose units may go into the file; None is the engine's own. No other one ever does.
        with_completions: also the tokens that followed prompts, where the pool has them.
        compression, labels, sign_key: as of `BundleWriter`.
        progress: called with a stage and, where known, the part of it that is done; from threads as well.

    Raises:
        ConfigError: an argument is out of range, nothing was used that often, nothing of it can be used, or the file
            can't be written.
        FormatError: what the pool says of its model can't be read.
        StoreError: a tier that only gives errors.
        MissingExtraError: signing without `cryptography`.
    """
    _check("top", top)
    _check("min_hits", min_hits)
    tell = progress or (lambda _stage, _part: None)
    model = described_model(view)
    roots = await door.run(lambda: _known_roots(view, model, namespaces))
    leaves = await door.run(lambda: _leaves(view, roots, top))
    tell("following prompts to their start", None)
    tree = await grow(view, model, roots, leaves, door)
    chosen = await door.run(lambda: tree.choose(top, min_hits, with_completions=with_completions))
    if not chosen:
        raise ConfigError(_nothing(view, roots, tree.leaves, tree.most_hits, min_hits))
    writer = await door.run(
        lambda: BundleWriter(path, model, compression=compression, epoch=view.epoch, labels=labels),
        discard=lambda made: made.abandon(),
    )
    try:
        copier = _Copier(view, model, writer, door)
        for done, batch in _batches(chosen, model):
            tell("reading units", done / len(chosen))
            await copier.copy(batch)
        if not copier.added:
            raise ConfigError(
                f"none of the {len(chosen)} units chosen passed its checks, the last because {copier.why}; is hmac_key "
                "that of the pool?"
            )
        bundle = await door.run(
            lambda: writer.finish(
                max_bytes=max_bytes,
                sign_key=sign_key,
                hmac_key=view.hmac_key,
                progress=lambda done, total: tell("writing", done / total if total else 1.0),
            )
        )
    finally:
        await to_the_end(writer.abandon)  # giving gigabytes back takes its time
    known = {root.namespace for root in roots.values()}
    unknown = tuple(name for name in dict.fromkeys(namespaces) if name is not None and name not in known)
    return ExportSummary(bundle, copier.fewest_hits, tree.leaves, tree.lost, len(chosen) - copier.added, unknown)


def _check(name: str, number: Any, highest: int = 10**9) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= highest:
        raise ConfigError(f"{name} is {number!r}; give a whole number from 1 to {highest:,}")


def described_model(view: PoolView) -> ModelIdentity:
    """The model that a pool's ledger describes.

    Raises:
        FormatError: it describes none, or another one.
    """
    text = view.roots.get(MODEL_FIELD)
    if text is None:
        raise FormatError(
            f"the pool does not say what the model {view.model} is; that is written with the first hits, by every engine "
            "that serves it"
        )
    model = model_of(parse(text.encode("ascii", "replace"), "the description of the model"))
    if model_key(model.model_state) != view.model:
        raise FormatError(f"the pool describes another model than {view.model}; remove its counts, or wait a day")
    return model


def _known_roots(view: PoolView, model: ModelIdentity, namespaces: Sequence[str | None]) -> dict[bytes, BundleRoot]:
    """The roots that are those of the namespaces wanted. A description is a hint that anybody may have written, so the
    root is computed anew: it decides whose units these are.

    Raises:
        FormatError: all of them are of other sizes than the model is said to have.
    """
    roots: dict[bytes, BundleRoot] = {}
    other: dict[str, Any] = {}
    for name, text in view.roots.items():
        if name == MODEL_FIELD:
            continue
        try:
            plain = parse(text.encode("ascii", "replace"), "the description of a root")
            plain.pop("private", None)
            said = root_of({"namespace": None, **plain, "root": name})
        except (FormatError, AttributeError, TypeError):
            continue
        for namespace in namespaces:
            root = root_fingerprint(
                model.model_state,
                said.execution_path,
                namespace,
                namespace_secret=view.namespace_secret,
                adapter=said.adapter,
            )
            if root != said.root:
                continue
            sizes = {"block_tokens": model.block_tokens, "layout": model.layout}
            differs = {field: said.execution_path.get(field, size) for field, size in sizes.items()}
            if differs == sizes:
                roots[root] = dataclasses.replace(said, namespace=namespace)
            else:  # engines of one model may have other sizes, but a bundle has one
                other = differs
    if other and not roots:
        raise FormatError(
            f"the pool says of its model that it has block_tokens {model.block_tokens} and the layout {model.layout!r:.80}, "
            f"and of its units {other['block_tokens']!r:.80} and {other['layout']!r:.80}; remove its counts, or wait a day"
        )
    return roots


def _leaves(view: PoolView, roots: Mapping[bytes, BundleRoot], top: int) -> dict[tuple[bytes, bytes], int]:
    """Hits of the blocks of these roots, most first."""
    known = {root.hex() for root in roots}
    leaves = {}
    for member, hits in most_hit(view.hits, len(view.hits)).items():
        root, _, cf = member.partition(":")
        if root in known and is_member(member, hits):
            leaves[bytes.fromhex(root), bytes.fromhex(cf)] = hits
            if len(leaves) == leaves_to_read(top):
                break
    return leaves


def _nothing(view: PoolView, roots: Mapping[bytes, BundleRoot], leaves: int, most_hits: int, min_hits: int) -> str:
    if not view.hits:
        return f"the pool has no hits of the model {view.model} on these days; look further back, or wait for requests"
    if not roots:
        return (
            "the pool has hits, but none in the namespaces that were asked for; name them, and give the "
            "namespace_secret if the pool has one"
        )
    if most_hits:
        return f"no unit has {min_hits} hits; the most is {most_hits}: lower min_hits, or look further back"
    return f"of {leaves} blocks that were used none is in the pool any more with all that stands before it"


def _batches(chosen: Sequence[HotUnit], model: ModelIdentity) -> Iterator[tuple[int, Sequence[HotUnit]]]:
    """Units in order, so many at a time that they take about 32 MiB, or one."""
    largest = max(model.block_bytes, 4 * model.vocab_size, 1)
    size = max(1, min(_BATCH_UNITS, _BATCH_BYTES // largest))
    for start in range(0, len(chosen), size):
        yield start, chosen[start : start + size]


class _Copier:
    """Reads units, checks them, and gives them to a writer; parents must come before children.

    Attributes:
        added: units that the writer took.
        fewest_hits: hits of the one of these that was used least.
        why: what was wrong with the last that was refused.
    """

    def __init__(self, view: PoolView, model: ModelIdentity, writer: BundleWriter, door: ThreadDoor) -> None:
        self.added = self.fewest_hits = 0
        self.why = "it is not there any more"
        self._view = view
        self._model = model
        self._writer = writer
        self._door = door
        self._there: set[bytes] = set()  # KV that the bundle has
        self._keys: dict[bytes, bytes | None] = {}

    async def copy(self, batch: Sequence[HotUnit]) -> None:
        """Takes a batch; what one source lacks, or has damaged, is looked for in the next."""
        units: dict[str, RecyclableUnit] = {}
        missing = list(batch)
        for source in self._view.sources:
            if not missing:
                break
            values = await source.read([each.key for each in missing])
            pairs = [(each, value) for each, value in zip(missing, values, strict=True) if value is not None]
            units |= await self._door.run(lambda source=source, pairs=pairs: self._checked(source, pairs))  # type: ignore[misc]
            missing = [each for each in missing if each.key not in units]
        await self._door.run(lambda: self._add(batch, units))

    def _checked(self, source: StoredUnits, pairs: Sequence[tuple[HotUnit, bytes]]) -> dict[str, RecyclableUnit]:
        """The good ones by key. In a thread."""
        units = {}
        for wanted, value in pairs:
            try:
                units[wanted.key] = self._check(source, wanted, value)
            except Exception as error:  # noqa: BLE001 - bytes from a store may break anything that reads them
                self.why = str(error)
        return units

    def _check(self, source: StoredUnits, wanted: HotUnit, value: bytes) -> RecyclableUnit:
        head = peek(value)
        # What no unit of the model has is not decoded. Of a layout the head says nothing; the writer looks at it.
        fault = unit_fault(self._model, wanted.kind, self._model.layout, head.num_tokens, head.data_bytes)
        if fault is not None:
            raise FormatError(f"it {fault}")
        unit = inspect(value, hmac_key=self._key(wanted.root) if source.outside else None)
        if (unit.kind, unit.cf, unit.model_state) != (wanted.kind, wanted.cf, self._model.model_state):
            raise FormatError("it lies under the key of another")
        if unit.parent != wanted.parent:
            raise FormatError("it goes on from another block than its first bytes said")
        if unit.epoch < self._view.epoch:
            raise FormatError("an invalidation made it void")
        return unit

    def _key(self, root: BundleRoot) -> bytes | None:
        if root.root not in self._keys:
            self._keys[root.root] = unit_key(self._view.hmac_key, root.namespace, self._view.namespace_secret)
        return self._keys[root.root]

    def _add(self, batch: Sequence[HotUnit], units: Mapping[str, RecyclableUnit]) -> None:
        """In a thread, one batch at a time."""
        for wanted in batch:
            unit = units.get(wanted.key)
            if unit is None or (wanted.parent != wanted.root.root and wanted.parent not in self._there):
                continue
            try:
                self._writer.add(unit, wanted.root, hits=min(float(wanted.hits), MAX_HITS))
            except InvalidRequestError as error:
                self.why = str(error)
                continue
            self.fewest_hits = min(wanted.hits, self.fewest_hits) if self.added else wanted.hits
            self.added += 1
            if unit.kind == "kv":
                self._there.add(wanted.cf)
