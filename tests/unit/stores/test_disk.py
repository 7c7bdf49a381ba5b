import os
import threading
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from kitelib.abc import SharedStore
from kitelib.errors import ConfigError, StoreError
from kitelib.fingerprint import model_key, store_key
from kitelib.stores.disk import DiskStore, ledger
from kitelib.testing import check_store
from kitelib.upcycle.codec import get_codec
from kitelib.upcycle.unit import HEAD_BYTES, pack, peek
from tests.support.disk_process import disk_bytes, key_of
from tests.support.event_loop import quietest
from tests.support.units import units_of

MAX_BYTES = 8 * 2**20


class HandClock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


def files_of(folder: Path) -> list[Path]:
    return sorted((folder / "values").glob("*/*.ru"))


async def until(condition) -> None:
    """Waits for what the writing thread does by itself."""
    with anyio.fail_after(20):
        while not condition():
            await anyio.sleep(0.005)


async def items_of(store: DiskStore):
    return {item.key: item async for page in store.list_items() for item in page}


async def test_a_relative_folder_stays_where_it_was_when_the_process_goes_elsewhere(tmp_path, monkeypatch):
    """B21: a daemon that changes to / after it has opened its pool still finds it, and makes no other one there."""
    (tmp_path / "home").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    store = await anyio.to_thread.run_sync(DiskStore, "pool", MAX_BYTES)
    await store.put_many([("kite:a", b"x")])
    monkeypatch.chdir(tmp_path / "elsewhere")
    await store.put_many([("kite:b", b"y")])
    assert await store.get_many(["kite:a", "kite:b"]) == [b"x", b"y"]
    await store.aclose()
    assert len(files_of(tmp_path / "home" / "pool")) == 2
    assert not any((tmp_path / "elsewhere").iterdir())


def test_keeps_the_store_contract(tmp_path):
    """B38: what is written comes back byte for byte, in the whole suite that every store has to pass."""
    numbers = iter(range(1000))

    def make_store() -> DiskStore:
        return DiskStore(tmp_path / str(next(numbers)), MAX_BYTES)

    assert isinstance(make_store(), SharedStore)
    anyio.run(check_store, make_store)


async def test_found_again_after_a_restart(tmp_path):
    """B21: the files are found again, and their values, sizes, ages and order of use with them."""
    clock = HandClock()
    store = DiskStore(tmp_path, MAX_BYTES, clock=clock)
    keys = [key_of(number) for number in range(50)]
    await store.put_many([(key, b"%d" % number * 3000) for number, key in enumerate(keys)])
    before, listed = await store.stats(), await items_of(store)
    await store.aclose()

    again = DiskStore(tmp_path, MAX_BYTES, clock=clock)
    await again.warm()
    after = await again.stats()
    assert (after.items, after.bytes) == (before.items, before.bytes) == (50, after.bytes)
    assert await again.leading_run(keys) == 50
    assert await again.get_many(keys) == [b"%d" % number * 3000 for number in range(50)]
    assert await items_of(again) == listed
    assert listed[keys[3]].num_bytes == 3000
    assert listed[keys[3]].written_at == listed[keys[3]].used_at == clock.now
    await again.aclose()


async def test_the_index_is_built_from_the_files_alone(tmp_path):
    """B21: the books may be lost too; everything is in the files."""
    store = DiskStore(tmp_path, MAX_BYTES)
    await store.put_many([(key_of(number), b"v" * 1000) for number in range(10)])
    before = await store.stats()
    await store.aclose()
    (tmp_path / "ledger").unlink()
    again = DiskStore(tmp_path, MAX_BYTES)
    await again.warm()
    after = await again.stats()
    assert (after.items, after.bytes) == (before.items, before.bytes)
    assert len(again._index) == 10
    await again.aclose()


