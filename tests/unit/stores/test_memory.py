import gc
import sys
import threading
import time
import tracemalloc
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitelib.abc import Store
from kitelib.errors import ConfigError
from kitelib.fingerprint import Fingerprint, block_fingerprints, model_key, store_key
from kitelib.stores.memory import ENTRY_BYTES, MemoryStore, entry_bytes
from kitelib.testing import check_store
from kitelib.upcycle.codec import get_codec
from kitelib.upcycle.unit import RecyclableUnit, pack


class HandClock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


def test_keeps_the_store_contract():
    assert isinstance(MemoryStore(0), Store)
    anyio.run(check_store, lambda: MemoryStore(8 * 2**20))


def test_least_recently_used_goes_first():
    size = entry_bytes("a", b"x" * 100)
    store = MemoryStore(3 * size)
    for key in "abc":
        assert store.put(key, b"x" * 100)
    assert store.get("a")
    assert store.put("d", b"x" * 100)
    assert [store.contains(key) for key in "abcd"] == [True, False, True, True]
    assert store.counters().evictions == 1


def test_looking_does_not_count_as_use():
    size = entry_bytes("a", b"x" * 100)
    store = MemoryStore(2 * size)
    store.put("a", b"x" * 100)
    store.put("b", b"x" * 100)
    assert store.contains("a")
    assert anyio.run(store.leading_run, ["a"]) == 1
    store.put("c", b"x" * 100)
    assert not store.contains("a")
    assert (store.counters().hits, store.counters().misses) == (0, 0)


def test_too_big_is_dropped_and_takes_nothing_with_it():
    store = MemoryStore(3000)
    store.put("a", b"x" * 100)
    store.put("big", b"old")
    assert not store.put("big", b"x" * 3000)
    assert store.get("a") == b"x" * 100
    assert store.get("big") is None  # what it replaces is not served either
    assert (store.counters().dropped, store.counters().evictions) == (1, 0)


def test_nothing_fits_a_store_of_no_bytes():
    store = MemoryStore(0)
    assert not store.put("a", b"")
    assert store.counters().dropped == 1


def test_clear_says_how_many_there_were():
    store = MemoryStore(10_000)
    for key in "abc":
        store.put(key, b"x")
    assert store.clear() == 3
    assert (store.counters().items, store.counters().bytes, store.clear()) == (0, 0, 0)
    assert store.put("a", b"y")


def test_closed_store_misses_and_drops():
    store = MemoryStore(10_000)
    store.put("a", b"x")
    anyio.run(store.aclose)
    assert store.get("a") is None
    assert not store.put("a", b"x")
    assert store.counters().bytes == 0


def test_old_values_are_gone():
    clock = HandClock()
    store = MemoryStore(10_000, ttl_s=60, clock=clock)
    store.put("a", b"1")
    clock.now += 30
    store.put("b", b"2")
    clock.now += 30
    assert not store.contains("a")
    assert anyio.run(store.get_many, ["a", "b"]) == [None, b"2"]
    assert not store.delete("a")
    assert (store.counters().items, store.counters().evictions) == (1, 1)
    assert store.counters().bytes == entry_bytes("b", b"2")


def test_a_mutable_value_is_copied():
    store = MemoryStore(10_000)
    value = bytearray(b"abc")
    store.put("a", value)
    value[0] = 0
    assert store.get("a") == b"abc"


@pytest.mark.parametrize("options", [{"max_bytes": -1}, {"max_bytes": 1, "ttl_s": 0}, {"max_bytes": 1, "ttl_s": -5}])
def test_wrong_options_are_refused(options):
    with pytest.raises(ConfigError):
        MemoryStore(**options)


operations = st.lists(
    st.tuples(st.sampled_from(["put", "get", "delete", "contains"]), st.sampled_from("abcdef"), st.integers(0, 900)),
    max_size=60,
)


