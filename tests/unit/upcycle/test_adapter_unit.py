"""Adapters as recyclable units: they come back as they were, and nothing else comes back."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitelib.errors import FormatError
from kitelib.fingerprint import Fingerprint, store_key
from kitelib.fingerprint.chain import model_key
from kitelib.upcycle import adapter_unit as module
from kitelib.upcycle.adapter_unit import (
    ADAPTER_LAYOUT,
    ANY_MODEL,
    AdapterContent,
    adapter_digest,
    adapter_unit,
    content_of,
    expect_adapter,
    fits_a_unit,
    tensors_of,
)
from kitelib.upcycle.codec import get_codec
from kitelib.upcycle.unit import RecyclableUnit, pack, unpack

safetensors = pytest.importorskip("safetensors.numpy")

TENSORS = {
    "base_model.model.a.lora_A.weight": np.arange(8, dtype=np.float32).reshape(2, 4),
    "base_model.model.a.lora_B.weight": np.ones((3, 2), np.float16),
}
SCALES = {"a": 0.1}


def content(scales: dict[str, float] | None = None, weights: bytes | None = None) -> AdapterContent:
    data = safetensors.save(TENSORS) if weights is None else weights
    factors = SCALES if scales is None else scales
    return AdapterContent(factors, data, adapter_digest(factors, hashlib.sha256(data).digest()))


def with_data(unit: RecyclableUnit, data: bytes) -> RecyclableUnit:
    return dataclasses.replace(unit, data=np.frombuffer(data, np.uint8), shape=(len(data),))


def test_adapter_comes_back_from_its_stored_form() -> None:
    unit = adapter_unit(content(), epoch=7)
    blob = pack(unit, get_codec("raw", "none"))
    found = content_of(unpack(blob, expected=expect_adapter(content().digest)))
    assert found.scales == SCALES
    assert found.digest == content().digest
    tensors = tensors_of(found)
    assert {name: each.shape for name, each in tensors.items()} == {name: each.shape for name, each in TENSORS.items()}
    assert [each.dtype for each in tensors.values()] == ["F32", "F16"] or "F16" in {e.dtype for e in tensors.values()}
    for name, each in TENSORS.items():
        assert tensors[name].data.tobytes() == each.tobytes()
    assert unit.epoch == 7


def test_key_names_kind_and_digest() -> None:
    unit = adapter_unit(content())
    assert unit.kind == "lora"
    assert unit.cf == content().digest
    assert not len(unit.token_ids)
    key = store_key(model_key(unit.model_state), unit.kind, unit.cf)
    assert key == f"kite:{{{content().digest.hex()[:4]}}}:{ANY_MODEL[:8].hex()}:lora:{content().digest.hex()}"
    assert adapter_unit(content(), b"m" * 32).model_state == b"m" * 32


def test_digest_is_that_of_the_specification() -> None:
    """Written out field by field, as docs/format.md describes fields."""

    def field(tag: bytes, body: bytes) -> bytes:
        return tag + struct.pack("<Q", len(body)) + body

    file_digest = bytes(range(32))
    mapping = field(b"s", b"a") + field(b"f", struct.pack("<d", 0.1))
    expected = hashlib.sha256(field(b"s", b"kite.adapter") + field(b"m", mapping) + field(b"b", file_digest)).digest()
    assert adapter_digest({"a": 0.1}, file_digest) == expected


def test_digest_depends_on_factors_and_weights_but_not_on_order() -> None:
    file_digest = bytes(32)
    base = adapter_digest({"a": 1.0, "b": 2.0}, file_digest)
    assert adapter_digest({"b": 2.0, "a": 1.0}, file_digest) == base
    others = [({"a": 2.0, "b": 1.0}, file_digest), ({"a": 1.0}, file_digest), ({"a": 1.0, "b": 2.0}, b"x" * 32)]
    assert len({base, *(adapter_digest(*each) for each in others)}) == 4


def test_unit_with_another_content_than_its_fingerprint_says_is_refused() -> None:
    unit = adapter_unit(content())
    foreign = adapter_unit(content({"a": 0.2}))
    with pytest.raises(FormatError, match="as its fingerprint says"):
        content_of(with_data(unit, foreign.data.tobytes()))
    with pytest.raises(FormatError, match="as its fingerprint says"):
        content_of(dataclasses.replace(unit, cf=Fingerprint(b"x" * 32)))


@given(st.data())
def test_no_changed_byte_goes_unnoticed(data: Any) -> None:
    unit = adapter_unit(content())
    raw = bytearray(unit.data.tobytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(FormatError):
        content_of(with_data(unit, bytes(raw)))


@given(st.binary(max_size=80))
def test_any_bytes_are_refused_and_nothing_else_happens(raw: bytes) -> None:
    with pytest.raises(FormatError):
        content_of(with_data(adapter_unit(content()), raw))


@pytest.mark.parametrize(
    "text",
    [
        b"{}", b"[]", b"{", b"\xff", b'{"scales": {}}', b'{"scales": []}', b'{"scales": {"a": 1}}',
        b'{"scales": {"a": NaN}}', b'{"scales": {"a": Infinity}}', b'{"scales": {"a": "1"}}',
        b'{"scales": {"a": true}}', b"[" * 100_000,
    ],
)  # fmt: skip
def test_factors_that_are_none_are_refused(text: bytes) -> None:
    weights = safetensors.save(TENSORS)
    with pytest.raises(FormatError, match="the adapter"):
        content_of(with_data(adapter_unit(content()), struct.pack("<I", len(text)) + text + weights))


def test_other_units_are_no_adapters() -> None:
    unit = adapter_unit(content())
    for change in ({"layout": "else"}, {"dtype": "int8"}):
        with pytest.raises(FormatError, match=ADAPTER_LAYOUT):
            content_of(dataclasses.replace(unit, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize("weights", [b"", b"\x80\x04cos\nsystem\n.", (2**60).to_bytes(8, "little") + b"{}"])
def test_weights_that_are_no_safetensors_file_are_refused_where_they_are_read(weights: bytes) -> None:
    with pytest.raises(FormatError, match="no safetensors file"):
        tensors_of(content_of(adapter_unit(content(weights=weights))))


def test_adapter_that_is_too_large_for_a_unit_is_known_before(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fits_a_unit(content())
    size = len(adapter_unit(content()).data)
    monkeypatch.setattr(module, "MAX_DATA_BYTES", size)
    assert fits_a_unit(content())
    monkeypatch.setattr(module, "MAX_DATA_BYTES", size - 1)
    assert not fits_a_unit(content())


def test_factors_keep_every_bit() -> None:
    scales = {"a": 0.1 + 0.2, "b": 1 / 3, "c": 1e-300, "ü": 2.0}
    found = content_of(adapter_unit(content(scales)))
    assert found.scales == scales
    assert json.dumps(found.scales)
