"""Builds llama-cpp-python for this CPU once, keeps the wheel, and installs it: `python tools/build_llama_cpp.py`.

This file is the one place that knows about CPUs. The facts:

* A native build (``-march=native``) switches AMX on where the CPU reports it. Many virtual machines report AMX and
  then kill the process with SIGILL at the first AMX instruction. So native builds and AMX are always off.
* Everything else is switched on exactly where the operating system reports it, so that a wheel never holds an
  instruction this CPU lacks: AVX, AVX2, FMA, F16C, BMI2, AVX-VNNI, AVX-512 and its VBMI, VNNI and BF16 parts.
* On other CPUs than x86-64 llama.cpp's own defaults are right (arm64: NEON), again without a native build.

It has to be installed before anything that depends on ``llama-cpp-python``, or pip builds a native one. The wheel is
kept in ``${XDG_CACHE_HOME:-~/.cache}/kite/wheels/<version, platform and flags>``. Standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from progress import run_logged, say

VERSION = "0.3.36"
"""The llama-cpp-python that kitelib is built and tested with. Pinned here and nowhere else."""

# CMake option -> what /proc/cpuinfo must list for it. llama.cpp's AVX512 switch needs five feature sets at once.
_X86_FEATURES = {
    "GGML_AVX": ("avx",),
    "GGML_AVX2": ("avx2",),
    "GGML_FMA": ("fma",),
    "GGML_F16C": ("f16c",),
    "GGML_BMI2": ("bmi2",),
    "GGML_AVX_VNNI": ("avx_vnni",),
    "GGML_AVX512": ("avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"),
    "GGML_AVX512_VBMI": ("avx512vbmi",),
    "GGML_AVX512_VNNI": ("avx512_vnni",),
    "GGML_AVX512_BF16": ("avx512_bf16",),
}
_AMX = ("GGML_AMX_TILE", "GGML_AMX_INT8", "GGML_AMX_BF16")
_ALWAYS = {"GGML_NATIVE": False, "LLAVA_BUILD": False}

_LOAD_CHECK = "import llama_cpp as c; c.llama_backend_init(); print(c.llama_print_system_info().decode())"


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Feature names of the first CPU as Linux spells them; empty where the system has no such file."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def cmake_flags(machine: str, features: frozenset[str]) -> dict[str, bool]:
    """CMake options for a CPU. On x86-64 without known features: SSE 4.2 alone, slow and safe."""
    flags = dict(_ALWAYS)
    if machine.lower() in ("x86_64", "amd64"):
        flags.update({option: features.issuperset(needed) for option, needed in _X86_FEATURES.items()})
        for option in _X86_FEATURES:  # the AVX-512 extensions mean nothing without their base
            flags[option] &= flags["GGML_AVX512"] or not option.startswith("GGML_AVX512_")
        flags.update(dict.fromkeys(_AMX, False))
    return dict(sorted(flags.items()))


def cache_root() -> Path:
    """The folder that keeps wheels between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kite" / "wheels"


def wheel_folder(root: Path, flags: dict[str, bool]) -> Path:
    """Where the wheel of this version, platform and set of flags lives. Wheels fit every Python 3 (tag py3-none)."""
    place = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
    digest = hashlib.sha256(json.dumps([VERSION, place, flags], sort_keys=True).encode()).hexdigest()
    return root / f"llama_cpp_python-{VERSION}-{place}-{digest[:12]}"


def find_wheel(folder: Path) -> Path | None:
    """The wheel in `folder`, or None. It appears there only when complete."""
    return next(iter(sorted(folder.glob("llama_cpp_python-*.whl"))), None)


