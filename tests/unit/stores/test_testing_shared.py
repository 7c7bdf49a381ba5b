"""The suite for shared stores finds each way to break one."""

import collections
import re

import anyio
import anyio.lowlevel
import pytest

from kitelib.abc import SharedStore, StoredItem
from kitelib.errors import StoreError
from kitelib.stores.memory import MemoryStore
from kitelib.testing import Fault, FaultyStore, check_shared_store, check_store, fault_every

ROOM = 8 * 2**20


class Place:
    """What several handles share."""

    def __init__(self):
        self.values = MemoryStore(ROOM)
        self.epochs = {}


class Shared:
    """The smallest right shared store: several handles on one place in this process."""

    def __init__(self, place):
        self.place = place

    async def get_many(self, keys):
        return await self.place.values.get_many(keys)

    async def put_many(self, items):
        await self.place.values.put_many(items)

    async def leading_run(self, keys):
        return await self.place.values.leading_run(keys)

    async def delete_many(self, keys):
        return await self.place.values.delete_many(keys)

    async def stats(self):
        return await self.place.values.stats()

    async def aclose(self):
        pass

    async def warm(self):
        pass

    async def list_items(self):
        keys = [key for key in list(self.keys()) if key.startswith("kite:")]
        for start in range(0, len(keys), 40):
            await anyio.lowlevel.checkpoint()
            values = await self.place.values.get_many(keys[start : start + 40])
            pairs = zip(keys[start : start + 40], values, strict=True)
            yield [StoredItem(key, len(value)) for key, value in pairs if value is not None]

    async def get_heads(self, keys, num_bytes):
        return [value if value is None else value[:num_bytes] for value in await self.get_many(keys)]

    async def get_epoch(self, name):
        self.check(name)
        await anyio.lowlevel.checkpoint()
        return self.place.epochs.get(name, 0)

    async def raise_epoch(self, name, epoch):
        self.check(name, epoch)
        await anyio.lowlevel.checkpoint()
        now = self.place.epochs[name] = max(epoch, self.place.epochs.get(name, 0))
        return now

    def keys(self):
        return self.place.values.keys()

    def check(self, name, epoch=0):
        if not re.fullmatch(r"[0-9a-z_.-]{1,64}", name) or not 0 <= epoch < 2**63:
            raise StoreError("a bad epoch")


def places(kind):
    known = collections.defaultdict(Place)
    return lambda name: kind(known[name])


class HasNoList(Shared):
    list_items = None


class ListsTheFirstPage(Shared):
    async def list_items(self):
        async for page in super().list_items():
            yield page
            return


class ListsOthers(Shared):
    async def list_items(self):
        yield [StoredItem(key, len(self.place.values.get(key))) for key in self.keys()]


class ListsWrongSizes(Shared):
    async def list_items(self):
        async for page in super().list_items():
            yield [StoredItem(item.key, item.num_bytes + 100) for item in page]


class ListsMilliseconds(Shared):
    async def list_items(self):
        async for page in super().list_items():
            yield [StoredItem(item.key, item.num_bytes, written_at=1.7e12) for item in page]


class ListsByPosition(Shared):
    async def list_items(self):
        position = 0
        while keys := sorted(self.keys())[position : position + 5]:
            values = [(key, self.place.values.get(key)) for key in keys]
            yield [StoredItem(key, len(value)) for key, value in values if value is not None and key[:5] == "kite:"]
            position += 5
            await anyio.sleep(0.001)


class GivesWholeValues(Shared):
    async def get_heads(self, keys, num_bytes):
        return await self.get_many(keys)


class HeadsForgetMisses(Shared):
    async def get_heads(self, keys, num_bytes):
        return [head for head in await super().get_heads(keys, num_bytes) if head is not None]


class HeadsMissTheEmpty(Shared):
    async def get_heads(self, keys, num_bytes):
        return [head or None for head in await super().get_heads(keys, num_bytes)]


class LastRaiserWins(Shared):
    async def raise_epoch(self, name, epoch):
        self.check(name, epoch)
        self.place.epochs[name] = epoch
        return epoch


class ReadsThenWrites(Shared):
    async def raise_epoch(self, name, epoch):
        now = max(epoch, await self.get_epoch(name))
        self.check(name, epoch)
        await anyio.sleep(0.001)
        self.place.epochs[name] = now
        return now