async def test_reads_do_not_wait_for_the_index(tmp_path, monkeypatch):
    """A large folder delays no read: values are read while the index is still being built."""
    store = DiskStore(tmp_path, MAX_BYTES)
    await store.put_many([(key_of(number), b"v" * 1000) for number in range(10)])
    await store.aclose()
    again, gate = DiskStore(tmp_path, MAX_BYTES), threading.Event()
    learn = again._reader.learn
    monkeypatch.setattr(again._reader, "learn", lambda *file: gate.wait(20) and learn(*file))
    async with anyio.create_task_group() as group:
        group.start_soon(again.warm)
        await until(lambda: again._indexed is not None)
        assert await again.get_many([key_of(1), key_of(99)]) == [b"v" * 1000, None]
        assert await again.leading_run([key_of(2)]) == 1
        await again.put_many([(key_of(50), b"new")])
        assert not again._indexed.done()
        gate.set()
    await again.aclose()


async def test_what_one_process_writes_another_finds_at_once(tmp_path):
    """Two stores on one folder are what two processes are: nothing but the files is shared."""
    one, other = DiskStore(tmp_path, MAX_BYTES), DiskStore(tmp_path, MAX_BYTES)
    await other.warm()
    await one.put_many([(key_of(0), b"a" * 5000)])
    assert await other.leading_run([key_of(0), key_of(1)]) == 1
    assert await other.get_many([key_of(0)]) == [b"a" * 5000]
    assert (await other.stats()).items == 1
    await one.aclose()
    await other.aclose()


async def test_what_another_process_deleted_is_a_miss_and_leaves_no_phantom(tmp_path):
    """B9: a value that another process removed is gone from the answers and the index, without an error."""
    one, other = DiskStore(tmp_path, MAX_BYTES), DiskStore(tmp_path, MAX_BYTES)
    await one.put_many([(key_of(number), b"a" * 5000) for number in range(3)])
    assert await other.delete_many([key_of(0), key_of(1)]) == 2
    assert await one.leading_run([key_of(0)]) == 0
    assert await one.get_many([key_of(0), key_of(2)]) == [None, b"a" * 5000]
    assert await one.delete_many([key_of(1)]) == 0
    stats = await one.stats()
    assert (stats.items, stats.misses, stats.errors) == (1, 1, 0)
    assert len(one._index) == 1
    await one.aclose()
    await other.aclose()


async def test_no_phantom_hits_after_eviction_and_churn(tmp_path):
    """B9: under churn the index names exactly the files that are there, and a hit is always the value put last."""
    store = DiskStore(tmp_path, 1_000_000)
    for turn in range(6):
        items = [(key_of(number), b"%d/%d " % (turn, number) * 6000) for number in range(turn, turn + 40)]
        await store.put_many(items)
        found = await store.get_many([key for key, _ in items])
        assert all(value in (None, wanted) for value, (_, wanted) in zip(found, items, strict=True))
        assert 0 < found.count(None) < 40
        assert len(store._index) == len(files_of(tmp_path)) == (await store.stats()).items
        assert disk_bytes(tmp_path) <= 1_000_000
    assert (await store.stats()).evictions > 100
    await store.aclose()


async def test_the_bound_holds_for_many_small_values(tmp_path):
    """B26: real bytes count: a small value takes a whole block, and folders take some too."""
    store = DiskStore(tmp_path, 2_000_000)
    for first in range(0, 1000, 100):
        await store.put_many([(key_of(number), b"tiny") for number in range(first, first + 100)])
        assert disk_bytes(tmp_path) <= 2_000_000
    stats = await store.stats()
    assert 250 < stats.items < 480
    assert stats.bytes == sum(path.lstat().st_blocks * 512 for path in files_of(tmp_path))
    assert stats.evictions + stats.items == 1000
    assert stats.dropped == 0
    await store.aclose()


async def test_drops_are_counted_and_do_not_last(tmp_path):
    """B26: a value that can't fit is dropped and counted, takes nothing with it, and the next one is stored."""
    store = DiskStore(tmp_path, 1_000_000)
    await store.put_many([(key_of(0), b"a" * 100)])
    await store.put_many([(key_of(1), b"b" * 1_000_000), (key_of(2), b"c")])
    assert await store.get_many([key_of(0), key_of(1), key_of(2)]) == [b"a" * 100, None, b"c"]
    stats = await store.stats()
    assert (stats.dropped, stats.errors, stats.evictions) == (1, 0, 0)
    await store.aclose()


