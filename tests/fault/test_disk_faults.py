"""The disk tier on file systems that are full, read-only, not permitted, or taken away: real ones."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kitelib.errors import StoreError
from kitelib.stores.disk import DiskStore
from kitelib.stores.disk.files import file_name, shard_of
from tests.support.disk_process import key_of, value_of
from tests.support.file_systems import NOBODY, mounted, unprivileged

MAX_BYTES = 64 * 2**20
KEYS = [key_of(number) for number in range(200)]


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that another user can get to."""
    folder = Path(tempfile.mkdtemp(prefix="kite-disk-"))
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, -1)
    yield folder
    for path in folder.rglob("*"):
        if path.is_dir():
            path.chmod(0o700)
    shutil.rmtree(folder)


async def test_a_full_disk_costs_values_and_nothing_else(tmp_path):
    """B26: ENOSPC is counted; what is there stays readable, and when there is room again, writing goes on."""
    with mounted(tmp_path / "small", 2 * 2**20) as folder:
        store = DiskStore(folder / "pool", MAX_BYTES)
        items = [(key, b"v" * 100_000) for key in KEYS[:40]]
        await store.put_many(items)  # part of it could be done
        stats = await store.stats()
        assert 10 < stats.items < 40
        assert stats.dropped == stats.errors == 40 - stats.items
        found = await store.get_many(KEYS[:40])
        assert sum(value == b"v" * 100_000 for value in found) == stats.items
        assert not list((folder / "pool" / "temp").iterdir())
        with pytest.raises(StoreError, match="No space left"):
            await store.put_many([(KEYS[100], b"w" * 1_900_000)])
        assert await store.delete_many(KEYS[:10]) == 10
        await store.put_many([(KEYS[101], b"w" * 500_000)])
        assert await store.get_many([KEYS[100], KEYS[101]]) == [None, b"w" * 500_000]
        await store.aclose()


async def test_a_disk_that_others_fill_to_the_last_block(tmp_path):
    """Not even the books can grow: writes fail, reads go on."""
    with mounted(tmp_path / "small", 2**20) as folder:
        store = DiskStore(folder / "pool", MAX_BYTES)
        await store.put_many([(KEYS[0], b"v" * 1000)])
        with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(b"f" * 4096)
        with pytest.raises(StoreError):
            await store.put_many([(KEYS[1], b"w" * 10_000)])
        assert await store.get_many(KEYS[:2]) == [b"v" * 1000, None]
        await store.aclose()
        other = DiskStore(folder / "new pool", MAX_BYTES)
        with pytest.raises(StoreError):
            await other.put_many([(KEYS[1], b"w" * 10_000)])
        assert await other.get_many(KEYS[:2]) == [None, None]
        (folder / "filler").unlink()
        await other.put_many([(KEYS[1], b"w" * 10_000)])
        assert await other.get_many(KEYS[:2]) == [None, b"w" * 10_000]
        await other.aclose()


