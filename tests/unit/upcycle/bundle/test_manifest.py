"""The manifest: comes back as it was written, and every field is checked."""

import dataclasses
import json

import numpy as np
import pytest

from kitelib.errors import BundleError
from kitelib.upcycle.bundle import Bundle, BundleRoot, ModelIdentity
from kitelib.upcycle.bundle.container import Header
from kitelib.upcycle.bundle.manifest_json import manifest_of, metadata_of, tensor_name, tensors_of
from tests.support.bundle_units import BUNDLE_ROOT, IDENTITY, header_of, sample_units, write_raw
from tests.support.bundles import write_units
from tests.support.units import INFO

LABELS = {"made for": "tests", "\u00fc\ud800": "\n\"'\\{}[]"}


@pytest.fixture
def path(tmp_path):
    write_units(tmp_path / "x.kite", sample_units(), IDENTITY, BUNDLE_ROOT, epoch=2**64 - 1, labels=LABELS)
    return tmp_path / "x.kite"


@pytest.fixture
def edit(path):
    """Opens a bundle after a change of the parsed header: metadata of the bundle, its units, and the tensors."""
    whole = path.read_bytes()

    def opened(change):
        path.write_bytes(whole)
        header, data = header_of(path)
        texts = header["__metadata__"]
        bundle, units = json.loads(texts["kite.bundle"]), json.loads(texts["kite.units"])
        change(bundle, units, header)
        texts["kite.bundle"], texts["kite.units"] = json.dumps(bundle), json.dumps(units)
        return Bundle.open(write_raw(path, header, data))

    return opened


def test_identity_of_a_model():
    identity = ModelIdentity.of(dataclasses.replace(INFO, state_parts={"weights": "ab"}))
    assert dataclasses.asdict(identity) == {
        "name": "test",
        "model_state": INFO.model_state,
        "state_parts": {"weights": "ab"},
        "layout": "test.kv",
        "block_tokens": 4,
        "block_bytes": 96,
        "vocab_size": 10,
    }


def test_it_comes_back(path):
    with Bundle.open(path) as bundle:
        manifest = bundle.manifest
    assert manifest.model == IDENTITY
    assert manifest.roots == (BUNDLE_ROOT,)
    assert (manifest.version, manifest.epoch, manifest.labels) == (1, 2**64 - 1, LABELS)
    assert manifest.tool.startswith("kitelib ")
    expected = {(unit.kind, unit.cf): unit for unit in sample_units()}
    assert len(manifest.units) == len(expected)
    for unit in manifest.units:
        source = expected[unit.kind, unit.cf]
        for name in ("parent", "layout", "dtype", "shape", "epoch", "created_at"):
            assert getattr(unit, name) == getattr(source, name), name
        assert np.array_equal(unit.token_ids, source.token_ids)
        assert (unit.root, unit.hits, unit.data_bytes) == (0, 1.0, len(source.data))
        assert unit.stop - unit.start == len(source.data)


def test_texts_and_tensors_make_the_same_manifest_again(path):
    with Bundle.open(path) as bundle:
        manifest, start = bundle.manifest, bundle.units[0].start
    header = Header(metadata_of(manifest), tensors_of(manifest.units), start, 0, b"")
    again = manifest_of(header)
    assert metadata_of(again) == metadata_of(manifest)
    assert [(unit.start, unit.stop) for unit in again.units] == [(unit.start, unit.stop) for unit in manifest.units]


@pytest.mark.parametrize(
    "root",
    [
        BundleRoot(b"x" * 32, {}),
        BundleRoot(b"y" * 32, {"a": "", "b": -(2**63), "c": False}, "", (b"z" * 32, -0.25)),
    ],
)
def test_roots_come_back_with_their_types(path, root):
    with Bundle.open(path) as bundle:
        manifest = dataclasses.replace(bundle.manifest, roots=(root,), units=())
    (again,) = manifest_of(Header(metadata_of(manifest), {}, 0, 0, b"")).roots
    assert again == root
    assert {name: type(value) for name, value in again.execution_path.items()} == {
        name: type(value) for name, value in root.execution_path.items()
    }


