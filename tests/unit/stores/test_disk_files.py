"""Files that are not what their names say: all misses, and none that is not ours is touched."""

import contextlib
import os
import shutil
import stat
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitelib.errors import StoreError
from kitelib.stores.disk import DiskStore, files
from kitelib.stores.disk.files import FORMAT_TEXT, file_name, header_bytes, key_of_name, shard_of
from tests.support.disk_process import key_of

MAX_BYTES = 8 * 2**20
VALUE = bytes(range(256)) * 50


def path_of(folder: Path, key: str) -> Path:
    return folder / "values" / f"{shard_of(key):02x}" / file_name(key)


@pytest.fixture
async def store(tmp_path):
    made = DiskStore(tmp_path / "pool", MAX_BYTES)
    await made.put_many([(key_of(number), VALUE + b"%d" % number) for number in range(4)])
    yield made
    await made.aclose()


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def cut_to_nothing(path: Path) -> None:
    os.truncate(path, 0)


def cut_in_the_header(path: Path) -> None:
    os.truncate(path, 20)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def change_the_length(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[16] ^= 1
    path.write_bytes(raw)


def change_the_key(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[60] ^= 1
    path.write_bytes(raw)


def make_it_huge(path: Path) -> None:
    """B15: 2 TiB that take no room: read whole, they would end the process."""
    os.truncate(path, 2**41)


def put_zeros(path: Path) -> None:
    """What some file systems leave after a power cut: the right length, and nothing in it."""
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize(
    "damage",
    [
        cut,
        cut_to_nothing,
        cut_in_the_header,
        lengthen,
        change_the_length,
        change_the_key,
        make_it_huge,
        put_zeros,
    ],
)
async def test_a_damaged_file_is_a_miss_and_goes(store, tmp_path, damage):
    """B2, B4, B7: what is not the whole value of its key is never given out, and not offered again."""
    path = path_of(tmp_path / "pool", key_of(1))
    damage(path)
    found = await store.get_many([key_of(0), key_of(1), key_of(2)])
    assert found == [VALUE + b"0", None, VALUE + b"2"]
    with anyio.fail_after(20):
        while path.exists():
            await anyio.sleep(0.005)
    assert await store.leading_run([key_of(0), key_of(1)]) == 1
    await store.delete_many([key_of(9)])  # after which the books are written
    assert (await store.stats()).items == 3


@pytest.mark.parametrize("damage", [cut, cut_in_the_header, lengthen, change_the_key, put_zeros])
async def test_the_head_of_a_damaged_file_is_a_miss(store, tmp_path, damage):
    damage(path_of(tmp_path / "pool", key_of(1)))
    assert await store.get_heads([key_of(0), key_of(1)], 4) == [VALUE[:4], None]


async def test_a_renamed_or_swapped_file_is_a_miss(store, tmp_path):
    """B2, B8: another key's value is never an answer, although the file is whole."""
    zero, one, new = (path_of(tmp_path / "pool", key_of(number)) for number in (0, 1, 77))
    aside = tmp_path / "aside"
    zero.rename(aside)
    one.rename(zero)
    aside.rename(one)
    new.parent.mkdir(exist_ok=True)
    shutil.copy(path_of(tmp_path / "pool", key_of(2)), new)
    keys = [key_of(number) for number in (0, 1, 2, 77)]
    assert await store.get_many(keys) == [None, None, VALUE + b"2", None]
    assert await store.get_heads(keys, 1) == [None, None, VALUE[:1], None]


async def test_a_new_value_is_not_removed_for_the_old_files_damage(store, tmp_path):
    """B4: who meets a damaged file only removes that very file."""
    path = path_of(tmp_path / "pool", key_of(1))
    cut(path)
    status = path.stat()
    await store.put_many([(key_of(1), b"new")])
    store._report(shard_of(key_of(1)), path.name, (status.st_dev, status.st_ino))
    await store.delete_many([key_of(9)])
    assert await store.get_many([key_of(1)]) == [b"new"]


async def test_files_that_are_not_ours_are_left_alone(store, tmp_path):
    folder = tmp_path / "pool"
    shard = path_of(folder, key_of(0)).parent
    foreign = [
        folder / "notes.txt",
        folder / "temp" / "keep.me",
        shard / "UPPER.ru",
        shard / "readme",
        shard / ("x" * 240 + ".ru"),
        folder / "values" / "mine" / "data",
        # the name of a key that belongs to another shard
        folder / "values" / f"{(shard_of('kite:a') + 1) % 64:02x}" / file_name("kite:a"),
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"precious")
    pipe = path_of(folder, key_of(50))
    pipe.parent.mkdir(exist_ok=True)
    os.mkfifo(pipe)
    with anyio.fail_after(20):
        assert await store.get_many([key_of(50), key_of(0)]) == [None, VALUE + b"0"]
    await store.sweep()
    await store.aclose()
    again = DiskStore(folder, MAX_BYTES)
    await again.warm()
    assert (await again.stats()).items == 4
    assert len({item.key for page in [page async for page in again.list_items()] for item in page}) == 4
    await again.aclose()
    assert all(path.read_bytes() == b"precious" for path in foreign)


async def test_a_link_in_place_of_a_file_is_not_followed(store, tmp_path):
    """Nobody who can write to the folder makes the store read another file."""
    path = path_of(tmp_path / "pool", key_of(0))
    secret = tmp_path / "secret"
    path.rename(secret)
    path.symlink_to(secret)
    assert await store.get_many([key_of(0), key_of(1)]) == [None, VALUE + b"1"]
    assert (await store.stats()).errors == 1


@pytest.mark.parametrize("name", ["FORMAT", "ledger"])
async def test_a_pipe_in_place_of_the_pool_s_own_file_holds_nobody_up(tmp_path, name):
    """Opening a pipe waits for its other end; a thread that waits for ever would also keep the process from ending."""
    (tmp_path / "values").mkdir()
    (tmp_path / "FORMAT").write_bytes(FORMAT_TEXT)
    pipe = tmp_path / name
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    store = DiskStore(tmp_path, MAX_BYTES)
    try:
        with anyio.fail_after(20):
            assert (await store.stats()).items == 0
            with pytest.raises(StoreError):
                await store.put_many([("kite:a", b"x")])
            if name == "ledger":
                assert await store.get_many(["kite:a"]) == [None]  # reading needs no books
            else:
                with pytest.raises(StoreError, match="give an empty or a new folder"):
                    await store.get_many(["kite:a"])
    finally:
        with contextlib.suppress(OSError):  # ENXIO: nobody waits at the other end, as it should be
            os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        await store.aclose()
    assert stat.S_ISFIFO(pipe.lstat().st_mode)


@pytest.mark.parametrize("content", [b"kite disk pool 2\n", b"something else"])
async def test_another_format_is_refused_and_kept(tmp_path, content):
    (tmp_path / "FORMAT").write_bytes(content)
    (tmp_path / "values").mkdir()
    (tmp_path / "values" / "data").write_bytes(b"precious")
    store = DiskStore(tmp_path, MAX_BYTES)
    calls = [
        lambda: store.put_many([("kite:a", b"x")]),
        lambda: store.get_many(["kite:a"]),
        lambda: store.leading_run(["kite:a"]),
        lambda: store.delete_many(["kite:a"]),
        lambda: store.raise_epoch("a", 1),
        store.warm,
        store.sweep,
    ]
    for call in calls:
        with pytest.raises(StoreError, match="give another folder"):
            await call()
    stats = await store.stats()
    assert (stats.items, stats.dropped) == (0, 1)
    assert stats.errors >= 7
    await store.aclose()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["FORMAT", "data", "values"]


async def test_a_folder_with_other_files_is_refused_and_kept(tmp_path):
    (tmp_path / "thesis.tex").write_bytes(b"precious")
    store = DiskStore(tmp_path, MAX_BYTES)
    with pytest.raises(StoreError, match=r"thesis\.tex.*give an empty or a new folder"):
        await store.put_many([("kite:a", b"x")])
    await store.aclose()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


async def test_an_empty_or_mounted_folder_is_made_a_pool(tmp_path):
    (tmp_path / "lost+found").mkdir()
    store = DiskStore(tmp_path, MAX_BYTES)
    await store.put_many([("kite:a", b"x")])
    assert (tmp_path / "FORMAT").read_bytes() == FORMAT_TEXT
    await store.aclose()


async def test_one_value_is_one_file_that_tells_everything(store, tmp_path):
    """B15: all of a unit is one object, which is there whole or not at all."""
    path = path_of(tmp_path / "pool", key_of(3))
    raw = path.read_bytes()
    assert len(raw) == header_bytes(key_of(3)) + len(VALUE) + 1
    assert raw.endswith(VALUE + b"3")
    copy = tmp_path / "copy"
    target = path_of(copy, key_of(3))
    target.parent.mkdir(parents=True)
    (copy / "FORMAT").write_bytes(FORMAT_TEXT)
    shutil.copy2(path, target)
    other = DiskStore(copy, MAX_BYTES)
    assert await other.get_many([key_of(3)]) == [VALUE + b"3"]
    await other.aclose()


@given(st.text(st.characters(), max_size=300))
def test_every_key_has_a_safe_name_of_its_own(key):
    name = file_name(key)
    assert len(os.fsencode(name)) <= 220
    assert name == name.lower()
    assert not {"/", "\0", "."} & set(name[:-3])
    if len(name) - 3 <= 200 and not name.startswith("="):
        assert key_of_name(name, shard_of(key)) == (key or None)


async def test_no_path_of_the_system_is_needed_beyond_plain_reading(store, monkeypatch):
    """B34: hints to the system are optional, and so is the flag that spares the time of access."""
    from kitelib.stores.disk import reader

    monkeypatch.setattr(reader, "_ADVISE", None)
    monkeypatch.setattr(files, "_NO_ACCESS_TIME", 0)
    assert await store.get_many([key_of(0), key_of(1)]) == [VALUE + b"0", VALUE + b"1"]
