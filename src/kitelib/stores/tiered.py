"""The outer tiers together: where a run is, reading it, and which unit belongs to which tier."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import anyio

from kitelib.abc import Clock
from kitelib.config import TierThresholds
from kitelib.errors import StoreError
from kitelib.stores.heat import Heat
from kitelib.stores.locating import locate
from kitelib.stores.tier import Pending, Tier

__all__ = ["Span", "Tiers"]

_SHARED: Final = "redis"  # the tier that `PoolConfig.share` is about
_MAX_TO_SHARE: Final = 4096  # keys; a warm unit that is forgotten here gets another chance with its next hit
_SHARE_BATCH: Final = 16
_FALLBACK_S: Final = 0.02  # a second try for a value that just vanished is only worth a short read


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A part of a run that one tier has.

    Attributes:
        tier: who has it.
        first: index of its first key in the run.
        count: how many keys.
    """

    tier: Tier
    first: int
    count: int


class Tiers:
    """The outer tiers. Used on the event loop only; no method raises for what a store does.

    New units go to every tier but the archive (to Redis at once or when they are warm, see `PoolConfig.share`). What
    is read from a slower tier is copied to faster ones when it is hot, and from the archive always to the fastest
    tier. Copies are the stored bytes as they are, and queue like all other writes.

    Args:
        tiers: fastest first; one named "s3" is the archive, and comes last.
        thresholds: what hot and warm mean.
        share: "at_once" or "when_warm".
        resident: gives the value of a key that process memory holds, for units that become warm by hits there; None
            looks into the fastest tier.
        clock: time source for counting hits.

    Attributes:
        tiers: as given.
        promoted: values that were offered to a faster tier, or to Redis because they became warm.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        thresholds: TierThresholds,
        share: str,
        resident: Callable[[str], Pending | None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.tiers = tuple(tiers)
        self.promoted = 0
        self._thresholds = thresholds
        self._share_at_once = share == "at_once"
        self._resident = resident
        self._heat = Heat(clock=clock)
        self._redis = next((tier for tier in self.tiers if tier.name == _SHARED), None)
        self._late = frozenset(index for index, tier in enumerate(self.tiers) if tier.is_archive)
        self._left_behind: set[asyncio.Task[Any]] = set()
        self._to_share: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._share_wake = asyncio.Event()

    @property
    def archive(self) -> Tier | None:
        """The tier of cold units, if there is one above which others stand."""
        return self.tiers[-1] if len(self.tiers) > 1 and self.tiers[-1].is_archive else None

    # Reading

    async def locate(self, keys: Sequence[str], *, budget_s: float | None = None) -> list[Span]:
        """Where the leading run is: each position by the fastest tier that has it, cut at the first that none has.

        Tiers are asked concurrently, a few questions each at most, so a run with many holes may be cut early or given
        to a slower tier. The archive is only asked for what no other has.

        Args:
            budget_s: seconds to wait at most; a tier that does not answer in time counts as having nothing.
        """
        if not keys or not self.tiers:
            return []
        asks = [tier.leading_run for tier in self.tiers]
        owners = await locate(asks, keys, late=self._late, budget_s=budget_s, left_behind=self._leave)
        spans: list[Span] = []
        for position, owner in enumerate(owners):
            tier = self.tiers[owner]
            if spans and spans[-1].tier is tier:
                spans[-1] = Span(tier, spans[-1].first, spans[-1].count + 1)
            else:
                spans.append(Span(tier, position, 1))
        return spans

    def _leave(self, task: asyncio.Task[Any]) -> None:
        """A question that ends by itself: cancelling it would cost some stores their connection."""
        self._left_behind.add(task)
        task.add_done_callback(self._left_behind.discard)

    async def read(self, span: Span, keys: Sequence[str], *, timeout_s: float | None = None) -> list[bytes | None]:
        """Values of a span that `locate` found, or of a part of it, in order. What vanished meanwhile is looked for in
        the next slower tier if that is quick.

        Args:
            keys: those of the span.
            timeout_s: seconds after which all that did not come is a miss; None means the tier's own.
        """
        values = await span.tier.get_many(keys, timeout_s=timeout_s)
        self._note_read(span.tier, keys, values)
        if None in values:
            await self._fill(span.tier, keys, values)
        return values

    async def _fill(self, tier: Tier, keys: Sequence[str], values: list[bytes | None]) -> None:
        index = self.tiers.index(tier) + 1
        if index == len(self.tiers) or all(value is None for value in values):
            return  # the tier as a whole failed: whoever planned this has to plan anew
        missing = [position for position, value in enumerate(values) if value is None]
        other = self.tiers[index]
        seconds = other.cost.read_seconds(int(len(missing) * tier.mean_bytes))
        if other.is_archive or seconds > _FALLBACK_S or not other.breaker.allows():
            return
        wanted = [keys[position] for position in missing]
        found = await other.get_many(wanted, timeout_s=min(other.timeout_s, 2 * _FALLBACK_S))
        self._note_read(other, wanted, found)
        for position, value in zip(missing, found, strict=True):
            values[position] = value

    async def get_many(self, keys: Sequence[str], *, timeout_s: float | None = None) -> list[tuple[Tier, bytes] | None]:
        """Values and who had them, in order: the fastest tier is asked first, for what it lacks the next. For a few
        keys.

        Args:
            timeout_s: seconds per tier; None means each tier's own.
        """
        values: list[tuple[Tier, bytes] | None] = [None] * len(keys)
        missing = list(range(len(keys)))
        for tier in self.tiers:
            if not missing:
                break
            wanted = [keys[position] for position in missing]
            found = await tier.get_many(wanted, timeout_s=timeout_s)
            self._note_read(tier, wanted, found)
            for position, value in zip(missing, found, strict=True):
                values[position] = None if value is None else (tier, value)
            missing = [position for position in missing if values[position] is None]
        return values

    # Heat and promotion

    def note_hit(self, key: str) -> None:
        """The unit was used, from wherever it came."""
        self._heat.note(key)
        if self._redis is not None and not self._share_at_once and self._turns_warm(key):
            self._to_share[key] = None
            while len(self._to_share) > _MAX_TO_SHARE:
                self._to_share.popitem(last=False)
            self._share_wake.set()

    def is_hot(self, key: str) -> bool:
        """Whether the unit had more than `TierThresholds.hot_hits_per_hour` hits within an hour."""
        return self._heat.per_hour(key) > self._thresholds.hot_hits_per_hour

    def is_warm(self, key: str) -> bool:
        """Whether the unit had more than `TierThresholds.warm_hits_per_day` hits within 24 hours."""
        return self._heat.per_day(key) > self._thresholds.warm_hits_per_day

    def idle_s(self, key: str) -> float:
        """Seconds since this process used the unit; infinite if it does not remember that."""
        return self._heat.idle_s(key)

    def _turns_warm(self, key: str) -> bool:
        """Whether the last hit was the one that made it warm, so that it is shared once and not with every hit."""
        count = self._heat.per_day(key)
        return count > self._thresholds.warm_hits_per_day >= count - 1

    def _note_read(self, tier: Tier, keys: Sequence[str], values: Sequence[bytes | None]) -> None:
        faster = self.tiers[: self.tiers.index(tier)]
        for key, value in zip(keys, values, strict=True):
            if value is None:
                continue
            self.note_hit(key)
            if not faster:
                continue
            targets = list(faster) if self.is_hot(key) else []
            if tier.is_archive and not targets:
                targets = [faster[0]]
                if self._redis in faster[1:] and self.is_warm(key):
                    targets.append(self._redis)
            self._copy(key, value, targets)

    def _copy(self, key: str, value: bytes, targets: Sequence[Tier | None]) -> None:
        copy = Pending(key, len(value), lambda _: value)
        for target in targets:
            if target is not None:
                target.offer([copy])
                self.promoted += 1

    # Writing

    def offer(self, pending: Sequence[Pending]) -> None:
        """Queues new units for the tiers they belong to, and returns at once. They reach the archive only when they
        are cold, unless it is the only outer tier."""
        for tier in self.tiers:
            self.offer_to(tier, pending)

    def offer_to(self, tier: Tier, pending: Sequence[Pending]) -> None:
        """As `offer`, for one tier."""
        if tier is self._redis and not self._share_at_once:
            tier.offer([each for each in pending if self.is_warm(each.key)])
        elif tier is not self.archive:
            tier.offer(pending)

    async def run_sharing(self) -> None:
        """Copies units that became warm to Redis, for ever."""
        while True:
            while not self._to_share:
                self._share_wake.clear()
                await self._share_wake.wait()
            keys = [self._to_share.popitem(last=False)[0] for _ in range(min(_SHARE_BATCH, len(self._to_share)))]
            await self._share(keys)

    async def _share(self, keys: Sequence[str]) -> None:
        if self._redis is None:
            return
        rest = []
        for key in keys:
            pending = None if self._resident is None else self._resident(key)
            if pending is None:
                rest.append(key)
            else:
                self._redis.offer([pending])
                self.promoted += 1
        source = self.tiers[0]
        if rest and source is not self._redis:
            for key, value in zip(rest, await source.get_many(rest), strict=True):
                if value is not None:
                    self._copy(key, value, [self._redis])

    async def delete_many(self, keys: Sequence[str]) -> int:
        """Deletes in every tier; returns how many values were deleted, all tiers together."""
        for key in keys:
            self._to_share.pop(key, None)
        return sum(await asyncio.gather(*[tier.delete_many(keys) for tier in self.tiers]))

    # Managing

    def jobs(self) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
        """Names and functions of what has to be kept running."""
        jobs: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            (f"write-{tier.name}", tier.run_writer) for tier in self.tiers
        ]
        if self._redis is not None and not self._share_at_once:
            jobs.append(("share", self.run_sharing))
        return jobs

    async def warm(self, deadline_s: float) -> dict[str, str]:
        """Opens all tiers at once: name -> "ready", or why it is not."""
        answers = await asyncio.gather(*[self._warm(tier, deadline_s) for tier in self.tiers])
        return dict(zip(self._names(), answers, strict=True))

    async def _warm(self, tier: Tier, deadline_s: float) -> str:
        try:
            with anyio.fail_after(deadline_s):
                await (tier.shared.warm() if tier.shared is not None else tier.background.stats())
        except TimeoutError:
            return f"not ready within {deadline_s:g} s"
        except StoreError as error:
            return str(error)
        await tier.refresh()
        return "ready"

    def void(self) -> None:
        """After an invalidation: nothing that is on its way is to arrive."""
        self._to_share.clear()
        for tier in self.tiers:
            tier.void()

    async def settle(self) -> None:
        """Waits until all that was offered is written or dropped."""
        await asyncio.gather(*[tier.settle() for tier in self.tiers])

    async def drain(self, deadline_s: float) -> int:
        """Waits until all that was offered is written; returns how many values were dropped at the deadline."""
        return sum(await asyncio.gather(*[tier.drain(deadline_s) for tier in self.tiers]))

    async def aclose(self) -> None:
        """Closes all tiers at once. Idempotent."""
        for task in self._left_behind:
            task.cancel()
        await asyncio.gather(*[tier.aclose() for tier in self.tiers])

    def notes(self) -> list[str]:
        """A plain sentence about each tier that can't be written."""
        failures = {tier.name: tier.write_failure for tier in self.tiers if tier.write_failure}
        return [f"the tier {name!r} is read and not written to: {why}" for name, why in failures.items()]

    def stats(self) -> dict[str, dict[str, int | float | str]]:
        """Counters of each tier by name. No I/O."""
        return dict(zip(self._names(), [tier.counters() for tier in self.tiers], strict=True))

    def _names(self) -> list[str]:
        """Names, told apart by a number where two third-party tiers share one."""
        names: list[str] = []
        for tier in self.tiers:
            same = sum(name == tier.name or name.startswith(f"{tier.name}-") for name in names)
            names.append(f"{tier.name}-{same + 1}" if same else tier.name)
        return names