async def test_a_smaller_bound_is_kept_from_the_start(tmp_path):
    """B26: the folder of a run with a larger bound is cut down when it is opened."""
    store = DiskStore(tmp_path, MAX_BYTES)
    await store.put_many([(key_of(number), b"v" * 50_000) for number in range(40)])
    await store.aclose()
    again = DiskStore(tmp_path, 1_000_000)
    await again.warm()
    assert disk_bytes(tmp_path) <= 1_000_000
    assert (await again.stats()).items > 5
    await again.aclose()


async def test_size_is_put_right_by_a_sweep(tmp_path):
    """B26: files that somebody deleted by hand don't count for ever."""
    store = DiskStore(tmp_path, MAX_BYTES)
    await store.put_many([(key_of(number), b"v" * 5000) for number in range(10)])
    for path in files_of(tmp_path)[:4]:
        path.unlink()
    assert await store.sweep() == 0
    stats = await store.stats()
    assert (stats.items, stats.bytes) == (6, sum(path.lstat().st_blocks * 512 for path in files_of(tmp_path)))
    assert len(store._index) == 6
    await store.aclose()


async def test_reading_keeps_the_entry(tmp_path):
    """B37: a read takes nothing out, and writes nothing but, now and then, the time of use."""
    store = DiskStore(tmp_path, MAX_BYTES)
    await store.put_many([(key_of(0), b"v" * 5000)])
    (file,) = files_of(tmp_path)
    before = file.stat()
    for _ in range(3):
        assert await store.get_many([key_of(0)]) == [b"v" * 5000]
    assert (file.stat().st_atime_ns, file.stat().st_mtime_ns) == (before.st_atime_ns, before.st_mtime_ns)
    await store.aclose()


async def test_writing_touches_only_what_is_new(tmp_path):
    """B37: a new value costs one file; those that are there are neither read nor written again."""
    store = DiskStore(tmp_path, MAX_BYTES)
    await store.put_many([(key_of(number), b"v" * 5000) for number in range(20)])
    before = {path: path.stat().st_ino for path in files_of(tmp_path)}
    await store.put_many([(key_of(20), b"v" * 5000)])
    after = {path: path.stat().st_ino for path in files_of(tmp_path)}
    assert {path: after[path] for path in before} == before
    assert len(after) == 21
    await store.aclose()


async def test_what_was_used_last_survives_a_restart(tmp_path):
    """The files know when they were used, also by another process, so the right ones go."""
    clock = HandClock()
    store = DiskStore(tmp_path, 1_000_000, clock=clock)
    await store.put_many([(key_of(number), b"v" * 60_000) for number in range(10)])
    clock.now += 1000
    await store.get_many([key_of(2), key_of(5)])
    await store.aclose()
    again = DiskStore(tmp_path, 1_000_000, clock=clock)
    await again.put_many([(key_of(number), b"w" * 60_000) for number in range(10, 17)])
    assert (await again.stats()).evictions > 0
    assert None not in await again.get_many([key_of(2), key_of(5)])
    await again.aclose()


async def test_what_another_process_uses_is_not_the_next_to_go(tmp_path):
    clock = HandClock()
    one, other = DiskStore(tmp_path, 1_000_000, clock=clock), DiskStore(tmp_path, 1_000_000, clock=clock)
    await one.put_many([(key_of(number), b"v" * 60_000) for number in range(10)])
    clock.now += 1000
    await other.get_many([key_of(0), key_of(1)])
    await one.put_many([(key_of(number), b"w" * 60_000) for number in range(10, 17)])
    assert (await one.stats()).evictions > 0
    assert None not in await other.get_many([key_of(0), key_of(1)])
    await one.aclose()
    await other.aclose()


async def test_values_that_others_wrote_make_room_too(tmp_path):
    """A process that has written nothing itself still finds what may go."""
    one, other = DiskStore(tmp_path, 1_000_000), DiskStore(tmp_path, 1_000_000)
    await other.warm()
    await one.put_many([(key_of(number), b"v" * 60_000) for number in range(14)])
    await other.put_many([(key_of(99), b"w" * 300_000)])
    assert await other.get_many([key_of(99)]) == [b"w" * 300_000]
    assert disk_bytes(tmp_path) <= 1_000_000
    await one.aclose()
    await other.aclose()


