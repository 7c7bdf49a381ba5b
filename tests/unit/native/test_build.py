"""The native part is compiled on demand, and a library that doesn't fit is refused, never a crash."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from kitelib.native import build as native_build
from kitelib.native import library
from kitelib.native.library import KvShape, NativeLibrary, load_library
from tests.support.kv_data import kv_like

COMPILER = any(shutil.which(name) for name in ("cc", "gcc", "clang"))
needs_compiler = pytest.mark.skipif(not COMPILER, reason="no C compiler")


@needs_compiler
def test_the_command_compiles_it_once_and_it_works(tmp_path):
    command = [sys.executable, "-m", "kitelib.native.build", "--folder", str(tmp_path)]
    first, second = (subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(2))
    assert "is built" in first.stdout
    assert "is up to date" in second.stdout
    path = tmp_path / native_build.LIBRARY_NAME
    assert native_build.build(tmp_path) == (path, False)
    assert [entry.name for entry in tmp_path.iterdir()] == [native_build.LIBRARY_NAME]
    data = kv_like((2, 16, 64), "float16")
    shape = KvShape(2, 16, 64, 10)
    loaded = NativeLibrary(path)
    assert loaded.kv_decode(shape, loaded.kv_encode(shape, data)).tobytes() == data.tobytes()


def test_without_a_compiler_the_command_says_what_to_do(tmp_path):
    command = [sys.executable, "-m", "kitelib.native.build", "--folder", str(tmp_path)]
    environment = {key: value for key, value in os.environ.items() if key != "CC"} | {"PATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert "no C compiler was found" in done.stderr
    assert "apt-get install gcc" in done.stderr


def test_a_failed_build_leaves_the_old_library(tmp_path, monkeypatch):
    path = tmp_path / native_build.LIBRARY_NAME
    path.write_bytes(b"old")
    assert not native_build.is_current(path)
    monkeypatch.setenv("CC", "false")
    with pytest.raises(native_build.BuildError, match="status 1"):
        native_build.build(tmp_path)
    assert path.read_bytes() == b"old"


@needs_compiler
def test_a_library_of_another_version_is_refused_with_a_note(tmp_path):
    source = tmp_path / "old.c"
    source.write_text("unsigned kite_abi(void) { return 7; }\n", encoding="utf-8")
    native_build.compile_library(tmp_path / "old.so", [source], ["-fvisibility=default"])
    loaded, note = load_library(tmp_path / "old.so")
    assert loaded is None
    assert "version 7 where 1 is needed" in note


@needs_compiler
def test_a_library_without_the_functions_is_refused_with_a_note(tmp_path):
    for name, text in (("none", "int x;"), ("some", "unsigned kite_abi(void) { return 1; }")):
        source = tmp_path / f"{name}.c"
        source.write_text(text + "\n", encoding="utf-8")
        native_build.compile_library(tmp_path / f"{name}.so", [source], ["-fvisibility=default"])
        loaded, note = load_library(tmp_path / f"{name}.so")
        assert loaded is None
        assert f"{name}.so is not used" in note


def test_a_file_that_is_no_library_is_refused_with_a_note(tmp_path):
    path = tmp_path / "text.so"
    path.write_text("no library", encoding="utf-8")
    assert load_library(path)[0] is None
    assert "is not used" in load_library(path)[1]
    assert load_library(tmp_path / "missing.so") == (None, "")


def test_where_it_is_missing_people_are_told_how_to_build_it(tmp_path, monkeypatch):
    monkeypatch.setattr(native_build, "LIBRARY_NAME", "missing.so")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library._found.cache_clear()
    try:
        assert library.native_library() is None
        assert "python -m kitelib.native.build" in library.native_note()
    finally:
        library._found.cache_clear()


def test_wrong_arguments_are_refused_before_the_native_part_sees_them():
    loaded = library.native_library()
    if loaded is None:
        pytest.skip("the native part is not built")
    data = kv_like((2, 16, 64), "float16")
    for shape in (KvShape(2, 16, 63, 10), KvShape(2, 16, 64, 9), KvShape(0, 16, 64, 10)):
        with pytest.raises(ValueError, match="needs|refuses"):
            loaded.kv_encode(shape, data)
    with pytest.raises(ValueError, match="needs"):
        loaded.kv_encode(KvShape(2, 16, 64, 10), data.view(np.uint16))
    with pytest.raises(ValueError, match="refuses"):
        loaded.kv_encode(KvShape(2, 16, 64, 10), data, kernel=9)
    for shape in (KvShape(2**31, 2**31, 4, 10), KvShape(2, 16, 64, 9)):
        with pytest.raises(ValueError, match="can't decode"):
            loaded.kv_decode(shape, b"")


@needs_compiler
def test_damaged_bodies_stay_inside_their_buffers_under_the_sanitizers(tmp_path):
    """A short run; csrc/tests/fuzz_kv.c says how to make it as long as you like."""
    sources = native_build.source_folder()
    if not (sources / "tests").is_dir():
        pytest.skip("the sources of the test are only in the repository")
    program = tmp_path / "fuzz"
    files = [*sorted((sources / "src").glob("kv_*.c")), sources / "tests" / "fuzz_kv.c"]
    flags = ["-std=c11", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    compiler = native_build._compiler()
    built = subprocess.run(
        [*compiler, *flags, *map(str, files), "-o", str(program)], capture_output=True, text=True, check=False
    )
    if built.returncode and "san" in built.stderr:
        pytest.skip("this compiler has no sanitizers")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program), "2000", "5"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
