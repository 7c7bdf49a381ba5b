from __future__ import annotations

import gc
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest

from kitelib.errors import ConfigError, InvalidRequestError
from kitelib.yoco.neighbours import Neighbours

_DIMENSIONS = 64
_A, _B = b"a" * 32, b"b" * 32


def _vectors(count: int, seed: int = 0) -> Any:
    drawn = np.random.default_rng(seed).standard_normal((count, _DIMENSIONS)).astype(np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def _key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def _index(max_bytes: int = 2**22, size_of: Any = lambda item: 0) -> Neighbours[Any]:
    return Neighbours(max_bytes, _DIMENSIONS, size_of=size_of)


def test_it_finds_what_a_search_over_all_finds_whatever_was_put_in_between() -> None:
    index, vectors = _index(), _vectors(3000)
    owners = np.random.default_rng(1).integers(0, 4, len(vectors))
    places = [(_A, b""), (_A, b"g"), (_B, b""), (_B, b"g")]
    for number, vector in enumerate(vectors):
        root, group = places[owners[number]]
        assert index.add(root, _key(number), vector, number, group=group)
    for number in range(0, 3000, 7):  # their rows are taken by others
        root, group = places[owners[number]]
        index.add(root, _key(number), vectors[number - 1], number, group=group)
        vectors[number] = vectors[number - 1]
    for query in _vectors(20, seed=2):
        for place, (root, group) in enumerate(places):
            likeness = np.where(owners == place, vectors @ query, -2)
            expected = np.sort(likeness)[::-1][:5]
            found = index.nearest(root, query, 5, group=group)
            assert np.allclose([value for _, value in found], expected, atol=1e-5)
            assert np.allclose([likeness[number] for number, _ in found], expected, atol=1e-5)


def test_tenants_are_apart() -> None:
    index, (vector, other) = _index(), _vectors(2)
    index.add(_A, _key(1), vector, "a's")
    assert index.nearest(_B, vector, 5) == []
    index.add(_B, _key(1), other, "b's")
    assert [item for item, _ in index.nearest(_B, vector, 5)] == ["b's"]
    assert [item for item, _ in index.nearest(_A, vector, 5)] == ["a's"]
    assert index.forget(_A) == 1
    assert index.nearest(_A, vector, 5) == []
    assert [item for item, _ in index.nearest(_B, vector, 5)] == ["b's"]


def test_groups_of_a_root_are_searched_apart_and_forgotten_together() -> None:
    index, (vector,) = _index(), _vectors(1)
    index.add(_A, _key(1), vector, "one", group=b"g")
    assert index.nearest(_A, vector, 1) == []
    assert index.nearest(_A, vector, 1, group=b"g")[0][0] == "one"
    index.add(_A, _key(1), vector, "moved", group=b"h")  # a key has one place
    assert index.nearest(_A, vector, 1, group=b"g") == []
    assert index.forget(_A) == 1
    assert len(index) == 0


def test_a_vector_of_any_length_counts_by_its_direction() -> None:
    index, (vector,) = _index(), _vectors(1)
    index.add(_A, _key(1), vector * 1e-4, "item")
    ((_, similarity),) = index.nearest(_A, vector * 1e6, 1)
    assert similarity == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, -np.inf])
def test_what_has_no_direction_is_neither_kept_nor_found(value: float) -> None:
    index, (vector,) = _index(), _vectors(1)
    bad = np.full(_DIMENSIONS, value, np.float32)
    assert not index.add(_A, _key(1), bad, "item")
    index.add(_A, _key(2), vector, "good")
    assert index.nearest(_A, bad, 1) == []
    assert not index.add(_A, _key(2), bad, "replaced by nothing")
    assert len(index) == 0


def test_a_vector_of_another_shape_is_an_error_and_loses_nothing() -> None:
    index, (vector,) = _index(), _vectors(1)
    index.add(_A, _key(1), vector, "item")
    for bad in (vector[:-1], vector[None], np.float32(1)):
        with pytest.raises(InvalidRequestError, match=r"\(64,\)"):
            index.add(_A, _key(1), bad, "other")
        with pytest.raises(InvalidRequestError, match=r"\(64,\)"):
            index.nearest(_A, bad, 1)
    assert index.nearest(_A, vector, 1)[0][0] == "item"


