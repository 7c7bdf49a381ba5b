"""The disk tier with several processes in one folder, and with processes that are killed at any moment."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from kitelib.errors import StoreError
from kitelib.stores.disk import DiskStore
from kitelib.stores.disk.ledger import read_books
from tests.support.disk_process import NUM_KEYS, disk_bytes, disk_process, is_whole, key_of, value_of

MAX_BYTES = 1_500_000
KEYS = [key_of(number) for number in range(NUM_KEYS)]


def value_file_bytes(folder: Path) -> tuple[int, int]:
    found = [path.lstat() for path in (folder / "values").glob("*/*.ru")]
    return len(found), sum(status.st_blocks * 512 for status in found)


async def test_killed_at_any_moment_every_value_is_whole_and_the_books_are_right(tmp_path):
    """B4, B26: after `kill -9` no value is torn, nothing is left over, and the size is that of the real files."""
    chance, found_any = random.Random(5), 0
    for turn in range(12):
        with disk_process(tmp_path / "pool", MAX_BYTES, turn) as process:
            time.sleep(chance.uniform(0.0, 0.25))
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert disk_bytes(tmp_path / "pool") <= MAX_BYTES
        store = DiskStore(tmp_path / "pool", MAX_BYTES)
        await store.warm()
        found = dict(zip(KEYS, await store.get_many(KEYS), strict=True))
        assert all(is_whole(key, value) for key, value in found.items() if value is not None)
        found_any += sum(value is not None for value in found.values())
        stats = await store.stats()
        assert (stats.items, stats.bytes) == value_file_bytes(tmp_path / "pool")
        assert stats.items == sum(value is not None for value in found.values())
        assert not list((tmp_path / "pool" / "temp").iterdir())
        assert disk_bytes(tmp_path / "pool") <= MAX_BYTES
        await store.aclose()
    assert found_any


async def test_a_killed_process_leaves_no_reservation_behind_for_the_living(tmp_path):
    """What a killed process had reserved or half written is given back by the next sweep of any other."""
    store = DiskStore(tmp_path / "pool", MAX_BYTES)
    await store.put_many([(KEYS[0], b"x" * 1000)])
    for turn in range(4):
        with disk_process(tmp_path / "pool", MAX_BYTES, turn) as process:
            time.sleep(0.1 + 0.02 * turn)
            process.kill()
    assert await store.sweep() == 0
    assert not list((tmp_path / "pool" / "temp").iterdir())
    books = await anyio.to_thread.run_sync(read_books, str(tmp_path / "pool"))
    assert not books.owners_with_reservations()
    assert (books.items, books.file_bytes) == value_file_bytes(tmp_path / "pool")
    await store.aclose()


async def test_three_processes_never_take_more_than_the_bound(tmp_path):
    """B26: the bound is one for all processes, in blocks of the file system, and holds at every moment."""
    folder = tmp_path / "pool"
    with ExitStack() as stack:
        processes = [stack.enter_context(disk_process(folder, MAX_BYTES, seed)) for seed in range(3)]
        samples = []
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline or len(samples) < 50:
            for process in processes:  # files move while they are counted, unless nobody moves them
                os.kill(process.pid, signal.SIGSTOP)
                os.waitpid(process.pid, os.WUNTRACED)
            samples.append(disk_bytes(folder))
            for process in processes:
                os.kill(process.pid, signal.SIGCONT)
            time.sleep(0.01)
        answers = []
        for process in processes:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            answers.append([int(number) for number in process.stdout.readline().split()])
    assert max(samples) <= MAX_BYTES
    assert max(samples) > MAX_BYTES * 0.8  # the bound was worked against
    for num_read, num_wrong, num_errors, evictions in answers:
        assert num_read > 0
        assert (num_wrong, num_errors) == (0, 0)
        assert evictions > 0
    store = DiskStore(folder, MAX_BYTES)
    await store.warm()
    stats = await store.stats()
    assert (stats.items, stats.bytes) == value_file_bytes(folder)
    await store.aclose()


async def test_a_stopped_process_that_holds_the_lock_costs_others_their_writes_and_no_reads(tmp_path):
    """A process stopped at the worst moment holds nobody up for ever."""
    store = DiskStore(tmp_path / "pool", MAX_BYTES)
    await store.put_many([(KEYS[0], value_of(KEYS[0]))])
    with (tmp_path / "pool" / "ledger").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert await store.get_many([KEYS[0]]) == [value_of(KEYS[0])]
        assert await store.leading_run(KEYS[:2]) == 1
        before = (await store.stats()).dropped
        with pytest.raises(StoreError, match="locked by another process"):
            await store.put_many([(KEYS[1], b"x"), (KEYS[2], b"x")])
        assert (await store.stats()).dropped == before + 2
    await store.put_many([(KEYS[1], b"x")])
    assert await store.get_many([KEYS[1]]) == [b"x"]
    await store.aclose()