async def test_leaves_go_before_their_parents(tmp_path):
    """Units are evicted from the end of their prompts, also after a restart: what they follow is read from the files."""
    blobs = [pack(unit, get_codec("raw", "none")) for unit in units_of(list(range(40)))]
    heads = [peek(blob) for blob in blobs]
    keys = [store_key(model_key(head.model_state), head.kind, head.cf) for head in heads]
    store = DiskStore(tmp_path, MAX_BYTES)
    await store.put_many(list(zip(keys, blobs, strict=True)))
    await store.aclose()
    again = DiskStore(tmp_path, MAX_BYTES)
    await again.warm()
    assert await again.get_heads(keys, HEAD_BYTES) == [blob[:HEAD_BYTES] for blob in blobs]
    gone = []
    while (key := again._index.victim()) is not None:
        gone.append(key)
        again._index.discard(key)
    blocks = [key for key, head in zip(keys, heads, strict=True) if head.kind == "kv"]
    assert [key for key in gone if key in blocks] == blocks[::-1]
    await again.aclose()


async def test_expired_values_are_misses_and_go(tmp_path):
    clock = HandClock()
    store = DiskStore(tmp_path, MAX_BYTES, ttl_s=100, clock=clock)
    keys = [key_of(number) for number in range(4)]
    await store.put_many([(key, b"v" * 1000) for key in keys[:3]])
    clock.now += 99
    await store.put_many([(keys[3], b"v" * 1000)])
    assert await store.leading_run(keys) == 4
    clock.now += 1
    assert await store.leading_run(keys) == 0
    assert await store.get_many(keys) == [None, None, None, b"v" * 1000]
    assert await store.get_heads(keys[2:], 10) == [None, b"v" * 10]
    assert set(await items_of(store)) == {keys[3]}
    await until(lambda: len(files_of(tmp_path)) == 1)  # reading them has removed them
    assert await store.delete_many(keys[:1]) == 0
    clock.now += 99
    assert await store.sweep() == 1
    assert files_of(tmp_path) == []
    stats = await store.stats()
    assert (stats.items, stats.bytes, stats.evictions) == (0, 0, 4)
    await store.aclose()


async def test_only_our_keys_are_listed(tmp_path):
    store = DiskStore(tmp_path, MAX_BYTES)
    long = "kite:" + "x" * 300
    await store.put_many([("other:1", b"x"), (key_of(0), b"yy"), (long, b"zzz"), ("kite:ÄÖ/..%\0", b"")])
    assert {key: item.num_bytes for key, item in (await items_of(store)).items()} == {
        key_of(0): 2,
        long: 3,
        "kite:ÄÖ/..%\0": 0,
    }
    assert await store.get_many(["other:1", long, "kite:ÄÖ/..%\0"]) == [b"x", b"zzz", b""]
    await store.aclose()


async def test_heads_are_the_first_bytes(tmp_path):
    store = DiskStore(tmp_path, MAX_BYTES)
    value = bytes(range(256)) * 40
    await store.put_many([(key_of(0), value), (key_of(1), b"short")])
    assert await store.get_heads([key_of(1), key_of(9), key_of(0)], 168) == [b"short", None, value[:168]]
    assert await store.get_heads([key_of(0)], 5000) == [value[:5000]]
    assert await store.get_heads([key_of(0)], 0) == [b""]
    stats = await store.stats()
    assert (stats.hits, stats.misses) == (0, 0)
    await store.aclose()


async def test_epochs_only_grow_and_last(tmp_path):
    one, other = DiskStore(tmp_path, MAX_BYTES), DiskStore(tmp_path, MAX_BYTES)
    assert await one.get_epoch("model-a") == 0
    assert await one.raise_epoch("model-a", 0) == 0
    assert await one.raise_epoch("model-a", 7) == 7
    assert await other.raise_epoch("model-a", 3) == 7
    assert await other.raise_epoch("model-a", 2**63 - 1) == 2**63 - 1
    assert await one.get_epoch("model-a") == 2**63 - 1
    assert await one.get_epoch("model-b") == await one.get_epoch("model") == 0
    assert len(list((tmp_path / "epochs").iterdir())) == 1  # lower ones don't pile up
    assert (await one.stats()).items == 0
    for name, epoch in (("Bad Name", 1), ("", 1), ("x" * 65, 1), ("a", -1), ("a", 2**63)):
        with pytest.raises(StoreError):
            await one.raise_epoch(name, epoch)
    await one.aclose()
    await other.aclose()
    again = DiskStore(tmp_path, MAX_BYTES)
    assert await again.get_epoch("model-a") == 2**63 - 1
    await again.aclose()


