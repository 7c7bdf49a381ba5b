"""Tables: well formed, hashed into what depends on them, and read from the package's own files."""

from __future__ import annotations

import hashlib
import json
from importlib import resources
from typing import Any

import pytest

import kitelib.yoco.canonical
from kitelib.yoco.canonical import tables, tables_digest
from kitelib.yoco.canonical.numerals import NUMERALS, numeral_value


@pytest.mark.parametrize("name", [*tables.NAMES, "gates"])
def test_no_key_is_given_twice(name: str) -> None:
    text = resources.files(kitelib.yoco.canonical).joinpath("tables").joinpath(f"{name}.json").read_text("utf-8")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        assert len(set(keys)) == len(keys), sorted(key for key in keys if keys.count(key) > 1)
        return dict(pairs)

    assert json.loads(text, object_pairs_hook=unique) == tables.load(name)


def test_the_digest_changes_with_every_table(monkeypatch: pytest.MonkeyPatch) -> None:
    before = tables_digest()
    assert len(before) == hashlib.sha256().digest_size
    plain = {name: tables.load(name) for name in tables.NAMES}
    seen = {before}
    for name in tables.NAMES:
        changed = {**plain, name: {**plain[name], "more": ["x"]}}
        monkeypatch.setattr(tables, "load", changed.__getitem__)
        seen.add(tables_digest.__wrapped__())
    monkeypatch.setattr(tables, "load", plain.__getitem__)
    assert tables_digest.__wrapped__() == before
    monkeypatch.setattr(tables, "_STEPS", tables._STEPS + 1)
    assert tables_digest.__wrapped__() not in seen
    assert len(seen) == len(tables.NAMES) + 1


def test_numerals_written_in_full() -> None:
    known = {
        "一": 1, "两": 2, "十": 10, "十二": 12, "一十二": 12, "二十": 20, "九十九": 99, "一百": 100, "一百零五": 105, "一百一十": 110,
        "一百五十": 150, "五百〇三": 503, "一千": 1000, "一千零一": 1001, "一千零一十": 1010, "两千五百": 2500, "九千九百九十九": 9999,
    }  # fmt: skip
    assert {text: numeral_value(text) for text in known} == known


@pytest.mark.parametrize(
    "text",
    [
        "一百五",
        "三四",
        "一千五",
        "一百一",
        "二零二四",
        "零五",
        "十百",
        "百",
        "一万",
        "三亿",
        "一百零",
        "一百零零五",
        "五十零一",
        "一千一",
        "一" * 99,
    ],
)
def test_numerals_that_may_mean_two_numbers_are_not_read(text: str) -> None:
    assert set(text) <= NUMERALS
    assert numeral_value(text) is None


def test_reading_is_the_inverse_of_writing() -> None:
    from kitelib.yoco.canonical.numerals import _written

    assert [numeral_value(_written(value)) for value in range(1, 10000)] == list(range(1, 10000))