class ComparesText(Shared):
    async def raise_epoch(self, name, epoch):
        self.check(name, epoch)
        now = self.place.epochs[name] = int(max(str(epoch), str(self.place.epochs.get(name, 0))))
        return now


class AnswersWhatWasAsked(Shared):
    async def raise_epoch(self, name, epoch):
        await super().raise_epoch(name, epoch)
        return epoch


class UsesFloats(Shared):
    async def raise_epoch(self, name, epoch):
        return int(float(await super().raise_epoch(name, epoch)))


class OneEpochForAll(Shared):
    async def get_epoch(self, name):
        self.check(name)
        return max(self.place.epochs.values(), default=0)


class TakesAnyName(Shared):
    def check(self, name, epoch=0):
        if not 0 <= epoch < 2**63:
            raise StoreError("a bad epoch")


class TakesAnyEpoch(Shared):
    def check(self, name, epoch=0):
        super().check(name)


class KeepsEpochsAmongValues(Shared):
    async def raise_epoch(self, name, epoch):
        self.place.values.put(f"kite:epoch:{name}", b"x")
        return await super().raise_epoch(name, epoch)


class EpochsGoWithValues(Shared):
    async def delete_many(self, keys):
        self.place.epochs.clear()
        return await super().delete_many(keys)


class CachesReads(Shared):
    def __init__(self, place):
        super().__init__(place)
        self.cache = {}

    async def get_many(self, keys):
        for key, value in zip(keys, await super().get_many(keys), strict=True):
            if value is not None:
                self.cache.setdefault(key, value)
        return [self.cache.get(key) for key in keys]


class EmptiesAtTheEnd(Shared):
    async def aclose(self):
        self.place.values.clear()


class WarmsByEmptying(Shared):
    async def warm(self):
        self.place.values.clear()


class Counts(Shared):
    """A right one that also adds up hits."""

    def __init__(self, place):
        super().__init__(place)
        place.hits = getattr(place, "hits", {})
        place.texts = getattr(place, "texts", {})

    async def add_hits(self, model, day, hits, roots):
        if any(not re.fullmatch(r"[0-9a-f]{64}:[0-9a-f]{64}", member) or count < 1 for member, count in hits.items()):
            raise StoreError("bad hits")
        counts = self.place.hits.setdefault((model, day), collections.Counter())
        for member, count in hits.items():
            counts[member] += count
        self.place.texts.setdefault(model, {}).update(roots)

    async def read_hits(self, model, days, limit):
        found = sum((self.place.hits.get((model, day), collections.Counter()) for day in days), collections.Counter())
        return dict(found.most_common(limit)), dict(self.place.texts.get(model, {}))

    async def hit_models(self):
        return sorted({model for model, _ in self.place.hits})


class CountsOnlyTheLast(Counts):
    async def add_hits(self, model, day, hits, roots):
        await super().add_hits(model, day, hits, roots)
        self.place.hits[model, day].update(
            {member: count - self.place.hits[model, day][member] for member, count in hits.items()}
        )


class CountsForOneDay(Counts):
    async def read_hits(self, model, days, limit):
        return await super().read_hits(model, days[-1:], limit)


class CountsWithoutLimit(Counts):
    async def read_hits(self, model, days, limit):
        return await super().read_hits(model, days, None)


class CountsAllModelsAlike(Counts):
    async def read_hits(self, model, days, limit):
        return await super().read_hits("model-a", days, limit)


class ForgetsDescriptions(Counts):
    async def read_hits(self, model, days, limit):
        return (await super().read_hits(model, days, limit))[0], {}


class CountsAnything(Counts):
    async def add_hits(self, model, day, hits, roots):
        if all(":" in member and count > 0 for member, count in hits.items()):
            await super().add_hits(model, day, hits, roots)


class NamesNoModels(Counts):
    async def hit_models(self):
        return []


class KeepsHitsAmongValues(Counts):
    async def add_hits(self, model, day, hits, roots):
        await super().add_hits(model, day, hits, roots)
        if model == "model":
            self.place.values.put("kite:hits", b"1")


class OnePlaceForAll(Shared):
    everywhere = Place()

    def __init__(self, place):
        super().__init__(self.everywhere)


def test_a_right_store_passes():
    anyio.run(check_shared_store, places(Shared))
    anyio.run(check_shared_store, places(Counts))
    anyio.run(check_store, lambda: Shared(Place()))