async def test_a_store_that_is_only_asked_makes_nothing(tmp_path):
    folder = tmp_path / "deep" / "pool"
    store = DiskStore(folder, MAX_BYTES)
    assert await store.get_many([key_of(0)]) == [None]
    assert await store.leading_run([key_of(0)]) == 0
    assert await store.delete_many([key_of(0)]) == 0
    assert await store.get_epoch("a") == 0
    assert await store.sweep() == 0
    assert await items_of(store) == {}
    assert (await store.stats()).items == 0
    assert not (tmp_path / "deep").exists()
    await store.put_many([(key_of(0), b"x")])
    assert await store.get_many([key_of(0)]) == [b"x"]
    assert folder.stat().st_mode & 0o777 == 0o700
    await store.aclose()


async def test_a_closed_store_misses_and_drops(tmp_path):
    store = DiskStore(tmp_path, MAX_BYTES)
    await store.put_many([(key_of(0), b"x")])
    await store.aclose()
    await store.aclose()
    await store.put_many([(key_of(1), b"x")])
    assert await store.get_many([key_of(0)]) == [None]
    assert await store.leading_run([key_of(0)]) == 0
    assert await store.delete_many([key_of(0)]) == 0
    stats = await store.stats()
    assert (stats.items, stats.dropped, stats.misses) == (0, 1, 1)
    with pytest.raises(StoreError, match="closed"):
        await store.get_epoch("a")


async def test_a_cancelled_put_leaves_nothing_half_done(tmp_path):
    """A cancellation takes effect at once; the value under way is finished or never seen, and nothing is left."""
    store = DiskStore(tmp_path, 200 * 2**20)
    await store.warm()
    items = [(key_of(number), b"%02d" % number * 500_000) for number in range(80)]
    for delay in (0.0, 0.001, 0.003, 0.006):
        with anyio.move_on_after(delay):
            await store.put_many(items)
    values = await store.get_many([key for key, _ in items])
    assert None in values  # some were cancelled in time
    assert all(value in (None, wanted) for value, (_, wanted) in zip(values, items, strict=True))
    await store.delete_many([items[0][0]])  # queues behind what was being written
    assert list((tmp_path / "temp").iterdir()) == []
    found = sum(path.lstat().st_blocks * 512 for path in files_of(tmp_path))
    assert (await store.stats()).bytes == found
    books = await anyio.to_thread.run_sync(ledger.read_books, str(tmp_path))
    assert not books.owners_with_reservations()
    await store.aclose()


async def test_a_cancelled_read_does_not_wait_for_the_disk(tmp_path, monkeypatch):
    store, gate = DiskStore(tmp_path, MAX_BYTES), threading.Event()
    await store.put_many([(key_of(0), b"x")])
    values = store._reader.values
    monkeypatch.setattr(store._reader, "values", lambda keys: gate.wait(20) and values(keys))
    with anyio.move_on_after(0.02) as scope:
        await store.get_many([key_of(0)])
    assert scope.cancelled_caught
    gate.set()
    assert await store.get_many([key_of(0)]) == [b"x"]
    await store.aclose()


async def test_the_loop_is_free_while_files_are_read_and_written(tmp_path, loop_gap):
    store = DiskStore(tmp_path, 100 * 2**20)
    items = [(key_of(number), os.urandom(370_000)) for number in range(64)]

    async def write_and_read() -> None:
        await store.put_many(items)
        assert None not in await store.get_many([key for key, _ in items])

    gap = await quietest(loop_gap, 0.010, write_and_read)
    assert gap.longest_cpu_s < 0.010
    await store.aclose()


@pytest.mark.parametrize("options", [{"max_bytes": 0}, {"max_bytes": 1.5}, {"max_bytes": 9, "ttl_s": 0}])
def test_wrong_options_are_refused(tmp_path, options):
    with pytest.raises(ConfigError, match="give"):
        DiskStore(tmp_path, **options)