def test_other_spacing_and_order_are_the_same_bundle(path, edit):
    with Bundle.open(path) as bundle:
        before = bundle.digest
    with edit(lambda bundle, units, header: units.reverse()) as bundle:
        assert bundle.check() == []
        assert bundle.digest != before  # the texts are what is signed


def test_a_safetensors_file_that_is_no_bundle(tmp_path):
    import safetensors.numpy

    safetensors.numpy.save_file({"a": np.zeros(3, np.float32)}, tmp_path / "a", metadata={"format": "np"})
    safetensors.numpy.save_file({"a": np.zeros(3, np.float32)}, tmp_path / "b")
    with pytest.raises(BundleError, match=r"a safetensors file, but no bundle: its metadata has no kite\.bundle"):
        Bundle.open(tmp_path / "a")
    with pytest.raises(BundleError, match="no metadata; a bundle says there"):
        Bundle.open(tmp_path / "b")


DIGESTS = ["", "00", "AB" * 32, "0 " * 32, "zz" * 32, "0" * 62 + " 0", 5, None, "\u0660" * 64]
WHOLES = ["1", 1.0, True, None, -1, 2**70, [1]]
NUMBERS = ["1", True, None, 1e400, 10**400]
TEXTS = [1, None, ["x"], "x" * 4097]
MAPS = [[], "x", None, {"x": 1}, {"x" * 4097: "y"}, {str(index): "" for index in range(257)}]


@pytest.mark.parametrize(
    ("place", "values"),
    [
        (("version",), [2, 0, "1", None, 1.5]),
        (("tool",), TEXTS),
        (("created_at",), NUMBERS),
        (("epoch",), [*WHOLES, 2**64]),
        (("labels",), MAPS),
        (("model",), [[], None, {}]),
        (("model", "name"), TEXTS),
        (("model", "model_state"), DIGESTS),
        (("model", "state_parts"), MAPS),
        (("model", "layout"), ["", "\u00fc", "x" * 256, 1]),
        (("model", "block_tokens"), [*WHOLES, 0, 2**16 + 1]),
        (("model", "block_bytes"), [*WHOLES, 2**30 + 1]),
        (("model", "vocab_size"), [*WHOLES, 0, 2**32 + 1]),
        (("roots",), [{}, None, [], [{}] * 4097, [1]]),
        (("roots", 0, "root"), DIGESTS),
        (("roots", 0, "execution_path"), [[], None, {"a": 1.5}, {"a": None}, {"a": 2**63}, {"a": "x" * 4097}]),
        (("roots", 0, "namespace"), [1, "x" * 4097, ["x"]]),
        (("roots", 0, "adapter"), [[], "x", {}, {"digest": "00", "scale": 1.0}, {"digest": "00" * 32, "scale": "1"}]),
    ],
)
def test_fields_of_the_bundle_are_checked(edit, place, values):
    for value in values:

        def change(bundle, units, header, value=value):
            inner = bundle
            for name in place[:-1]:
                inner = inner[name]
            inner[place[-1]] = value

        with pytest.raises(BundleError):
            edit(change)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("kind", ["lora", "KV", "logits", 1, None, ["kv"]]),
        ("cf", [*DIGESTS, "ab" * 32]),
        ("parent", DIGESTS),
        ("token_ids", [[1.0], [True], ["1"], [-1], [2**32], None, "1", [[1]], [1] * (2**16 + 1)]),
        ("layout", ["", "\u00fc", "x" * 256, 1]),
        ("dtype", ["float17", "F16", 1, None, "bfloat16", "float32"]),
        ("shape", [[3, 4, 5], [4, 4, 3], [48], [3.0, 4, 4], [-3, -4, 4], [1] * 9, None, 48, [True, 48]]),
        ("codec", ["raw", "raw/lz4", "raw/zstd", "int8_kv/none", 1, None]),
        ("data_bytes", [*WHOLES, 95, 97, 2**30 + 1]),
        ("epoch", [*WHOLES, 2**64]),
        ("created_at", NUMBERS),
        ("sha256", DIGESTS),
        ("crc32", [*WHOLES, 2**32]),
        ("root", [*WHOLES[:-2], 1]),
        ("hits", [*NUMBERS, -0.5]),
    ],
)
def test_fields_of_a_unit_are_checked(edit, name, values):
    for value in values:

        def change(bundle, units, header, value=value):
            next(unit for unit in units if unit["dtype"] == "float16" and unit["data_bytes"] == 96)[name] = value

        with pytest.raises(BundleError):
            edit(change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda bundle, units, header: units.pop(), "is not both a unit and a tensor"),
        (lambda bundle, units, header: units.append(units[0]), "has 7 units, of which 6"),
        (lambda bundle, units, header: units[0].update(path="/etc/passwd"), "has the unknown field 'path'"),
        (lambda bundle, units, header: units[0].pop("crc32"), "a unit lacks field 'crc32'"),
        (lambda bundle, units, header: bundle.update(more=1), "has the unknown field 'more'"),
        (lambda bundle, units, header: bundle.pop("tool"), "lacks field 'tool'"),
        (lambda bundle, units, header: header["__metadata__"].update(more="1"), "which no bundle has"),
        (lambda bundle, units, header: bundle["roots"][0].update(more=1), "unknown field"),
        (lambda bundle, units, header: bundle["model"].update(more=1), "unknown field"),
    ],
)
def test_entries_must_be_exactly_those(edit, change, words):
    with pytest.raises(BundleError, match=words):
        edit(change)