def test_the_oldest_go_first_and_adding_again_makes_young() -> None:
    index, vectors = _index(40_000), _vectors(200)
    for number in range(10):
        index.add(_A, _key(number), vectors[number], number)
    for number in range(10, 200):
        index.add(_A, _key(number), vectors[number], number)
        index.add(_A, _key(0), vectors[0], 0)
    kept = {item for item, _ in index.nearest(_A, vectors[0], 200)}
    assert 10 < len(kept) < 150
    assert kept == {0} | set(range(200 - len(kept) + 1, 200))


def test_a_tenant_that_asks_much_does_not_push_out_another() -> None:
    index, vectors = _index(60_000), _vectors(2000)
    for number in range(20):
        index.add(_B, _key(number), vectors[number], number)
    for number in range(2000):
        index.add(_A, _key(number), vectors[number], number)
    assert len(index.nearest(_B, vectors[0], 100)) == 20
    assert len(index) < 200


def test_memory_stays_within_the_bound_with_items_of_all_sizes() -> None:
    draw = np.random.default_rng(3)
    index, vectors = _index(300_000, size_of=len), _vectors(500)
    most = 0
    for number in range(5000):
        item = "x" * int(draw.integers(0, 4000) if number % 3 else draw.integers(0, 50))
        root = _key(int(draw.integers(0, 40)))
        index.add(root, _key(number), vectors[number % 500], item)
        assert index.num_bytes <= 300_000
        most = max(most, index.num_bytes)
        if number % 1000 == 999:
            index.forget(root)
    assert most > 200_000
    assert len(index) > 50


def test_the_bytes_it_reports_are_those_it_takes() -> None:
    vectors = _vectors(100)
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        index: Neighbours[int] = Neighbours(4 * 2**20, _DIMENSIONS, size_of=lambda item: 0)
        for number in range(20_000):
            index.add(_key(number % 50), _key(number), vectors[number % 100], number)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert index.num_bytes > 3 * 2**20
    assert 0.8 * taken < index.num_bytes < 1.25 * taken
    index.clear()
    assert index.num_bytes == 0
    assert index.nearest(_key(1), vectors[0], 1) == []


def test_what_does_not_fit_alone_is_not_kept_and_costs_nobody_his_place() -> None:
    index, vectors = _index(50_000, size_of=len), _vectors(20)
    for number in range(20):
        assert index.add(_A, _key(number), vectors[number], "x" * 10)
    assert not index.add(_B, _key(1), vectors[1], "x" * 60_000)
    assert len(index) == 20


@pytest.mark.parametrize("max_bytes", [0, 100, 1500])
def test_an_index_without_room_keeps_nothing(max_bytes: int) -> None:
    index, (vector,) = _index(max_bytes), _vectors(1)
    assert not index.add(_A, _key(1), vector, "item")
    assert index.num_bytes == 0


def test_a_negative_bound_is_an_error() -> None:
    with pytest.raises(ConfigError, match="max_bytes is -1"):
        Neighbours(-1)


def test_threads_may_add_look_and_forget_at_once() -> None:
    vectors, queries = _vectors(256), _vectors(8, seed=9)
    index, stop, errors = _index(120_000), threading.Event(), []

    def write(root: bytes) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            index.add(root, _key(number % 300), vectors[number % 256], (root, number % 256))
            if number % 97 == 0:
                index.forget(root)
            if number % 1009 == 0:
                index.clear()

    def read(root: bytes) -> None:
        try:
            for turn in range(400):
                query = queries[turn % 8]
                found = index.nearest(root, query, 5)
                assert [value for _, value in found] == sorted((value for _, value in found), reverse=True)
                for (owner, number), value in found:
                    assert owner == root
                    assert abs(value - float(vectors[number] @ query)) < 1e-5
        except Exception as error:  # noqa: BLE001 - raised in the test's own thread below
            errors.append(error)

    writers = [threading.Thread(target=write, args=(root,)) for root in (_A, _B)]
    readers = [threading.Thread(target=read, args=(root,)) for root in (_A, _B)]
    for thread in writers + readers:
        thread.start()
    for thread in readers:
        thread.join()
    stop.set()
    for thread in writers:
        thread.join()
    assert not errors
    assert index.num_bytes <= 120_000