def build(folder: Path, flags: dict[str, bool]) -> Path:
    """Builds the wheel from source into `folder`. About 8 minutes on 2 cores.

    Raises:
        SystemExit: no compiler, or the build failed; the reason is printed.
    """
    compiler = os.environ.get("CXX") or next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if compiler is None:
        raise SystemExit(
            "  No C++ compiler was found, and llama.cpp has to be compiled.\n"
            "  On Debian or Ubuntu: sudo apt-get install g++    Then run the same command again."
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    say(
        f"  Compiling llama.cpp with {compiler} on {cores} cores: about {max(2, 16 // cores)} minutes, once per machine."
    )
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "build.log"
    say(f"  The full output goes to {log}")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as scratch:
        # pip's own cache of built wheels does not know the flags, so it must neither answer nor remember.
        code = run_logged(
            [sys.executable, "-m", "pip", "wheel", "-v", "--no-cache-dir", "--no-deps", "--no-binary",
             "llama-cpp-python", "--progress-bar", "off", "--wheel-dir", scratch, f"llama-cpp-python=={VERSION}"],
            log,
            env={
                "CMAKE_ARGS": " ".join(f"-D{name}={'ON' if on else 'OFF'}" for name, on in flags.items()),
                "CMAKE_BUILD_PARALLEL_LEVEL": str(cores),
            },
        )  # fmt: skip
        built = find_wheel(Path(scratch))
        if code != 0 or built is None:
            raise SystemExit(f"  Building llama.cpp failed; see {log}")
        wheel = folder / built.name
        built.replace(wheel)
    say(f"  Built in {(time.monotonic() - started) / 60:.1f} minutes and kept for next time: {wheel}")
    return wheel


def is_installed(wheel: Path) -> bool:
    """Whether exactly this wheel is what this Python has: pip notes the digest of what it installed from a file."""
    try:
        origin = importlib.metadata.distribution("llama_cpp_python").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return False
    return origin is not None and hashlib.sha256(wheel.read_bytes()).hexdigest() in origin


def install(wheel: Path) -> None:
    """Puts the wheel into this Python's environment, over any other build of it."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # The first call replaces the package even if the version is the same; the second adds what it depends on.
    subprocess.run([*pip, "--force-reinstall", "--no-deps", str(wheel)], check=True)
    subprocess.run([*pip, str(wheel)], check=True)


def load_check() -> str | None:
    """Loads the library in a process of its own. None if that works, else the reason in one line."""
    done = subprocess.run([sys.executable, "-c", _LOAD_CHECK], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        say(f"  llama.cpp loads. {done.stdout.strip()}")
        return None
    if done.returncode < 0:
        return f"the process was killed by signal {-done.returncode}"
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]


def main() -> None:
    """Finds or builds the wheel for this CPU, installs it, and checks that it loads."""
    parser = argparse.ArgumentParser(description="Build llama-cpp-python for this CPU, keep the wheel, install it.")
    parser.add_argument("--dry-run", action="store_true", help="print the flags and the place of the wheel, do nothing")
    parser.add_argument("--cache", type=Path, default=cache_root(), help="folder that keeps wheels (%(default)s)")
    options = parser.parse_args()

    features = cpu_features()
    flags = cmake_flags(platform.machine(), features)
    folder = wheel_folder(options.cache, flags)
    enabled = [name.removeprefix("GGML_") for name, on in flags.items() if on]
    say(
        f"  This CPU ({platform.machine()}): building with {', '.join(enabled) or 'the plain defaults'}; native and AMX off."
    )
    if options.dry_run:
        say(" ".join(f"-D{name}={'ON' if on else 'OFF'}" for name, on in flags.items()))
        say(f"{folder}: {'has the wheel' if find_wheel(folder) else 'no wheel yet'}")
        return

    kept = find_wheel(folder)
    if kept is not None:
        say(f"  Using the wheel kept from an earlier build: {kept}")
    wheel = kept or build(folder, flags)
    if not is_installed(wheel):
        install(wheel)
    problem = load_check()
    if problem is not None and kept is not None:
        say(f"  The kept wheel does not load here ({problem}); building it anew.")
        kept.unlink()
        wheel = build(folder, flags)
        install(wheel)
        problem = load_check()
    if problem is not None:
        raise SystemExit(f"  llama.cpp was installed but does not load: {problem}")


if __name__ == "__main__":
    main()
