import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitelib.fingerprint import store_key
from kitelib.stores.s3.keys import epoch_of, epoch_path, key_of, object_path, share_before

CF = bytes(range(32))
SAFE = set(string.ascii_letters + string.digits + "/=_-")


def test_units_of_one_model_and_kind_share_a_prefix():
    path = object_path(store_key("0123456789abcdef", "kv", CF))
    assert path == f"units/0123456789abcdef/kv/00/{CF.hex()}"


@given(st.binary(min_size=32, max_size=32), st.sampled_from(["kv", "logits", "completion", "lora"]))
def test_units_come_back_exactly(cf, kind):
    key = store_key("fedcba9876543210", kind, cf)
    assert key_of(object_path(key)) == key


@given(st.text(st.characters(), max_size=70))
def test_any_other_key_comes_back_exactly_from_a_safe_name(key):
    path = object_path(key)
    assert path is None or (key_of(path) == key and path.startswith("other/k") and set(path) <= SAFE)


@pytest.mark.parametrize(
    "key",
    [
        "",
        ".",
        "..",
        "a/../b",
        "~",
        "a%20b",
        "a=20b",
        "kite:{0000}:0123456789abcdef:kv:" + "1" * 64,
        "kite:{AAAA}:0123456789abcdef:kv:" + "A" * 64,
        "\ud800",
        "kite:\n",
    ],
)
def test_odd_keys_come_back_exactly(key):
    path = object_path(key)
    assert path.startswith("other/k")
    assert key_of(path) == key


def test_a_key_that_s3_can_not_name_has_no_object():
    assert object_path("x" * 5000) is None


@pytest.mark.parametrize(
    "path",
    [
        f"units/0123456789abcdef/kv/01/{CF.hex()}",
        f"units/0123456789abcdef/kv/00/{CF.hex()}/x",
        "units/0123456789abcdef/kv/00/short",
        "other/x",
        "other/k=zz",
        "other/k=FF",
        "other/k=41",
        "epochs/model/00000000000000000001",
        "readme.txt",
    ],
)
def test_foreign_objects_have_no_key(path):
    assert key_of(path) is None


def test_epochs_sort_as_numbers():
    paths = [epoch_path("model", epoch) for epoch in (0, 9, 10, 2**63 - 1)]
    assert paths == sorted(paths)
    assert [epoch_of(path) for path in paths] == [0, 9, 10, 2**63 - 1]
    assert epoch_of("epochs/model/12") is None


def test_the_digits_say_how_much_of_a_listing_came_before():
    half = object_path(store_key("0123456789abcdef", "kv", b"\x80" + bytes(31)))
    assert share_before(half) == pytest.approx(0.5)
    assert share_before("other/kx") == 1.0