@settings(deadline=None)
@given(operations, st.integers(0, 8000))
def test_behaves_like_a_plain_model(steps, max_bytes):
    """B9: what is found is what was stored last under that key, and the index never names what has gone."""
    store, model, dropped, evicted = MemoryStore(max_bytes), {}, 0, 0
    for operation, key, size in steps:
        value = bytes([size % 251]) * size
        if operation == "put":
            model.pop(key, None)
            need = entry_bytes(key, value)
            held = sum(entry_bytes(*item) for item in model.items())
            assert store.put(key, value) == (need <= max_bytes)
            if need <= max_bytes:
                # Which of them went is the policy's choice; that any did needs a reason.
                gone = [other for other in model if not store.contains(other)]
                assert bool(gone) == (held + need > max_bytes)
                evicted += len(gone)
                for other in gone:
                    del model[other]
                model[key] = value
            else:
                dropped += 1
        elif operation == "get":
            assert store.get(key) == model.get(key)
        elif operation == "delete":
            assert store.delete(key) == (model.pop(key, None) is not None)
        else:
            assert store.contains(key) == (key in model)
        counters = store.counters()
        assert counters.bytes == sum(entry_bytes(*item) for item in model.items()) <= max_bytes
        assert (counters.items, counters.dropped, counters.evictions) == (len(model), dropped, evicted)
        assert len(store._policy) == len(model)
        assert set(store.keys()) == set(model)


def test_bytes_are_real_bytes():
    """B26, B35: the bound holds for what the process really takes, the index and the policy included."""
    count = 10_000
    store = MemoryStore(2**30)
    keys = [f"kite:{{{index % 65536:04x}}}:0123456789abcdef:kv:{index:064x}" for index in range(count)]
    taken = []
    gc.collect()
    tracemalloc.start()
    try:
        for part in (keys, keys[::2]):
            for key in part:
                store.delete(key)
            for key in part:
                store.put("".join(key), key.encode() * 20)  # a string of its own
            for key in keys:
                assert store.get(key)
            taken.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    counted = store.counters().bytes
    assert [0.8 * counted <= each <= counted for each in taken] == [True, True], (taken, counted)
    assert sys.getsizeof(b"") < ENTRY_BYTES


def units_of_a_prompt(count: int, first: int = 1) -> list[tuple[str, bytes]]:
    """Keys and values of the blocks of one prompt, first to last; `first` is its first token."""
    ids = list(range(first, first + 4 * count))
    root, layout = Fingerprint(b"r" * 32), {"layout": "x", "dtype": "uint8", "shape": (64,)}
    chain = block_fingerprints(root, ids, 4)
    items = []
    for index, cf in enumerate(chain):
        parent = chain[index - 1] if index else root
        block = np.asarray(ids[4 * index : 4 * index + 4], np.uint32)
        unit = RecyclableUnit("kv", cf, parent, block, b"m" * 32, 0, 0.0, data=np.zeros(64, np.uint8), **layout)
        items.append((store_key(model_key(unit.model_state), "kv", cf), pack(unit, get_codec("raw", "none"))))
    return items


def test_a_prompt_is_given_up_from_its_end():
    """B9: after eviction what is left of a prompt is its beginning, so no block is held that no prompt can reach."""
    items = units_of_a_prompt(8)
    keys = [key for key, _ in items]
    store = MemoryStore(len(items) * entry_bytes(*items[0]))
    for item in items:
        store.put(*item)
    # The first block is now the least recently used one.
    for count in range(1, 5):
        store.put(f"{count:{len(keys[0])}}", bytes(len(items[0][1])))
        assert anyio.run(store.leading_run, keys) == store.counters().items - count == len(items) - count


def test_no_more_values_than_the_bound_and_the_least_worth_goes():
    store = MemoryStore(2**20, max_items=3)
    for key in "abc":
        assert store.put(key, b"x" * 100)
    assert store.get("a")
    assert store.put("d", b"x")
    assert [store.contains(key) for key in "abcd"] == [True, False, True, True]
    assert (store.counters().items, store.counters().evictions) == (3, 1)
    assert store.put("d", b"y" * 50)  # replacing takes nobody's place
    assert (store.counters().items, store.counters().evictions) == (3, 1)
    assert store.clear() == 3
    assert store.put("e", b"x")


