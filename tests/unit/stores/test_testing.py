"""The contract suite finds each way to break a store; a check that nothing fails would prove nothing."""

import dataclasses

import anyio
import pytest

from kitelib.abc import StoreStats
from kitelib.errors import StoreError
from kitelib.stores.memory import MemoryStore
from kitelib.testing import Fault, FaultyStore, check_store, fault_every

ROOM = 8 * 2**20


class FiltersMisses(MemoryStore):
    async def get_many(self, keys):
        return [value for value in await super().get_many(keys) if value is not None]


class SortsKeys(MemoryStore):
    async def get_many(self, keys):
        return await super().get_many(sorted(keys))


class ForgetsRepeats(MemoryStore):
    async def get_many(self, keys):
        return await super().get_many(list(dict.fromkeys(keys)))


class ReadsLines(MemoryStore):
    async def put_many(self, items):
        await super().put_many([(key, value.replace(b"\r\n", b"\n")) for key, value in items])


class EmptyIsMissing(MemoryStore):
    async def get_many(self, keys):
        return [value or None for value in await super().get_many(keys)]


class KeepsTheFirst(MemoryStore):
    async def put_many(self, items):
        await super().put_many([(key, value) for key, value in items if not self.contains(key)])


class CountsAll(MemoryStore):
    async def leading_run(self, keys):
        return sum(self.contains(key) for key in keys)


class RunIsOneTooLong(MemoryStore):
    async def leading_run(self, keys):
        return min(len(keys), await super().leading_run(keys) + 1)


class CountsWhatWasAsked(MemoryStore):
    async def delete_many(self, keys):
        await super().delete_many(keys)
        return len(keys)


class DeletesNothing(MemoryStore):
    async def delete_many(self, keys):
        return sum(self.contains(key) for key in keys)


