import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitelib.errors import ConfigError, InvalidRequestError
from kitelib.fingerprint import encode_fields, root_fingerprint, short

MODEL = bytes(range(32))
OTHER_MODEL = bytes(range(1, 33))
PATH = {"backend": "llama_cpp", "chunk": 512, "flash_attention": False}

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.binary(max_size=9)
    | st.text(st.characters(), max_size=9)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def typed(value: object) -> object:
    """The value with its types, so that == tells 1 from True and 1.0, and 0.0 from -0.0."""
    if isinstance(value, dict):
        return {key: typed(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [typed(inner) for inner in value]
    return type(value).__name__, value, str(value)


@settings(deadline=None)
@given(st.lists(values, max_size=4), st.lists(values, max_size=4))
def test_different_fields_have_different_bytes(left, right):
    assert (encode_fields(*left) == encode_fields(*right)) == (typed(left) == typed(right))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (("ab", "c"), ("a", "bc")),
        (("1",), (1,)),
        ((1,), (True,)),
        ((1,), (1.0,)),
        ((0.0,), (-0.0,)),
        (("a",), (b"a",)),
        ((None,), ("",)),
        ((None,), ()),
        ((["a", "b"],), ("a", "b")),
        ((["a"], "b"), (["a", "b"],)),
        (([],), ({},)),
        (({"a": "b"},), (["a", "b"],)),
        ((255,), (-1,)),
    ],
)
def test_lookalikes_are_told_apart(left, right):
    assert encode_fields(*left) != encode_fields(*right)


@pytest.mark.parametrize(
    ("number", "body"),
    [(0, "00"), (127, "7f"), (128, "8000"), (255, "ff00"), (-1, "ff"), (-128, "80"), (-129, "7fff"), (-256, "00ff")],
)
def test_whole_numbers_have_their_shortest_form(number, body):
    assert encode_fields(number).hex() == "69" + f"{len(body) // 2:02x}" + "00" * 7 + body


def test_order_of_mapping_keys_does_not_count():
    assert encode_fields({"a": 1, "b": [2]}) == encode_fields({"b": (2,), "a": 1})


@pytest.mark.parametrize("bad", [object(), {1: "x"}, {"a": {2}}, [1j], {"a", "b"}])
def test_unknown_types_are_named(bad):
    with pytest.raises(InvalidRequestError, match="fingerprint"):
        encode_fields("fine", bad)


def test_every_input_moves_the_root():
    secret, adapter = b"server secret", (b"a" * 32, 1.0)
    roots = [
        root_fingerprint(MODEL, PATH, None),
        root_fingerprint(OTHER_MODEL, PATH, None),
        root_fingerprint(MODEL, {**PATH, "chunk": 256}, None),
        root_fingerprint(MODEL, {**PATH, "flash_attention": 0}, None),
        root_fingerprint(MODEL, PATH, ""),
        root_fingerprint(MODEL, PATH, "bank"),
        root_fingerprint(MODEL, PATH, "bank", namespace_secret=secret),
        root_fingerprint(MODEL, PATH, "bank", namespace_secret=b"another secret"),
        root_fingerprint(MODEL, PATH, None, namespace_secret=secret),
        root_fingerprint(MODEL, PATH, None, adapter=adapter),
        root_fingerprint(MODEL, PATH, None, adapter=(b"a" * 32, 0.5)),
        root_fingerprint(MODEL, PATH, None, adapter=(b"b" * 32, 1.0)),
        root_fingerprint(MODEL, PATH, "bank", adapter=adapter),
    ]
    assert len(set(roots)) == len(roots)
    assert all(len(root) == 32 for root in roots)


def test_adapter_scale_is_a_number_whatever_its_type():
    assert root_fingerprint(MODEL, PATH, None, adapter=(b"a" * 32, 1)) == root_fingerprint(
        MODEL, PATH, None, adapter=(b"a" * 32, 1.0)
    )


def test_namespace_that_spells_the_derived_one_stays_outside():
    """Knowing the digits that a secret turns a tenant into does not give access to the tenant's units."""
    private = root_fingerprint(MODEL, PATH, "bank", namespace_secret=b"server secret")
    guesses = ["hmac-sha256", "bank", '["hmac-sha256", "bank"]', private.hex()]
    assert private not in {root_fingerprint(MODEL, PATH, guess) for guess in guesses}


def test_namespace_equal_to_an_adapter_does_not_share():
    """B22: every field has its type and length, so no field passes for another."""
    as_namespace = root_fingerprint(MODEL, PATH, "a" * 32)
    as_adapter = root_fingerprint(MODEL, PATH, None, adapter=(b"a" * 32, 1.0))
    assert as_namespace != as_adapter


def test_wrong_arguments_are_refused():
    with pytest.raises(InvalidRequestError, match="16 bytes"):
        root_fingerprint(b"x" * 16, PATH, None)
    with pytest.raises(ConfigError, match="namespace_secret"):
        root_fingerprint(MODEL, PATH, "bank", namespace_secret=b"")
    with pytest.raises(InvalidRequestError):
        root_fingerprint(MODEL, {"kernels": {"avx2"}}, None)


PRINT_KEYS = """
from kitelib.fingerprint import BlockChain, root_fingerprint
root = root_fingerprint(bytes(range(32)), {"backend": "llama_cpp", "chunk": 512, "flash_attention": False}, "bank")
chain = BlockChain(root, 16, range(40))
print(root.hex(), *(cf.hex() for cf in chain.fingerprints), chain.end().hex())
"""


def test_fingerprints_are_the_same_in_every_process():
    """B6: keys depend on nothing of the process."""
    printed = set()
    for seed in ("0", "1", "random"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run(
            [sys.executable, "-c", PRINT_KEYS], env=environment, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stderr
        printed.add(run.stdout)
    (line,) = printed
    # Pinned: a change here makes every stored unit of every user unreachable.
    assert line.split() == [
        "4993d75017f3b2918eb72927bed621c1748f38867d35f694039ed86443c2d474",
        "7c4956b0c1e6fee7cdbb63093eab54460c2866ca9822e63be81e92fff8913782",
        "0c618a2f04e5469e766b2deba737bced5e027ae51fdffd873815085a4fdaa383",
        "075e41d0f93112f4ceba06f33e7719f6007bce41c25f9f918cfbc1ed44c6b695",
    ]


def test_short_is_sixteen_digits():
    assert short(MODEL) == "0001020304050607"
