"""Compiles kitelib's native part for this checkout: `python tools/build_native.py`. Seconds; needs a C compiler.

Without a compiler it says so and succeeds, because kitelib then falls back to slower code. Standard library only.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from kitelib.native.build import BuildError, build
from progress import say


def main() -> None:
    """Builds it if it is missing or older than csrc/."""
    try:
        path, fresh = build()
    except BuildError as error:
        say(f"  not built, codecs will run slower: {error}")
        return
    say(f"  {'compiled to' if fresh else 'already there:'} {path}")


if __name__ == "__main__":
    main()