class WritesInTwoSteps(MemoryStore):
    async def put_many(self, items):
        for key, value in items:
            self.put(key, value[: len(value) // 2])
            await anyio.sleep(0)
            self.put(key, value)


class VanishesWhileReplacing(MemoryStore):
    async def put_many(self, items):
        for key, value in items:
            self.delete(key)
            await anyio.sleep(0)
            self.put(key, value)


class SharesAnAnswer(MemoryStore):
    answer: list = []  # noqa: RUF012

    async def get_many(self, keys):
        self.answer.clear()
        for key in keys:
            self.answer.append(self.get(key))
            await anyio.sleep(0)
        return list(self.answer)


class CountsNothing(MemoryStore):
    async def stats(self):
        counters = self.counters()
        return StoreStats(counters.items, counters.bytes, 0, 0, 0, 0)


class OnlyGrows(MemoryStore):
    largest = 0

    async def stats(self):
        counters = self.counters()
        self.largest = max(self.largest, counters.bytes)
        return StoreStats(counters.items, self.largest, counters.hits, counters.misses, 0, 0)


class CutsAtAMegabyte(MemoryStore):
    async def put_many(self, items):
        await super().put_many([(key, value[: 2**20]) for key, value in items])


class AsksAHundred(MemoryStore):
    async def get_many(self, keys):
        return await super().get_many(keys[:100]) + [None] * len(keys[100:])


class ForgetsTheKind(MemoryStore):
    async def get_many(self, keys):
        return await super().get_many([key.replace(":logits:", ":kv:") for key in keys])


class ForgetsTheModel(MemoryStore):
    async def get_many(self, keys):
        return await super().get_many([key.replace(":0123456789abcdee:", ":0123456789abcdef:") for key in keys])


class DeletesInTwoSteps(MemoryStore):
    async def delete_many(self, keys):
        for key in keys:
            value = self.get(key)
            if value is not None and len(value) > 50_000:
                self.put(key, value[:7])
                await anyio.sleep(0)
        return await super().delete_many(keys)


class CountsErrors(MemoryStore):
    async def stats(self):
        return dataclasses.replace(self.counters(), errors=1)


class BreaksWhenCancelled(MemoryStore):
    broken = False

    async def get_many(self, keys):
        try:
            await anyio.sleep(0.002)
        except BaseException:
            self.broken = True
            raise
        return [None] * len(keys) if self.broken else await super().get_many(keys)


class MixesWhenCancelled(MemoryStore):
    """As a connection that is used on after a call on it was cut off: answers are late by one."""

    late: tuple = ()

    async def get_many(self, keys):
        answer = await super().get_many(keys)
        try:
            await anyio.sleep(0.001)
        except BaseException:
            self.late = (answer,)
            raise
        if self.late and len(self.late[0]) == len(answer):
            (answer,), self.late = self.late, (answer,)
        return answer


class ClosesOnce(MemoryStore):
    async def aclose(self):
        assert not self._closed, "closed twice"
        await super().aclose()


@pytest.mark.parametrize(
    ("broken", "promise"),
    [
        (FiltersMisses, "None"),
        (SortsKeys, "position|order"),
        (ForgetsRepeats, "repeats"),
        (ReadsLines, "byte for byte"),
        (EmptyIsMissing, "byte for byte"),
        (KeepsTheFirst, "replace"),
        (CountsAll, "first key that is not there"),
        (RunIsOneTooLong, "first key that is not there"),
        (CountsWhatWasAsked, "only the keys that existed"),
        (DeletesNothing, "delete what it was given"),
        (WritesInTwoSteps, "whole"),
        (VanishesWhileReplacing, "whole"),
        (SharesAnAnswer, "each other"),
        (CountsNothing, "hits"),
        (OnlyGrows, "bytes must be 0"),
        (CutsAtAMegabyte, "4 MiB"),
        (AsksAHundred, "1000 keys"),
        (ForgetsTheKind, "kind, model or fingerprint"),
        (ForgetsTheModel, "kind, model or fingerprint"),
        (DeletesInTwoSteps, "whole value or none"),
        (CountsErrors, "errors must stay 0"),
        (BreaksWhenCancelled, "work on after cancelled calls"),
        (MixesWhenCancelled, "own key|cancelled"),
        (ClosesOnce, "closed twice"),
    ],
)
def test_each_broken_promise_is_found(broken, promise):
    with pytest.raises(AssertionError, match=promise):
        anyio.run(check_store, lambda: broken(ROOM))


def test_a_factory_may_be_async():
    async def make_store():
        await anyio.sleep(0)
        return MemoryStore(ROOM)

    anyio.run(check_store, make_store)


def test_a_faulty_store_without_faults_keeps_the_contract():
    anyio.run(check_store, lambda: FaultyStore(MemoryStore(ROOM), lambda operation, call: None))


def test_a_faulty_store_fails_on_schedule():
    async def use():
        store = FaultyStore(MemoryStore(ROOM), fault_every(3, Fault("fail"), "get_many"))
        await store.put_many([("a", b"value")])
        answers = []
        for _ in range(6):
            try:
                answers += await store.get_many(["a"])
            except StoreError:
                answers.append("failed")
        return answers, store.faults

    assert anyio.run(use) == ([b"value", b"value", "failed"] * 2, 2)


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("lose", [None, None, None]),
        ("corrupt", [b"o~e", None, b"tgo"]),
        ("truncate", [b"o", None, b"t"]),
        ("swap", [b"two", None, b"one"]),
        ("delay", [b"one", None, b"two"]),
    ],
)
@pytest.mark.parametrize("operation", ["get_many", "put_many"])
def test_a_faulty_store_spoils_values(kind, found, operation):
    async def use():
        store = FaultyStore(MemoryStore(ROOM), fault_every(1, Fault(kind), operation))
        await store.put_many([("a", b"one"), ("c", b"two")])
        return await store.get_many(["a", "b", "c"])

    assert anyio.run(use) == found
