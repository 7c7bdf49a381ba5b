"""A libllama of another release is refused before it is used, or works where only the end of a structure differs."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kitelib.backends.llama_cpp.library import load_library

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler is installed")

LOAD = """
from kitelib.backends.llama_cpp.library import load_library
from kitelib.errors import BackendError, MissingExtraError
"""
FAILS = (
    LOAD
    + """
try:
    load_library()
except BackendError as error:
    print(error)
else:
    raise SystemExit("it was taken")
"""
)
GENERATES = (
    LOAD
    + """
import asyncio, sys
from kitelib import KiteEngine
async def main():
    async with KiteEngine.open(sys.argv[1], threads=1, n_ctx=256) as engine:
        print((await engine.generate([5, 6, 7], max_tokens=4)).token_ids)
asyncio.run(main())
print(load_library()._lib._name)
"""
)

# What the real library returns, with a field more. The real one lies behind: the linker finds what is not defined here.
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#define MARK 0x123456789abcdef0UL
typedef struct { char bytes[%(size)d]; } real_params;
typedef struct { char before[%(at)d]; unsigned char added[%(bytes)d]; char after[%(size)d - %(at)d]; } params;

params %(get)s(void) {
    real_params (*get)(void) = (real_params (*)(void)) dlsym(RTLD_NEXT, "%(get)s");
    real_params real = get();
    params out;
    memcpy(out.before, real.bytes, %(at)d);
    memset(out.added, 0x%(fill)s, %(bytes)d);
    memcpy(out.after, real.bytes + %(at)d, %(size)d - %(at)d);
    return out;
}

void *%(take)s(%(kind)s first, params in) {
    void *(*take)(%(kind)s, real_params) = (void *(*)(%(kind)s, real_params)) dlsym(RTLD_NEXT, "%(take)s");
    real_params real;
    for (int i = 0; i < %(bytes)d; i++) if (in.added[i] != 0x%(fill)s) abort();
    memcpy(real.bytes, in.before, %(at)d);
    memcpy(real.bytes + %(at)d, in.after, %(size)d - %(at)d);
    return take(first, real);
}
"""
TAKERS = {
    "llama_model_params": ("llama_model_default_params", "llama_model_load_from_file", "const char *"),
    "llama_context_params": ("llama_context_default_params", "llama_init_from_model", "void *"),
}


def own_folder() -> Path:
    return Path(load_library()._lib._name).resolve().parent


def run(code: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("LLAMA_CPP_LIB_PATH", "PREFIX", "TERMUX_VERSION")}
    path = os.pathsep.join([*filter(None, [env.pop("FIRST", "")]), *sys.path])
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=kept | {"PYTHONPATH": path} | env,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def changed_library(folder: Path, structure: str, at: int, num_bytes: int, fill: str = "00") -> Path:
    """A folder with a libllama whose `structure` has `num_bytes` more bytes at an offset; -1 is the end."""
    assert COMPILER is not None
    size = ctypes.sizeof(getattr(load_library(), structure))
    get, take, kind = TAKERS[structure]
    values = {"size": size, "at": size if at < 0 else at, "bytes": num_bytes, "fill": fill}
    source = folder / "shim.c"
    source.write_text(SHIM % (values | {"get": get, "take": take, "kind": kind}))
    library = folder / "lib"
    library.mkdir()
    (library / "libggml.so").symlink_to(own_folder() / "libggml.so")
    real = own_folder() / "libllama.so"
    flags = [
        "-shared",
        "-fPIC",
        "-O1",
        "-Wl,--no-as-needed",
        f"-Wl,-rpath,{own_folder()}",
        f"-Wl,-rpath-link,{own_folder()}",
    ]
    command = [COMPILER, *flags, "-o", str(library / "libllama.so"), str(source), str(real), "-ldl"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return library


def test_the_librarys_own_functions_stay_as_the_bindings_declared_them() -> None:
    import llama_cpp.llama_cpp as bindings

    library = load_library()
    assert bindings.llama_model_default_params.restype is bindings.llama_model_params
    assert type(bindings.llama_context_default_params()) is bindings.llama_context_params
    assert isinstance(library.llama_context_default_params(), bindings.llama_context_params)


def test_structures_have_room_behind_their_last_field() -> None:
    library = load_library()
    for name, function in (
        ("llama_model_params", library.llama_model_default_params),
        ("llama_context_params", library.llama_context_default_params),
    ):
        assert ctypes.sizeof(function.restype) >= ctypes.sizeof(getattr(library, name)) + 256


@needs_compiler
@pytest.mark.parametrize("structure", list(TAKERS))
@pytest.mark.parametrize("num_bytes", [8, 200])
def test_fields_appended_by_a_newer_library_come_back_to_it_as_they_were(
    tmp_path: Path, smollm2: Path, structure: str, num_bytes: int
) -> None:
    folder = changed_library(tmp_path, structure, -1, num_bytes, "5a")
    done = run(GENERATES, str(smollm2), LLAMA_CPP_LIB_PATH=str(folder))
    assert done.returncode == 0, done.stderr
    assert run(GENERATES, str(smollm2)).stdout.splitlines()[0] == done.stdout.splitlines()[0]
    assert str(folder) in done.stdout


def offsets(structure: str) -> list[int]:
    """Where a field can be put in: before each other, but among the NULL pointers at the end, where nothing tells."""
    kind = getattr(load_library(), structure)
    places = [getattr(kind, name).offset for name, _ in kind._fields_]
    last = max(getattr(kind, name).offset for name in ("embeddings", "vocab_only") if hasattr(kind, name))
    return [place for place in places if place <= last]


@needs_compiler
@pytest.mark.parametrize("structure", list(TAKERS))
def test_a_pointer_put_in_anywhere_is_found(tmp_path: Path, structure: str) -> None:
    places = [place for place in offsets(structure) if place % 8 == 0]
    assert len(places) >= 5
    for place in places:
        folder = tmp_path / str(place)
        folder.mkdir()
        done = run(FAILS, LLAMA_CPP_LIB_PATH=str(changed_library(folder, structure, place, 8)))
        assert done.returncode == 0, (place, done.stderr, done.stdout)
        assert structure in done.stdout
        assert str(folder) in done.stdout
        assert "llama-cpp-python" in done.stdout


def test_a_copy_of_the_library_elsewhere_fits(tmp_path: Path, smollm2: Path) -> None:
    shutil.copytree(own_folder(), tmp_path / "lib", symlinks=True)
    done = run(GENERATES, str(smollm2), LLAMA_CPP_LIB_PATH=str(tmp_path / "lib"))
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) in done.stdout


