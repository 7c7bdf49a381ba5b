"""The library is loaded with quiet OpenMP workers, leaves nothing behind, and says what it could not do."""

from __future__ import annotations

import ctypes.util
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kitelib.backends.llama_cpp.library import captured_errors, load_library, spin_note

LOAD = "from kitelib.backends.llama_cpp.library import load_library, spin_note\n"
GOMP = ctypes.util.find_library("gomp")
needs_gomp = pytest.mark.skipif(GOMP is None, reason="libgomp is not installed")


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh process, whose environment decides nothing about OpenMP but what is given."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_", "LLAMA_CPP"))}
    inherited["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code], env=inherited | env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def spin_count_seen_by_openmp(code: str, **env: str) -> str:
    # libgomp prints what it read from the environment when it is loaded.
    shown = run(code, OMP_DISPLAY_ENV="VERBOSE", **env).stderr
    lines = [line for line in shown.splitlines() if "GOMP_SPINCOUNT" in line]
    assert len(lines) == 1, shown
    return lines[0].split("'")[1]


@needs_gomp
def test_openmp_is_told_not_to_spin_while_it_loads() -> None:
    assert spin_count_seen_by_openmp("import llama_cpp") != "0"
    assert spin_count_seen_by_openmp(LOAD + "load_library()") == "0"


@needs_gomp
def test_a_spin_count_set_by_the_user_stays() -> None:
    assert spin_count_seen_by_openmp(LOAD + "load_library()", GOMP_SPINCOUNT="77") == "77"


@needs_gomp
def test_a_wait_policy_set_by_the_user_decides() -> None:
    assert spin_count_seen_by_openmp(LOAD + "load_library()", OMP_WAIT_POLICY="active") != "0"


@pytest.mark.parametrize("env", [{}, {"GOMP_SPINCOUNT": "77", "KMP_BLOCKTIME": "3"}, {"OMP_WAIT_POLICY": "active"}])
def test_the_environment_is_afterwards_as_it_was(env: dict[str, str]) -> None:
    code = f"""
import ctypes, os
getenv = ctypes.CDLL(None).getenv
getenv.restype, getenv.argtypes = ctypes.c_char_p, [ctypes.c_char_p]
names = (b"GOMP_SPINCOUNT", b"KMP_BLOCKTIME", b"OMP_WAIT_POLICY")
before = dict(os.environ), [getenv(name) for name in names]
{LOAD}load_library()
assert before == (dict(os.environ), [getenv(name) for name in names])
"""
    run(code, **env)


def test_importing_does_not_load_the_library() -> None:
    run(LOAD + "import sys; assert 'llama_cpp' not in sys.modules")


@needs_gomp
def test_an_openmp_that_was_there_before_is_reported() -> None:
    code = f"import ctypes; ctypes.CDLL({GOMP!r})\n" + LOAD + "print(spin_note())"
    assert "libgomp" in run(code).stdout
    assert "GOMP_SPINCOUNT=0" in run(code).stdout
    assert run(code, GOMP_SPINCOUNT="0").stdout.strip() == "None"
    assert run(code, OMP_WAIT_POLICY="passive").stdout.strip() == "None"


@needs_gomp
def test_another_copy_of_openmp_under_its_own_soname_is_not_reported(tmp_path: Path) -> None:
    # As PyTorch wheels ship it: libgomp-<hash>.so.1.
    find = f"import ctypes; ctypes.CDLL({GOMP!r}); print(open('/proc/self/maps').read())"
    path = next(line.split()[-1] for line in run(find).stdout.splitlines() if "libgomp" in line)
    copy = tmp_path / "libgomp-a34b3233.so.1"
    image = Path(path).read_bytes()
    assert image.count(b"\0libgomp.so.1\0") == 1
    copy.write_bytes(image.replace(b"\0libgomp.so.1\0", b"\0libgomp-so.1\0"))
    code = f"import ctypes; ctypes.CDLL({str(copy)!r})\n" + LOAD + "print(spin_note())"
    assert run(code).stdout.strip() == "None"


def test_a_missing_package_is_named_with_its_extra() -> None:
    code = f"""
import sys
sys.modules["llama_cpp"] = None
{LOAD}
from kitelib.errors import MissingExtraError
try:
    load_library()
except MissingExtraError as error:
    assert "llama-cpp-python" in str(error) and "kitelib[lite]" in str(error) and error.extra == "lite"
else:
    raise SystemExit("no error")
"""
    run(code)


def test_a_folder_without_the_library_is_named_with_the_remedy(tmp_path: Path) -> None:
    code = f"""
{LOAD}
from kitelib.errors import BackendError
try:
    load_library()
except BackendError as error:
    assert {str(tmp_path)!r} in str(error) and "LLAMA_CPP_LIB_PATH" in str(error)
else:
    raise SystemExit("no error")
"""
    run(code, LLAMA_CPP_LIB_PATH=str(tmp_path))


def test_a_prebuilt_library_elsewhere_is_used(tmp_path: Path) -> None:
    folder = Path(load_library()._lib._name).parent
    (tmp_path / "lib").symlink_to(folder)
    run(LOAD + f"assert {str(tmp_path)!r} in load_library()._lib._name", LLAMA_CPP_LIB_PATH=str(tmp_path / "lib"))


def test_the_log_goes_to_logging_and_not_to_the_terminal(smollm2_path: Path) -> None:
    code = f"""
from kitelib.backends.llama_cpp.model import GGUFModel
GGUFModel.load({str(smollm2_path)!r}, vocab_only=True).close()
"""
    done = run(code)
    assert (done.stdout, done.stderr) == ("", "")


def test_an_application_keeps_its_own_log_callback() -> None:
    code = (
        "import ctypes, llama_cpp.llama_cpp as c\n"
        "mine = c.llama_log_callback(lambda level, text, data: None)\n"
        "c.llama_log_set(mine, ctypes.c_void_p(0))\n" + LOAD + "load_library()\n"
        "now, data = c.llama_log_callback(), ctypes.c_void_p()\n"
        "c.llama_log_get(ctypes.byref(now), ctypes.byref(data))\n"
        "assert ctypes.cast(now, ctypes.c_void_p).value == ctypes.cast(mine, ctypes.c_void_p).value\n"
    )
    run(code)


def test_errors_are_kept_for_the_thread_that_caused_them(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    module = load_library()
    with caplog.at_level(logging.DEBUG, "kitelib.llama_cpp"), captured_errors() as errors:
        assert not module.llama_model_load_from_file(
            os.fsencode(tmp_path / "no.gguf"), module.llama_model_default_params()
        )
    assert any("no.gguf" in line for line in errors)
    assert all(record.levelno in (logging.DEBUG, logging.INFO, logging.WARNING) for record in caplog.records)
    assert any(record.levelno == logging.WARNING for record in caplog.records)
    with captured_errors() as later:
        pass
    assert not later


def test_no_spinning_is_reported_here() -> None:
    assert spin_note() is None or "spinning" in spin_note()  # another test may have loaded OpenMP first
    assert load_library() is load_library()
