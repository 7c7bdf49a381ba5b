"""The attention functions of the native library refuse nonsense and stay inside their buffers."""

import ctypes
import subprocess

import pytest

from kitelib.native import build as native_build
from kitelib.native import library
from kitelib.native.attention import BFLOAT16, AttentionCall

LIBRARY = library.native_library()


def _call(**changes):
    sizes = {"item_rows": 1, "item_heads": 1, "block_tokens": 16, "query_heads": 4, "kv_heads": 2, "key_dim": 64}
    sizes |= {"value_dim": 64, "kind": BFLOAT16, "kernel": -1, "threads": 1}
    return AttentionCall(**(sizes | changes))


@pytest.mark.skipif(LIBRARY is None, reason="the native part is not built")
def test_wrong_arguments_are_refused_before_anything_is_touched():
    nothing = ctypes.c_int32(0)
    fine = {"row_starts": ctypes.addressof(nothing), "scratch_bytes": 2**20}
    assert LIBRARY.attend(_call(**fine)) == 0  # no rows, no items
    wrong = [{"kind": 8}, {"kv_heads": 3}, {"kv_heads": 0}, {"key_dim": 0}, {"value_dim": 2**20}, {"item_heads": 3}]
    wrong += [{"item_rows": 0}, {"block_tokens": 0}, {"threads": 0}, {"window": -1}, {"rows": -1}, {"num_items": -1}]
    for each in wrong:
        assert LIBRARY.attend_scratch(_call(**fine | each)) == 0, each
        assert LIBRARY.attend(_call(**fine | each)) == -1, each
    for each in ({"kernel": 7}, {"kernel": -2}, {"scratch_bytes": 64}, {"threads": 2**20}):
        assert LIBRARY.attend(_call(**fine | each)) == -1, each


@pytest.mark.skipif(LIBRARY is None, reason="the native part is not built")
def test_scratch_grows_with_the_item():
    assert LIBRARY.attend_scratch(_call()) % 64 == 0
    assert LIBRARY.attend_scratch(_call(item_rows=9)) > LIBRARY.attend_scratch(_call())
    assert LIBRARY.attend_scratch(_call(item_heads=2)) > LIBRARY.attend_scratch(_call())


def test_attention_stays_inside_its_buffers_under_the_sanitizers(tmp_path):
    """A short run; csrc/tests/fuzz_attend.c says how to make it as long as you like."""
    try:
        sources, compiler = native_build.source_folder(), native_build._compiler()
    except native_build.BuildError as error:
        pytest.skip(str(error))
    if not (sources / "tests").is_dir():
        pytest.skip("the sources of the test are only in the repository")
    program = tmp_path / "fuzz"
    files = [*sorted((sources / "src").glob("attend*.c")), *sorted((sources / "src").glob("kv_*.c"))]
    flags = ["-std=c11", "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    command = [*compiler, *flags, *map(str, files), str(sources / "tests" / "fuzz_attend.c"), "-lm", "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode and "san" in built.stderr:
        pytest.skip("this compiler has no sanitizers")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program), "60", "5"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
