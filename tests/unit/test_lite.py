"""The lite install: it needs what its extra names and nothing else, no compiler, and none of what is merely there."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.support.lite import bare_copy, modules_of_lite, run_lite

# Never, also where they are installed.
NEVER = {"accelerate", "hiredis", "obstore", "redis", "safetensors", "tokenizers", "torch", "transformers", "vllm"}

REFUSE = """
import sys
allowed = set(sys.argv[3].split(",")) | sys.stdlib_module_names
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in allowed:
            raise ModuleNotFoundError(f"{name} is not part of the lite install", name=name)
sys.meta_path.insert(0, Refuse())
"""
NO_PROGRAMS = """
import sys
def watch(event, arguments):
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "os.fork", "socket.connect"):
        raise RuntimeError(f"the lite engine did {event} {arguments}")
sys.addaudithook(watch)
"""
ANSWER_TWICE = """
import asyncio, sys
from pathlib import Path
import kitelib
from kitelib import KiteEngine, PoolConfig, ReusePolicy
from kitelib.native.library import native_library

async def main():
    used = []
    for _ in range(2):
        pool = PoolConfig(memory_bytes=2**24, disk=sys.argv[2])
        reuse = ReusePolicy(numerics="standard")
        async with KiteEngine.open(sys.argv[1], threads=1, n_ctx=512, pool=pool, reuse=reuse) as engine:
            first = await engine.generate(list(range(100, 180)), max_tokens=4)
            again = await engine.generate(list(range(100, 180)), max_tokens=4)
            await engine.chat([{"role": "user", "content": "Hi"}], max_tokens=2)
            used.append((first.usage.cached_tokens, again.usage.cached_tokens))
            text = "".join([chunk.text async for chunk in engine.stream("Hello", max_tokens=3)])
    return used

used = asyncio.run(main())
assert native_library() is None
print(used[0][0], used[0][1] > 0, used[1][0] > 0)
modules = list(sys.modules.items())  # but what compiled modules make up for themselves
found = {name.partition(".")[0] for name, module in modules if getattr(module, "__spec__", None)}
print(",".join(sorted(found - set(sys.stdlib_module_names))))
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return bare_copy(tmp_path / "site")


def test_the_closure_of_the_extra_is_what_it_is_thought_to_be() -> None:
    closure = modules_of_lite()
    assert closure >= {"anyio", "jinja2", "kitelib", "llama_cpp", "numpy", "yaml", "zstandard"}
    assert not closure & (NEVER - {"safetensors"})


@pytest.mark.parametrize("refused", [False, True], ids=["all installed", "the rest refused"])
def test_answers_and_tiers_need_only_what_the_extra_names(
    copy: Path, smollm2: Path, tmp_path: Path, refused: bool
) -> None:
    code = NO_PROGRAMS + (REFUSE if refused else "") + ANSWER_TWICE
    done = run_lite(copy, code, str(smollm2), str(tmp_path / "pool"), ",".join(modules_of_lite()))
    assert done.returncode == 0, done.stderr
    used, modules = done.stdout.splitlines()
    assert used == "0 True True"  # cold, from memory, and from the disk after a restart
    loaded = set(modules.split(","))
    assert not loaded & NEVER
    # One is there before any program starts, the other anyio takes where it is installed.
    assert loaded - {"_distutils_hack", "sniffio"} <= modules_of_lite()
    assert {"anyio", "jinja2", "llama_cpp", "numpy", "zstandard"} <= loaded


def test_what_is_never_loaded_is_installed_here() -> None:
    """Else the test above shows less than it says."""
    there = {name for name in NEVER if importlib.util.find_spec(name) is not None}
    assert there >= {"safetensors"}


def test_taking_the_engine_loads_what_the_core_needs(copy: Path) -> None:
    code = """
import sys
before = set(sys.modules)
from kitelib import KiteEngine, PoolConfig
print(",".join(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""
    done = run_lite(copy, code)
    assert done.returncode == 0, done.stderr
    others = set(done.stdout.strip().split(",")) - set(sys.stdlib_module_names)
    # sniffio, typing_extensions, exceptiongroup: anyio's, depending on its release and Python's.
    assert others - {"exceptiongroup", "sniffio", "typing_extensions"} == {"anyio", "kitelib", "numpy", "zstandard"}


def test_importing_kitelib_loads_nothing_that_is_not_python(copy: Path) -> None:
    code = """
import sys
before = set(sys.modules)
import kitelib
print(",".join(sorted({name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))))
"""
    assert run_lite(copy, code).stdout.strip() == "kitelib"