def bare_bindings(folder: Path) -> Path:
    """A folder with the bindings and no library of theirs, as an installation with LLAMA_BUILD=OFF leaves them."""
    import llama_cpp

    source = Path(llama_cpp.__file__).parent
    shutil.copytree(source, folder / "llama_cpp", ignore=shutil.ignore_patterns("lib", "__pycache__", "server"))
    return folder


def termux(folder: Path) -> Path:
    """A folder like Termux's PREFIX, with the libraries of its package llama-cpp."""
    prefix = folder / "com.termux" / "files" / "usr"
    shutil.copytree(own_folder(), prefix / "lib", symlinks=True)
    return prefix


@pytest.mark.parametrize("platform", ["linux", "android"])
def test_on_termux_the_library_of_its_own_package_is_found(tmp_path: Path, smollm2: Path, platform: str) -> None:
    """B40: nothing is compiled, and the CPU is enough."""
    # Python 3.13 calls the platform "android", older ones "linux".
    before = f"import os, sys, numpy, logging, asyncio\nsys.platform = {platform!r}\nenviron = dict(os.environ)\n"
    after = "\nassert dict(os.environ) == environ and sys.platform == " + repr(platform)
    prefix = termux(tmp_path)
    done = run(
        before + GENERATES + after,
        str(smollm2),
        FIRST=str(bare_bindings(tmp_path / "site")),
        PREFIX=str(prefix),
    )
    assert done.returncode == 0, done.stderr
    assert str(prefix / "lib") in done.stdout


def test_on_android_bindings_with_a_library_of_their_own_load_it(smollm2: Path) -> None:
    done = run("import sys, asyncio, numpy\nsys.platform = 'android'\n" + GENERATES, str(smollm2))
    assert done.returncode == 0, done.stderr
    assert str(own_folder()) in str(Path(done.stdout.splitlines()[-1]).resolve())


def test_another_folder_that_is_called_prefix_is_not_looked_at(tmp_path: Path) -> None:
    # A user's PREFIX=/usr/local must not change which library is loaded.
    prefix = tmp_path / "usr"
    shutil.copytree(own_folder(), prefix / "lib", symlinks=True)
    done = run(FAILS, FIRST=str(bare_bindings(tmp_path / "site")), PREFIX=str(prefix))
    assert done.returncode == 0, done.stderr
    assert str(prefix) not in done.stdout


def test_a_library_of_termux_that_does_not_load_is_named(tmp_path: Path) -> None:
    prefix = tmp_path / "com.termux" / "files" / "usr"
    (prefix / "lib").mkdir(parents=True)
    (prefix / "lib" / "libllama.so").write_bytes(b"no library")
    done = run(FAILS, FIRST=str(bare_bindings(tmp_path / "site")), PREFIX=str(prefix))
    assert done.returncode == 0, done.stderr
    assert str(prefix / "lib") in done.stdout
    assert "llama-cpp" in done.stdout


@needs_compiler
def test_a_library_that_lacks_a_function_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.c").write_text("int llama_nothing(void) { return 0; }\n")
    made = [str(COMPILER), "-shared", "-fPIC", "-o", str(tmp_path / "libllama.so"), str(tmp_path / "empty.c")]
    subprocess.run(made, check=True)
    done = run(FAILS, LLAMA_CPP_LIB_PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "undefined symbol" in done.stdout
    assert str(tmp_path) in done.stdout
