"""The digest of a file is that of its content, and is remembered no longer than the file stays as it is."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from kitelib.backends import digest as digests
from kitelib.backends.digest import content_digest, default_cache_dir
from kitelib.errors import BackendError, ModelFormatError, ModelNotFoundError


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def settled(path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that looks old enough to be remembered: its change time can't be set, so the limit moves."""
    path.write_bytes(content)
    monkeypatch.setattr(digests, "_SETTLED_NS", 0)
    return path


def test_the_digest_is_that_of_the_content(tmp_path: Path) -> None:
    content = os.urandom(3 * 2**20 + 17)
    path = write(tmp_path / "f", content)
    seen: list[float] = []
    assert content_digest(path, tmp_path / "cache", seen.append) == hashlib.sha256(content).digest()
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert content_digest(write(tmp_path / "empty", b""), tmp_path / "cache") == hashlib.sha256(b"").digest()


def test_a_remembered_digest_is_used_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = settled(tmp_path / "f", b"one", monkeypatch), tmp_path / "cache"
    content_digest(path, cache)
    [entry_file] = cache.iterdir()
    remembered = json.loads(entry_file.read_text())
    entry_file.write_text(json.dumps(remembered | {"sha256": "ab" * 32}))  # visible proof that it is read
    assert content_digest(path, cache) == bytes.fromhex("ab" * 32)
    link = tmp_path / "link"
    link.symlink_to(path)
    assert content_digest(link, cache) == bytes.fromhex("ab" * 32)
    status = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # same size, same modification time
    assert content_digest(path, cache) == hashlib.sha256(b"two").digest()


def test_a_file_that_may_still_change_is_not_remembered(tmp_path: Path) -> None:
    path, cache = write(tmp_path / "f", b"one"), tmp_path / "cache"
    assert content_digest(path, cache) == hashlib.sha256(b"one").digest()
    assert not cache.exists()
    future = time.time() + 3600
    os.utime(path, (future, future))
    content_digest(path, cache)
    assert not cache.exists()


@pytest.mark.parametrize("junk", [b"", b"{", b"[]", b"null", b'{"sha256": 1}', b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_cache_only_costs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, junk: bytes) -> None:
    path, cache = settled(tmp_path / "f", b"one", monkeypatch), tmp_path / "cache"
    content_digest(path, cache)
    [entry_file] = cache.iterdir()
    entry_file.write_bytes(junk)
    assert content_digest(path, cache) == hashlib.sha256(b"one").digest()
    assert json.loads(entry_file.read_text())["sha256"] == hashlib.sha256(b"one").hexdigest()
    assert list(cache.iterdir()) == [entry_file]


def test_an_unwritable_cache_only_costs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = settled(tmp_path / "f", b"one", monkeypatch)
    blocked = write(tmp_path / "not-a-folder", b"")
    assert content_digest(path, blocked) == hashlib.sha256(b"one").digest()


def test_a_digest_needs_a_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        content_digest(tmp_path / "none", tmp_path)
    with pytest.raises(BackendError):
        content_digest(tmp_path, tmp_path)


def test_a_file_that_changes_under_way_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "f", bytes(2**21))

    def grow(_fraction: float) -> None:
        with path.open("ab") as file:
            file.write(b"x")

    with pytest.raises(ModelFormatError, match="changed while it was read"):
        content_digest(path, tmp_path / "cache", grow)


def test_the_cache_folder_follows_the_xdg_rules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "kite" / "digests"
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert default_cache_dir() == Path.home() / ".cache" / "kite" / "digests"


def test_the_cache_belongs_to_this_user_alone_whatever_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = settled(tmp_path / "f", b"content", monkeypatch)
    before = os.umask(0o002)
    try:
        content_digest(path, tmp_path / "kite" / "digests")
    finally:
        os.umask(before)
    for folder in (tmp_path / "kite", tmp_path / "kite" / "digests"):
        assert folder.stat().st_mode & 0o077 == 0