@pytest.mark.parametrize(
    ("broken", "promise"),
    [
        (HasNoList, "every method of SharedStore|not callable"),
        (ListsTheFirstPage, "list every key"),
        (ListsOthers, "no other"),
        (ListsWrongSizes, "num_bytes must be"),
        (ListsMilliseconds, "seconds since 1970"),
        (ListsByPosition, "must be listed, whatever changes"),
        (GivesWholeValues, "first bytes"),
        (HeadsForgetMisses, "first bytes"),
        (HeadsMissTheEmpty, "first bytes"),
        (CountsOnlyTheLast, "two handles must add up"),
        (CountsForOneDay, "two days must add up"),
        (CountsWithoutLimit, "within the limit"),
        (CountsAllModelsAlike, "its own counts"),
        (ForgetsDescriptions, "descriptions must come back"),
        (CountsAnything, "must be refused"),
        (NamesNoModels, "name all models"),
        (KeepsHitsAmongValues, "hits must not count as items"),
        (LastRaiserWins, "not lower an epoch"),
        (ReadsThenWrites, "an epoch must"),
        (ComparesText, "able to raise an epoch"),
        (AnswersWhatWasAsked, "give the greater one"),
        (UsesFloats, "2\\*\\*63"),
        (OneEpochForAll, "independent"),
        (TakesAnyName, "name '' must be refused"),
        (TakesAnyEpoch, "epoch -1 must be refused"),
        (KeepsEpochsAmongValues, "list_items must list every key|epochs must not count"),
        (EpochsGoWithValues, "an epoch must stay"),
        (CachesReads, "must read what the second replaced|second deleted"),
        (EmptiesAtTheEnd, "must stay when the handle"),
        (WarmsByEmptying, "warm must change nothing"),
        (OnePlaceForAll, "."),
    ],
)
def test_each_broken_promise_of_a_shared_store_is_found(broken, promise):
    with pytest.raises((AssertionError, TypeError), match=promise):
        anyio.run(check_shared_store, places(broken))


def test_a_faulty_store_is_shared_if_what_it_breaks_is():
    def quiet(operation, call):
        return None

    assert isinstance(FaultyStore(Shared(Place()), quiet), SharedStore)
    assert not isinstance(FaultyStore(MemoryStore(ROOM), quiet), SharedStore)
    make = places(Shared)
    anyio.run(check_shared_store, lambda place: FaultyStore(make(place), quiet))


async def _keys(store):
    return [item.key async for page in store.list_items() for item in page]


CALLS = {
    "warm": lambda store: store.warm(),
    "get_heads": lambda store: store.get_heads(["kite:a", "kite:b"], 3),
    "get_epoch": lambda store: store.get_epoch("model"),
    "raise_epoch": lambda store: store.raise_epoch("model", 9),
    "list_items": _keys,
}


async def _filled(fault, operation):
    inner = Shared(Place())
    await inner.put_many([("kite:a", b"one two"), ("kite:b", b"three")])
    await inner.raise_epoch("model", 4)
    return inner, FaultyStore(inner, fault_every(1, fault, operation))


@pytest.mark.parametrize("operation", CALLS)
async def test_a_faulty_shared_store_fails_on_schedule(operation):
    _, store = await _filled(Fault("fail"), operation)
    with pytest.raises(StoreError, match=operation):
        await CALLS[operation](store)
    assert store.faults == 1


@pytest.mark.parametrize(
    ("operation", "answer"),
    [("warm", None), ("get_heads", [None, None]), ("get_epoch", 0), ("raise_epoch", 9), ("list_items", [])],
)
async def test_a_faulty_shared_store_loses_what_it_is_asked_for(operation, answer):
    inner, store = await _filled(Fault("lose"), operation)
    assert await CALLS[operation](store) == answer
    assert await inner.get_epoch("model") == 4, "what is lost is not done"


async def test_a_faulty_shared_store_spoils_heads():
    _, store = await _filled(Fault("swap"), "get_heads")
    assert await CALLS["get_heads"](store) == [b"thr", b"one"]


async def test_a_faulty_shared_store_lists_late():
    _, store = await _filled(Fault("delay", 0.001), "list_items")
    assert await CALLS["list_items"](store) == ["kite:a", "kite:b"]