def test_compressed_tensors_are_bytes(tmp_path):
    path = tmp_path / "x.kite"
    write_units(path, sample_units(), IDENTITY, BUNDLE_ROOT, compression="zstd")
    with Bundle.open(path) as bundle:
        packed = next(unit for unit in bundle.units if unit.codec == "paged_kvcache_v2/zstd")
    header, data = header_of(path)
    entry = header[tensor_name(packed.kind, packed.cf)]
    assert (entry["dtype"], entry["shape"]) == ("U8", [packed.stop - packed.start])
    entry["dtype"] = "I8"
    with pytest.raises(BundleError, match="the tensor is I8"):
        Bundle.open(write_raw(path, header, data))


def test_messages_name_the_file_and_stay_short(edit, path):
    with pytest.raises(BundleError) as caught:
        edit(lambda bundle, units, header: bundle.update(tool=["x" * 10**5]))
    assert repr(str(path)) in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("model", "unit", "words"),
    [
        ({"layout": "other.kv"}, {}, "has the layout 'test.kv', not the model's 'other.kv'"),
        ({"block_tokens": 3, "block_bytes": 72}, {}, "has 4 tokens; a block of the model has 1 to 3"),
        ({"block_bytes": 192}, {}, "bytes for [124] tokens; 4 take 192"),
        ({"vocab_size": 11}, {}, "has 40 bytes; logits of a vocabulary of 11 take 44"),
        ({}, {"token_ids": [1, 2, 3, 4]}, "comes after 4 tokens of a block of 4"),
        ({}, {"shape": [2**16 + 2], "data_bytes": 4 * (2**16 + 2)}, "a completion has at most 262148"),
        ({}, {"shape": [2**28], "data_bytes": 2**30}, "a completion has at most 262148"),
    ],
)
def test_units_must_have_a_size_that_the_model_gives_them(tmp_path, model, unit, words):
    """What decoding would give is bounded by what a unit may be, so a small file can't ask for a gigabyte."""
    path = tmp_path / "x.kite"
    write_units(path, sample_units(), IDENTITY, BUNDLE_ROOT, compression="zstd")
    header, data = header_of(path)
    texts = header["__metadata__"]
    bundle, units = json.loads(texts["kite.bundle"]), json.loads(texts["kite.units"])
    bundle["model"].update(model)
    completion = next(each for each in units if each["kind"] == "completion")
    if "data_bytes" in unit:  # stored as if it were compressed
        completion["codec"] = "raw/zstd"
        tensor = header[tensor_name("completion", bytes.fromhex(completion["cf"]))]
        start, stop = tensor["data_offsets"]
        tensor.update(dtype="U8", shape=[stop - start])
    completion.update(unit)
    texts["kite.bundle"], texts["kite.units"] = json.dumps(bundle), json.dumps(units)
    with pytest.raises(BundleError, match=words):
        Bundle.open(write_raw(path, header, data))
