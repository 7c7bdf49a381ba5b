"""`import kitelib` is cheap, and what it says it has is there."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kitelib
import kitelib.errors

HEAVY = ("jinja2", "llama_cpp", "llguidance", "obstore", "prometheus_client", "redis", "torch", "transformers", "vllm")


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def names_for_type_checkers() -> dict[str, str]:
    """Name -> module, as imported under TYPE_CHECKING."""
    tree = ast.parse(Path(kitelib.__file__).read_text(encoding="utf-8"))
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("kitelib."):
            found.update({alias.name: node.module for alias in node.names})
    return found


def test_import_loads_no_model_library() -> None:
    loaded = python(f"import sys, kitelib; print([name for name in {HEAVY} if name in sys.modules])")
    assert loaded == "[]"


def test_import_loads_nothing_but_itself() -> None:
    loaded = python("import sys, kitelib; print(sorted(name for name in sys.modules if name.startswith('kitelib')))")
    assert loaded == "['kitelib']"


def test_taking_every_name_loads_no_model_library() -> None:
    loaded = python(f"import sys; from kitelib import *; print([name for name in {HEAVY} if name in sys.modules])")
    assert loaded == "[]"


@pytest.mark.parametrize("name", kitelib.__all__)
def test_every_name_of_all_resolves(name: str) -> None:
    assert getattr(kitelib, name) is not None
    assert name in dir(kitelib)


def test_all_is_what_type_checkers_see() -> None:
    assert len(set(kitelib.__all__)) == len(kitelib.__all__)
    assert set(kitelib.__all__) == {*names_for_type_checkers(), "__version__"}


@pytest.mark.parametrize(("name", "module"), names_for_type_checkers().items())
def test_type_checkers_see_the_object_that_is_there(name: str, module: str) -> None:
    assert getattr(kitelib, name) is getattr(sys.modules[module], name)


def test_all_errors_are_public_and_in_one_tree() -> None:
    assert set(kitelib.errors.__all__) <= set(kitelib.__all__)
    for name in kitelib.errors.__all__:
        assert issubclass(getattr(kitelib.errors, name), kitelib.KiteError)


def test_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="'NoSuchThing'"):
        kitelib.NoSuchThing  # type: ignore[attr-defined]  # noqa: B018
