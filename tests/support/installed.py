"""Packages that are installed for one test only: found by `importlib.metadata` like any other, in a folder of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

__all__ = ["install"]


def install(
    monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, entry_points: dict[str, str], code: Path | str
) -> None:
    """Puts the package on the path of this test.

    Args:
        folder: an empty folder for its metadata, and its code if that is text.
        entry_points: scheme -> object, of the group ``kitelib.stores``.
        code: the folder with its modules, or the text of its one module, ``<name>.py`` with underscores.
    """
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{scheme} = {target}" for scheme, target in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[kitelib.stores]", *lines, ""]))
    if isinstance(code, str):
        (folder / f"{name.replace('-', '_')}.py").write_text(code)
    else:
        monkeypatch.syspath_prepend(str(code))
    monkeypatch.syspath_prepend(str(folder))
