"""A bundle is taken only where it was made for, and a refusal names every field that differs and the remedy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from kitelib.fingerprint import Fingerprint, root_fingerprint
from kitelib.upcycle.bundle.compatibility import check_identity, check_roots, mismatch_message
from kitelib.upcycle.bundle.manifest import BundleRoot, Manifest, ModelIdentity
from tests.support.units import INFO

PATH: Mapping[str, str | int | bool] = {
    "backend": "llama_cpp",
    "attention": "plain",
    "layout": "llama.kv",
    "block_tokens": 16,
    "numerics": "bitwise",
    "library": "ab" * 32,
    "system": "CPU : SSE3 = 1 | SSSE3 = 1 | AVX = 1 | AVX2 = 1 | F16C = 1 | FMA = 1 | AVX512 = 1 | REPACK = 1 |",
    "rows": "RowPlan(16)",
    "threads": 4,
}
STATE = b"m" * 32
MODEL = ModelIdentity(
    name="small",
    model_state=STATE,
    state_parts={"weights": "01" * 32, "kv_type": "float16"},
    layout="llama.kv",
    block_tokens=16,
    block_bytes=4096,
    vocab_size=100,
)
ADAPTER = (b"a" * 32, 0.5)


def _root(path: Mapping[str, str | int | bool] = PATH, *, secret: bytes | None = None, **whose: Any) -> BundleRoot:
    root = root_fingerprint(STATE, path, whose.get("namespace"), namespace_secret=secret, adapter=whose.get("adapter"))
    return BundleRoot(root, path, **whose)


def _manifest(*roots: BundleRoot, **model: Any) -> Manifest:
    return Manifest(1, "test", 1.0, 0, dataclasses.replace(MODEL, **model), roots or (_root(),), (), {})


class Engine:
    """What an engine knows about its own roots."""

    def __init__(
        self,
        path: Mapping[str, str | int | bool] = PATH,
        *,
        secret: bytes | None = None,
        adapters: tuple[tuple[bytes, float], ...] = (),
    ) -> None:
        self.path, self.secret, self.adapters = path, secret, adapters

    def own_root(self, namespace: str | None, adapter: tuple[bytes, float] | None) -> Fingerprint | None:
        if adapter is not None and adapter not in self.adapters:
            return None
        return root_fingerprint(STATE, self.path, namespace, namespace_secret=self.secret, adapter=adapter)

    def check(self, *roots: BundleRoot) -> tuple[list[bool], dict[str, tuple[str, str]]]:
        return check_roots(_manifest(*roots), self.own_root, self.path)


def test_the_same_model_under_another_name_has_no_differences():
    assert check_identity(_manifest(), dataclasses.replace(MODEL, name="renamed")) == {}
    assert check_identity(_manifest(state_parts={}), MODEL) == {}  # the state decides, not what is said about it


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"model_state": b"o" * 32, "state_parts": {"weights": "02" * 32, "kv_type": "float16"}},
            {"weights": ("02" * 32, "01" * 32)},
        ),
        (
            {"model_state": b"o" * 32, "state_parts": {"weights": "01" * 32, "kv_type": "float32", "config": "cc"}},
            {"kv_type": ("float32", "float16"), "config": ("cc", "none")},
        ),
        (
            {"model_state": b"o" * 32, "state_parts": {}},
            {"weights": ("none", "01" * 32), "kv_type": ("none", "float16")},
        ),
        ({"model_state": b"o" * 32}, {"model_state": ("6f" * 8, "6d" * 8)}),
        ({"layout": "torch.kv"}, {"layout": ("torch.kv", "llama.kv")}),
        ({"block_tokens": 32, "block_bytes": 8192}, {"block_tokens": ("32", "16")}),
        ({"vocab_size": 101}, {"vocab_size": ("101", "100")}),
        ({"block_bytes": 1}, {"block_bytes": ("1", "4096")}),
    ],
)
def test_each_field_of_the_model_that_differs_is_named_with_both_values(changes, expected):
    assert check_identity(_manifest(**changes), MODEL) == expected


def test_the_identity_is_taken_from_a_loaded_model():
    identity = ModelIdentity.of(dataclasses.replace(INFO, state_parts={"weights": "ab"}))
    assert identity.layout == INFO.execution_path["layout"]
    assert check_identity(dataclasses.replace(_manifest(), model=identity), identity) == {}
    assert set(check_identity(_manifest(), identity)) == {"layout", "block_tokens", "vocab_size"}


def test_roots_that_the_engine_would_start_from_are_usable():
    engine = Engine(adapters=(ADAPTER,))
    roots = [_root(), _root(namespace="a"), _root(namespace="a", adapter=ADAPTER)]
    assert engine.check(*roots) == ([True, True, True], {})
    assert Engine(secret=b"s").check(_root(secret=b"s", namespace="a")) == ([True], {})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("backend", "torch"),
        ("attention", "flash"),
        ("layout", "other"),
        ("block_tokens", 32),
        ("numerics", "standard"),
        ("library", "cd" * 32),
        ("system", "CPU : NEON = 1"),
        ("threads", 8),
        ("kv_precision", "int8"),
        ("device", "cuda"),
    ],
)
def test_each_entry_of_the_execution_path_that_differs_is_named(name, value):
    here = str(PATH.get(name, "exact" if name == "kv_precision" else "none"))
    assert Engine().check(_root({**PATH, name: value})) == ([False], {name: (str(value), here)})
    assert Engine({**PATH, name: value}).check(_root()) == ([False], {name: (here, str(value))})


def test_values_of_another_type_are_told_apart_as_fingerprints_tell_them():
    assert Engine().check(_root({**PATH, "threads": "4"})) == ([False], {"threads": ("'4'", "4")})
    path = {**PATH, "threads": 1}
    assert Engine(path).check(_root({**PATH, "threads": True})) == ([False], {"threads": ("True", "1")})


def test_an_adapter_that_the_engine_lacks_and_another_scale_are_named():
    expected = {"adapter": ("61" * 8 + " at scale 0.5", "none")}
    assert Engine().check(_root(adapter=ADAPTER)) == ([False], expected)
    assert Engine(adapters=((ADAPTER[0], 1.0),)).check(_root(), _root(adapter=ADAPTER)) == ([True, False], expected)


def test_another_namespace_secret_is_named_where_all_else_agrees():
    expected = {"namespace_secret": ("another", "this engine's")}
    assert Engine().check(_root(secret=b"s")) == ([False], expected)
    assert Engine(secret=b"t").check(_root(secret=b"s", namespace="a")) == ([False], expected)


def test_a_root_that_only_claims_this_engine_s_path_is_not_usable():
    forged = dataclasses.replace(_root({**PATH, "threads": 8}), execution_path=PATH)
    usable, differences = Engine().check(forged)
    assert usable == [False]
    assert differences


def test_some_usable_roots_and_the_first_values_of_what_differs():
    usable, differences = Engine().check(
        _root({**PATH, "threads": 8}), _root(), _root({**PATH, "threads": 9, "rows": "x"})
    )
    assert usable == [False, True, False]
    assert differences == {"threads": ("8", "4"), "rows": ("x", "RowPlan(16)")}


def test_the_message_is_one_sentence_with_fields_values_and_remedies():
    differences = {"block_tokens": ("32", "16"), "threads": ("8", "4"), "weights": ("02" * 32, "01" * 32)}
    assert mismatch_message("cockpit.kite", differences) == (
        "the bundle 'cockpit.kite' was made for something else: block_tokens is 32 in the bundle and 16 here, threads "
        "is 8 in the bundle and 4 here, weights is 0202020202020202 in the bundle and 0101010101010101 here; open "
        "the engine with block_tokens=32; open the engine with threads=8; it is another model or another "
        "quantization: build a bundle with the model that runs here"
    )


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("backend", "torch", "backend='torch'"),
        ("device", "cuda", "device='cuda'"),
        ("kv_precision", "int8", "PoolConfig(kv_precision='int8')"),
        ("kv_type", "float32", "with the dtype"),
        ("weights_type", "float32", "with the dtype"),
        ("layout", "other", "build the bundle again"),
        ("namespace_secret", "another", "PoolConfig(namespace_secret=)"),
        ("adapter", "6161 at scale 0.5", "with the adapter"),
        ("cpu_model", "ab", "ReusePolicy(numerics='standard')"),
        ("config", "ab", "another model"),
        ("of_another_backend", "x", "opened as this one"),
    ],
)
def test_each_kind_of_difference_has_its_remedy(name, value, remedy):
    message = mismatch_message("x.kite", {name: (value, "none")})
    assert remedy in message
    assert f"{name} is" in message


def test_one_remedy_for_several_fields_is_said_once():
    message = mismatch_message("x.kite", {"threads": ("8", "4"), "library": ("a", "b"), "system": ("c", "d")})
    assert message.count("numerics='standard' and") == 1
    assert all(f"{name} is" in message for name in ("threads", "library", "system"))


@pytest.mark.parametrize(
    ("there", "here", "remedy"),
    [
        ("standard", "bitwise", "; open the engine with ReusePolicy(numerics='standard')"),
        (
            "bitwise",
            "standard",
            "if this is the same kind of machine, or build the bundle again with numerics='standard'",
        ),
    ],
)
def test_other_numerics_come_first_and_their_remedy_alone(there, here, remedy):
    """They are why the rest differs, and who has a standard bundle is not told to build one."""
    rest = {"layout": ("a", "b"), "threads": ("none", "4"), "library": ("none", "ab" * 32), "attention": ("c", "d")}
    message = mismatch_message("x.kite", {**rest, "numerics": (there, here)})
    assert f"something else: numerics is {there} in the bundle and {here} here, layout is" in message
    assert message.endswith(remedy)
    assert message.count("; ") == 1


def test_another_number_of_threads_alone_is_told_by_its_number():
    threads = {"rows": ("RowPlan(4)", "RowPlan(8)"), "threads": ("8", "4")}
    assert mismatch_message("x.kite", threads).endswith("here; open the engine with threads=8")
    assert "threads=8" not in mismatch_message("x.kite", {**threads, "library": ("a", "b")})


def test_long_values_are_cut_where_they_differ():
    system = str(PATH["system"])
    message = mismatch_message("x.kite", {"system": (system.replace("AVX512 = 1", "AVX512 = 0"), system)})
    assert "AVX512 = 0 " in message
    assert "AVX512 = 1 " in message
    assert "SSE3" not in message


def test_what_a_hostile_bundle_says_can_not_garble_or_flood_the_message():
    differences = {f"name{index}\x1b[2J\n": ("\x1b]0;x\x07{0}{1}" * 1000, "here") for index in range(5000)}
    message = mismatch_message("x.kite", differences)
    assert message.isprintable()
    assert len(message) < 10_000
    assert "4976 more" in message
    # Braces in a value are text, also where the remedy shows it.
    assert "{0.__class__}" in mismatch_message("x.kite", {"backend": ("{0.__class__}", "torch")})


def test_with_other_numerics_one_remedy_is_enough():
    differences = {
        "layout": ("llama_cpp.kv.1", "llama_cpp.kv.2"),
        "attention": ("plain", "flash"),
        "numerics": ("standard", "bitwise"),
        "library": ("a", "none"),
        "block_tokens": ("16", "32"),
    }
    message = mismatch_message("x.kite", differences)
    remedies = message.rpartition("here; ")[2].split("; ")
    assert [each.split(" and ")[0] for each in remedies] == [
        "open the engine with ReusePolicy(numerics='standard')",
        "open the engine with block_tokens=16",
    ]
    assert "with this release" in mismatch_message("x.kite", {"layout": differences["layout"]})
