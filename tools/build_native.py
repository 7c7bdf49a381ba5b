"""Compiles kitelib's native part for this checkout: `python tools/build_native.py`. Seconds; needs a C compiler.

Without a compiler it says so and succeeds, because kitelib then falls back to slower code. With `--upcycle-ext`, which is
what `make upcycle_ext` runs, that is a failure; and where there is a CUDA toolkit, the part for NVIDIA GPUs is made too,
which takes half a minute and needs no GPU. Standard library only.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from kitelib.native.build import BuildError, build, build_cuda, find_nvcc
from progress import say


def main() -> int:
    """Builds what is missing or older than csrc/; returns the exit status."""
    wanted = "--upcycle-ext" in sys.argv[1:]
    try:
        path, fresh = build()
    except BuildError as error:
        say(f"  not built, {'blocks are copied and ' if wanted else ''}codecs will run slower: {error}")
        return int(wanted)
    say(f"  {'compiled to' if fresh else 'already there:'} {path}")
    return _build_cuda() if wanted else 0


def _build_cuda() -> int:
    nvcc = find_nvcc()
    if nvcc is None:
        say("  no CUDA compiler (nvcc) was found, so the part for NVIDIA GPUs is left out; nothing else needs it.")
        say("  To build it, install the CUDA toolkit and run: make upcycle_ext CUDA_HOME=/usr/local/cuda")
        return 0
    say(f"  compiling the part for NVIDIA GPUs with {nvcc} ...")
    try:
        path, fresh = build_cuda()
    except BuildError as error:
        say(f"  the part for NVIDIA GPUs was not built, PyTorch copies blocks there instead: {error}")
        return 1
    say(f"  {'compiled to' if fresh else 'already there:'} {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