async def test_a_limit_on_the_size_of_files(tmp_path):
    """EFBIG: values that are too long for the process's limit are dropped, shorter ones stored."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    store = DiskStore(tmp_path / "pool", MAX_BYTES)
    await store.warm()
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        await store.put_many([(KEYS[0], b"x" * 300_000), (KEYS[1], b"y" * 100_000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert await store.get_many(KEYS[:2]) == [None, b"y" * 100_000]
    stats = await store.stats()
    assert (stats.dropped, stats.errors, stats.items) == (1, 1, 1)
    assert not list((tmp_path / "pool" / "temp").iterdir())
    await store.aclose()


async def test_a_file_system_that_turns_read_only(tmp_path):
    """EROFS: reads go on, also for a process that starts only now; writes fail and are counted."""
    with mounted(tmp_path / "small", 4 * 2**20) as folder:
        store = DiskStore(folder / "pool", MAX_BYTES)
        await store.put_many([(key, value_of(key)) for key in KEYS[:5]])
        await store.aclose()
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        again = DiskStore(folder / "pool", MAX_BYTES)
        assert await again.get_many(KEYS[:6]) == [*map(value_of, KEYS[:5]), None]
        assert await again.leading_run(KEYS) == 5
        assert await again.get_epoch("a") == 0
        assert len([item async for page in again.list_items() for item in page]) == 5
        for call in (
            lambda: again.put_many([(KEYS[7], b"x"), (KEYS[8], b"x")]),
            lambda: again.delete_many(KEYS[:2]),
            lambda: again.raise_epoch("a", 1),
            again.warm,
            again.sweep,
        ):
            with pytest.raises(StoreError, match="Read-only"):
                await call()
        stats = await again.stats()
        assert (stats.hits, stats.dropped, stats.items) == (5, 2, 5)
        assert stats.errors >= 6
        await again.aclose()


async def test_files_that_may_not_be_read_are_misses(open_folder):
    """EACCES: of one file a miss and an error in the counters; of all, the call fails."""
    with unprivileged():
        store = DiskStore(open_folder / "pool", MAX_BYTES)
        await store.put_many([(key, value_of(key)) for key in KEYS[:2]])
        path = open_folder / "pool" / "values" / f"{shard_of(KEYS[0]):02x}" / file_name(KEYS[0])
        path.chmod(0)
        assert await store.get_many(KEYS[:3]) == [None, value_of(KEYS[1]), None]
        assert (await store.stats()).errors == 1
        with pytest.raises(StoreError, match="Permission denied"):
            await store.get_many(KEYS[:1])
        await store.aclose()


async def test_a_folder_that_may_not_be_written(open_folder):
    """EACCES on writing: counted, and reads go on."""
    with unprivileged():
        store = DiskStore(open_folder / "pool", MAX_BYTES)
        await store.put_many([(key, value_of(key)) for key in KEYS[:2]])
        for path in [open_folder / "pool" / "temp", *(open_folder / "pool" / "values").iterdir()]:
            path.chmod(0o500)
        with pytest.raises(StoreError, match="Permission denied"):
            await store.put_many([(KEYS[5], b"x")])
        with pytest.raises(StoreError, match="Permission denied"):
            await store.delete_many(KEYS[:1])
        assert await store.get_many(KEYS[:2]) == [*map(value_of, KEYS[:2])]
        stats = await store.stats()
        assert (stats.dropped, stats.items) == (1, 2)
        await store.aclose()
        (open_folder / "pool").chmod(0)
        closed = DiskStore(open_folder / "pool", MAX_BYTES)
        for call in (lambda: closed.get_many(KEYS[:2]), lambda: closed.leading_run(KEYS[:2]), closed.warm):
            with pytest.raises(StoreError, match="Permission denied"):
                await call()
        assert (await closed.stats()).items == 0
        await closed.aclose()
        (open_folder / "pool").chmod(0o700)


async def test_hits_are_not_counted_where_nothing_may_be_written(open_folder):
    """Counts are no reason to trouble anybody: a read-only folder keeps none, says nothing, and can be read."""
    member = f"{'a' * 64}:{'b' * 64}"
    with unprivileged():
        store = DiskStore(open_folder / "pool", MAX_BYTES)
        await store.add_hits("model", 100, {member: 1}, {})
        (open_folder / "pool" / "hits").chmod(0o500)
        await store.add_hits("model", 100, {member: 1}, {})
        await store.add_hits("model", 101, {member: 1}, {})
        assert await store.read_hits("model", [100, 101], 10) == ({member: 1}, {})
        assert (await store.stats()).errors == 0
        await store.aclose()
        (open_folder / "pool" / "hits").chmod(0o700)


async def test_a_full_disk_loses_no_counts_that_were_there(tmp_path):
    member = f"{'a' * 64}:{'b' * 64}"
    with mounted(tmp_path / "small", 2**20) as folder:
        store = DiskStore(folder / "pool", MAX_BYTES)
        await store.add_hits("model", 100, {member: 1}, {})
        (folder / "filler").write_bytes(b"x" * (2**20 - 16 * 4096))
        many = {f"{'a' * 64}:{number:064x}": 1 for number in range(9000)}
        with pytest.raises(StoreError, match="No space left"):
            await store.add_hits("model", 100, many, {})
        assert await store.read_hits("model", [100], 10) == ({member: 1}, {})
        (folder / "filler").unlink()
        await store.add_hits("model", 100, {member: 1}, {})
        assert await store.read_hits("model", [100], 10) == ({member: 2}, {})
        await store.aclose()


async def test_files_of_another_user_can_be_read(open_folder):
    """Only the owner may leave the time of access alone."""
    if os.geteuid() != 0:
        pytest.skip("needs a second user")
    store = DiskStore(open_folder / "pool", MAX_BYTES)
    await store.put_many([(KEYS[0], value_of(KEYS[0]))])
    await store.aclose()
    for path in [open_folder / "pool", *(open_folder / "pool").rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    with unprivileged():
        reader = DiskStore(open_folder / "pool", MAX_BYTES)
        assert await reader.get_many(KEYS[:2]) == [value_of(KEYS[0]), None]
        assert (await reader.stats()).errors == 0
        await reader.aclose()


async def test_a_folder_that_is_deleted_or_replaced_while_open(tmp_path):
    """Deleting the folder clears the pool; what was known of the old one does not outlive it."""
    folder = tmp_path / "pool"
    store = DiskStore(folder, MAX_BYTES)
    await store.put_many([(key, value_of(key)) for key in KEYS[:5]])
    shutil.rmtree(folder)
    assert await store.get_many(KEYS[:5]) == [None] * 5
    assert await store.leading_run(KEYS[:5]) == 0
    assert (await store.stats()).items == 0
    await store.put_many([(KEYS[7], b"x")])
    assert await store.get_many([KEYS[0], KEYS[7]]) == [None, b"x"]
    assert (await store.stats()).items == len(store._index) == 1

    other = DiskStore(tmp_path / "other", MAX_BYTES)
    await other.put_many([(key, b"other") for key in KEYS[10:13]])
    await other.aclose()
    folder.rename(tmp_path / "aside")
    (tmp_path / "other").rename(folder)
    assert await store.get_many([KEYS[7], KEYS[10]]) == [None, b"other"]
    await store.put_many([(KEYS[8], b"y")])
    assert (await store.stats()).items == 4
    shutil.rmtree(folder)
    assert await store.sweep() == 0
    folder.mkdir()
    (folder / "thesis.tex").write_bytes(b"precious")
    with pytest.raises(StoreError, match="not empty"):
        await store.put_many([(KEYS[8], b"y")])
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]
    await store.aclose()


async def test_a_disk_that_fails_in_the_middle_of_a_file(tmp_path):
    """EIO and its like (here: a folder where the file should be): a miss and an error, never part of a value."""
    store = DiskStore(tmp_path / "pool", MAX_BYTES)
    await store.put_many([(KEYS[0], b"x"), (KEYS[1], b"y")])
    path = tmp_path / "pool" / "values" / f"{shard_of(KEYS[0]):02x}" / file_name(KEYS[0])
    path.unlink()
    path.mkdir()
    assert await store.get_many(KEYS[:2]) == [None, b"y"]
    assert (await store.stats()).errors == 1
    assert await store.leading_run(KEYS[:2]) == 0
    await store.sweep()
    assert (await store.stats()).items == 1
    await store.aclose()