def test_a_bound_in_values_cuts_a_prompt_from_its_end():
    items = units_of_a_prompt(10)
    keys = [key for key, _ in items]
    store = MemoryStore(2**20, max_items=10)
    for item in items:
        store.put(*item)
    assert anyio.run(store.leading_run, keys) == 10
    for count in range(1, 5):
        store.put(f"other{count}", b"x")
        assert anyio.run(store.leading_run, keys) == 10 - count
        assert store.counters().items == 10


@pytest.mark.parametrize("bound", ["bytes", "items"])
def test_a_prompt_that_does_not_fit_keeps_its_beginning(bound):
    items = units_of_a_prompt(30)
    keys = [key for key, _ in items]
    size = entry_bytes(*items[0])
    store = MemoryStore(10 * size) if bound == "bytes" else MemoryStore(2**20, max_items=10)
    for _ in range(3):
        for item in items:
            store.put(*item)
        assert anyio.run(store.leading_run, keys) == 10
    assert (store.counters().items, store.counters().evictions) == (10, 0)
    assert store.counters().dropped == 3 * 20


def test_a_new_prompt_takes_the_room_of_an_older_one():
    old, new = units_of_a_prompt(10), units_of_a_prompt(10, first=500)
    store = MemoryStore(2**20, max_items=10)
    for item in [*old, *new]:
        store.put(*item)
    assert anyio.run(store.leading_run, [key for key, _ in new]) == 10
    assert (store.counters().evictions, store.counters().dropped) == (10, 0)


@pytest.mark.parametrize("max_items", [0, -1])
def test_a_bound_in_values_is_positive(max_items):
    with pytest.raises(ConfigError, match=f"max_items is {max_items}"):
        MemoryStore(100, max_items=max_items)


def test_threads_and_accounting():
    """Eight threads that store, read and delete; afterwards every byte is accounted for."""
    store = MemoryStore(40_000)
    wrong: list[str] = []

    def use(thread: int) -> None:
        for round_ in range(300):
            key = f"{(thread * 7 + round_) % 40}"
            value = key.encode() * (200 + round_ % 50)
            store.put(key, value)
            found = store.get(key)
            if found is not None and not (found.startswith(key.encode()) and len(found) % len(key) == 0):
                wrong.append(key)
            if round_ % 5 == 0:
                store.delete(key)
            if store.counters().bytes > store.max_bytes:
                wrong.append("bound")

    threads = [threading.Thread(target=use, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    left = {str(key): store.get(str(key)) for key in range(40)}
    assert store.counters().bytes == sum(entry_bytes(key, value) for key, value in left.items() if value is not None)
    assert store.counters().items == sum(value is not None for value in left.values())


def test_clearing_a_big_store_frees_it_in_a_thread_and_its_bytes_count_until_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Giving gigabytes back to the system takes a tenth of a second and more, which no event loop has."""
    store = MemoryStore(2**20)
    while store.counters().items < 1000:
        store.put(f"{store.counters().items:04d}", b"v" * 100)
    gate, free, threads = threading.Event(), store._free, []

    def gated(*arguments: Any) -> None:
        gate.wait(30)
        threads.append(threading.current_thread())
        free(*arguments)

    monkeypatch.setattr(store, "_free", gated)
    held = store.counters().bytes
    assert store.clear() == 1000
    assert (store.counters().items, store.counters().bytes) == (0, 0)
    assert not store.put("big", b"b" * (2**20 - held))  # there is no room yet
    assert store.put("small", b"s")
    gate.set()
    while not threads:
        time.sleep(0.001)
    threads[0].join()
    assert threads[0] is not threading.current_thread()
    assert store.put("big", b"b" * (2**20 - held))
