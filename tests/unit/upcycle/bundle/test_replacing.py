"""Where bundles are written: only over files, behind links, and for the same readers as before."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kitelib.errors import ConfigError
from kitelib.upcycle.bundle import Bundle
from kitelib.upcycle.bundle.editing import merge_bundles, sign_bundle
from kitelib.upcycle.bundle.replacing import replaced
from kitelib.upcycle.bundle.signing import new_key
from kitelib.upcycle.bundle.writer import BundleWriter
from tests.support.bundle_files import MODEL, TOKENS, bundle_file, root_for
from tests.support.units import BLOCK_TOKENS, kv_unit


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key.pem"
    path.write_bytes(new_key()[0])
    return path


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_a_bundle_that_is_replaced_keeps_its_permissions(tmp_path: Path, key_file: Path, mode: int) -> None:
    path = bundle_file(tmp_path / "a.kite")
    path.chmod(mode)
    sign_bundle(path, key_file)
    assert mode_of(path) == mode
    merge_bundles([path], path)
    assert mode_of(path) == mode
    bundle_file(path)
    assert mode_of(path) == mode


def test_a_new_bundle_has_what_the_umask_leaves(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        assert mode_of(bundle_file(tmp_path / "a.kite")) == 0o640
    finally:
        os.umask(old)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_a_bundle_that_is_replaced_keeps_its_owner_and_group(tmp_path: Path, key_file: Path) -> None:
    path = bundle_file(tmp_path / "a.kite")
    os.chown(path, 1234, 4321)
    path.chmod(0o640)
    sign_bundle(path, key_file)
    status = path.stat()
    assert (status.st_uid, status.st_gid, mode_of(path)) == (1234, 4321, 0o640)


def test_nobody_gets_in_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a.kite"
    path.write_bytes(b"old")
    path.chmod(0o600)
    with replaced(str(path)) as file:
        file.write(b"new")
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.kite"
    path.write_bytes(b"old")

    def stop() -> None:
        with replaced(str(path)) as file:
            file.write(b"new")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        stop()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.kite"]


def test_a_link_stays_a_link_whatever_writes(tmp_path: Path, key_file: Path) -> None:
    (tmp_path / "real").mkdir()
    real, link = tmp_path / "real" / "a.kite", tmp_path / "link.kite"
    link.symlink_to(real)
    part = bundle_file(tmp_path / "part.kite")
    for write in (
        lambda: bundle_file(link),
        lambda: merge_bundles([part], link),
        lambda: sign_bundle(part, key_file, link),
        lambda: sign_bundle(link, key_file),
    ):
        write()
        assert link.is_symlink()
        assert not real.is_symlink()
        with Bundle.open(real) as bundle:
            assert bundle.check() == []


@pytest.mark.parametrize("kind", ["pipe", "folder", "no folder", "no name", "zero byte", "link to itself", "slash"])
def test_what_can_be_no_bundle_is_refused_before_anything_is_read_or_computed(
    tmp_path: Path, key_file: Path, kind: str
) -> None:
    part = bundle_file(tmp_path / "part.kite")
    path = str(tmp_path / "x")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        os.mkdir(path)
    elif kind == "link to itself":
        os.symlink(path, path)
    else:
        path = {"no folder": f"{path}/a.kite", "no name": "", "zero byte": "a\0b", "slash": f"{path}/"}[kind]
    before = sorted(os.listdir(tmp_path))
    for write in (
        lambda: BundleWriter(path, MODEL),
        lambda: merge_bundles([part], path),
        lambda: sign_bundle(part, key_file, path),
    ):
        with pytest.raises(ConfigError, match=r"give|make it first"):
            write()
    assert sorted(os.listdir(tmp_path)) == before
    if kind == "pipe":
        assert stat.S_ISFIFO(os.stat(path).st_mode)


@pytest.mark.parametrize("name", ["key.pem", "model.gguf", "other.safetensors", "link.kite"])
def test_a_file_that_is_no_bundle_is_never_replaced(tmp_path: Path, key_file: Path, name: str) -> None:
    """A model or a key that is named as the target by mistake, also behind a link, even if it is an input."""
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(100))
    (tmp_path / "other.safetensors").write_bytes(b"@\0\0\0\0\0\0\0" + b'{"__metadata__":{"format":"pt"}}')
    (tmp_path / "link.kite").symlink_to(tmp_path / "model.gguf")
    part, target = bundle_file(tmp_path / "part.kite"), tmp_path / name
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    for write in (
        lambda: BundleWriter(target, MODEL),
        lambda: merge_bundles([part], target),
        lambda: sign_bundle(part, key_file, target),
    ):
        with pytest.raises(ConfigError, match=f"{name}' exists and is no bundle; give another name, or remove it"):
            write()
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


def test_a_file_that_comes_while_a_bundle_is_made_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.kite"
    root = root_for()
    with BundleWriter(path, MODEL) as writer:
        writer.add(kv_unit(TOKENS, 0, BLOCK_TOKENS, root=root.root), root)
        path.write_bytes(b"notes")
        with pytest.raises(ConfigError, match="is no bundle"):
            writer.finish()
    assert path.read_bytes() == b"notes"


def test_an_empty_file_and_a_damaged_bundle_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.kite"
    path.touch()
    bundle_file(path)
    path.write_bytes(path.read_bytes()[:100])
    with Bundle.open(bundle_file(path)) as bundle:
        assert bundle.check() == []
