"""Safetensors files: what other tools read of ours, and what we refuse of others."""

import os
import stat
import struct

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from kitelib.errors import ConfigError, FormatError
from kitelib.upcycle.bundle import container
from kitelib.upcycle.bundle.container import MappedFile, Tensor, content_digest, encode_header, read_header, write_file
from kitelib.upcycle.bundle.strict_json import dump, parse
from tests.support.bundle_files import OLD_BUNDLE
from tests.support.bundle_units import raw_file

TENSORS = {
    "wide": Tensor("F32", (2, 3), 0, 24),
    "half": Tensor("F16", (2, 1, 2), 24, 32),
    "brain": Tensor("BF16", (2,), 32, 36),
    "none": Tensor("U8", (0,), 36, 36),
    "bytes": Tensor("U8", (5,), 36, 41),
}
DATA = bytes(range(41))
TEXTS = {"kite.bundle": '{"a":"\\u00fc"}', "other": 'quotes " and \\ backslashes\n'}
GOOD = {"a": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}, "__metadata__": {"k": "v"}}


def header_in(path):
    file = os.open(path, os.O_RDONLY)
    try:
        return read_header(file)
    finally:
        os.close(file)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "some.kite"


def test_what_is_written_is_read(path):
    header_bytes, num_bytes = write_file(path, TEXTS, TENSORS, [DATA[:7], memoryview(DATA[7:])])
    header = header_in(path)
    assert (header.metadata, header.tensors) == (TEXTS, TENSORS)
    assert list(header.tensors) == list(TENSORS)
    assert (header.data_start, header.num_bytes) == (header_bytes, num_bytes) == (path.stat().st_size - 41, num_bytes)
    assert header_bytes % 64 == 0
    assert header.digest == content_digest(TEXTS, TENSORS)
    assert path.read_bytes()[header_bytes:] == DATA


def test_standard_tools_read_the_same(path):
    write_file(path, TEXTS, TENSORS, [DATA])
    with safetensors.safe_open(path, "numpy") as file:
        assert file.metadata() == TEXTS
        assert set(file.keys()) == set(TENSORS)
        assert file.get_tensor("wide").tobytes() == DATA[:24]
        assert file.get_tensor("wide").shape == (2, 3)
        assert file.get_tensor("half").dtype == np.float16
        assert file.get_tensor("half").tobytes() == DATA[24:32]
        assert file.get_tensor("bytes").tobytes() == DATA[36:]
    raw = dict(safetensors.deserialize(path.read_bytes()))  # numpy has no bfloat16
    assert (raw["brain"]["dtype"], raw["brain"]["shape"], bytes(raw["brain"]["data"])) == ("BF16", [2], DATA[32:36])


def test_files_of_standard_tools_are_read(path):
    tensors = {"b": np.arange(6, dtype=np.float16).reshape(2, 3), "a": np.arange(3, dtype=np.float64)}
    safetensors.numpy.save_file(tensors, path, metadata={"k": "v"})
    header = header_in(path)
    assert header.metadata == {"k": "v"}
    blob = path.read_bytes()
    for name, array in tensors.items():
        tensor = header.tensors[name]
        assert tensor.shape == array.shape
        assert blob[header.data_start + tensor.start : header.data_start + tensor.stop] == array.tobytes()


@pytest.mark.parametrize(
    ("blob", "words"),
    [
        (b"", "ends at byte 0"),
        (b"\x01\x00\x00", "ends at byte 3"),
        (struct.pack("<Q", 2**63) + b"{}", "at most 16777216 are read"),
        (struct.pack("<Q", 100) + b"{}", "its header alone says 108"),
        (raw_file(""), "does not begin"),
        (raw_file("[]"), "does not begin"),
        (raw_file(" {}"), "does not begin"),
        (raw_file("{"), "can't be read"),
        (raw_file("{}"), "no metadata"),
        (raw_file({**GOOD, "__metadata__": []}, bytes(4)), "no metadata"),
        (raw_file({**GOOD, "__metadata__": {"k": 1}}, bytes(4)), "not an ASCII text"),
        (raw_file({**GOOD, "__metadata__": {"k": "\u00fc"}}, bytes(4)), "not an ASCII text"),
        (raw_file('{"__metadata__":{"k":"\u00fc"}}'), "can't be read"),
        (raw_file('{"__metadata__":{"k":"\udc80"}}'), "can't be read"),
        (raw_file({**GOOD, "\u00fc": GOOD["a"]}, bytes(4)), "exactly the fields"),
        (raw_file('{"__metadata__":{"k":"v"},"__metadata__":{}}'), "'__metadata__' is there twice"),
        (raw_file('{"__metadata__":{},"a":NaN}'), "NaN is no number"),
        (raw_file('{"__metadata__":{},"a":Infinity}'), "Infinity is no number"),
        (raw_file({**GOOD, "a": 3}, bytes(4)), "exactly the fields"),
        (raw_file({**GOOD, "a": {**GOOD["a"], "more": 1}}, bytes(4)), "exactly the fields"),
        (raw_file({**GOOD, "a": {**GOOD["a"], "dtype": "F3"}}, bytes(4)), "element type 'F3'"),
        (raw_file({**GOOD, "a": {**GOOD["a"], "dtype": ["F16"]}}, bytes(4)), "element type"),
        (raw_file({**GOOD, "a": {**GOOD["a"], "shape": [2.0]}}, bytes(4)), "the shape"),
        (raw_file({**GOOD, "a": {**GOOD["a"], "shape": [True, 2]}}, bytes(4)), "the shape"),
        (raw_file({**GOOD, "a": {**GOOD["a"], "shape": [-1, -2]}}, bytes(4)), "the shape"),
        (raw_file({**GOOD, "a": {**GOOD["a"], "shape": [1] * 8 + [2]}}, bytes(4)), "the shape"),
        (raw_file({**GOOD, "a": {**GOOD["a"], "shape": "2"}}, bytes(4)), "the shape"),
        (raw_file({**GOOD, "a": {**GOOD["a"], "shape": [3]}}, bytes(4)), "lies at"),
        (raw_file({**GOOD, "a": {**GOOD["a"], "data_offsets": [4, 0]}}, bytes(4)), "lies at"),
        (raw_file({**GOOD, "a": {**GOOD["a"], "data_offsets": [0, 4, 8]}}, bytes(4)), "lies at"),
        (raw_file({**GOOD, "a": {**GOOD["a"], "data_offsets": [2**64, 2**64 + 4]}}, bytes(4)), "lies at"),
        (raw_file({**GOOD, "a": {**GOOD["a"], "data_offsets": [4, 8]}}, bytes(8)), "begins at byte 4"),
        (raw_file({**GOOD, "b": GOOD["a"]}, bytes(8)), "begins at byte 0 of the data, not at 4"),
        (raw_file(GOOD, bytes(3)), "take 4 bytes, the file has 3"),
        (raw_file(GOOD, bytes(5)), "take 4 bytes, the file has 5"),
    ],
)
def test_what_is_wrong_is_refused(path, blob, words):
    path.write_bytes(blob)
    with pytest.raises(FormatError, match=words):
        header_in(path)


@pytest.mark.parametrize(
    "text",
    [
        '{"a":' * 3000 + "1" + "}" * 3000,
        "[" * 3000 + "]" * 3000,
        "[" + "[]," * 100_000 + "[]]",
        "{" + ",".join(f'"{index}":1' for index in range(100_000)) + "}",
        "[" + ",".join(f'"{index}"' for index in range(100_000)) + "]",
        "[" + "9" * 5000 + "]",
        '{"a":1,"a":1}',
        "[-Infinity]",
        "\ufeff{}",
        "",
    ],
)
def test_json_that_no_bundle_needs_is_refused(text):
    with pytest.raises(FormatError, match=r"^a text "):
        parse(text.encode(), "a text")


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**70), 2**70)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_json_comes_back(value):
    text = dump(value)
    assert parse(text.encode("ascii"), "it") == value
    assert " " not in dump([1, {"a": 2}])
    assert dump(parse(text.encode("ascii"), "it")) == text


def test_the_digest_covers_all_but_what_is_made_from_it():
    digest = content_digest(TEXTS, TENSORS)
    assert content_digest({**TEXTS, "kite.signature": "x", "kite.hmac": "y"}, TENSORS) == digest
    assert content_digest(dict(reversed(TEXTS.items())), dict(reversed(TENSORS.items()))) == digest
    assert content_digest({**TEXTS, "other": "x"}, TENSORS) != digest
    for tensor in (Tensor("F16", (2, 3), 0, 24), Tensor("F32", (3, 2), 0, 24), Tensor("F32", (2, 3), 0, 25)):
        assert content_digest(TEXTS, {**TENSORS, "wide": tensor}) != digest


def test_a_header_may_be_as_long_as_the_caller_says(path):
    write_file(path, TEXTS, TENSORS, [DATA])
    length = struct.unpack("<Q", path.read_bytes()[:8])[0]
    with path.open("rb") as file:
        assert read_header(file.fileno(), max_header_bytes=length).tensors == TENSORS
        with pytest.raises(FormatError, match=f"{length} bytes; at most {length - 1} are read"):
            read_header(file.fileno(), max_header_bytes=length - 1)


@pytest.mark.parametrize("chunks", [[DATA[:-1]], [DATA, b"x"], []])
def test_a_file_with_other_bytes_than_said_is_not_written(path, chunks):
    path.write_bytes(OLD_BUNDLE)
    with pytest.raises(FormatError, match="bytes were written where the header says"):
        write_file(path, TEXTS, TENSORS, chunks)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == OLD_BUNDLE


def test_an_interrupted_writer_leaves_the_old_file_alone(path):
    path.write_bytes(OLD_BUNDLE)

    def chunks():
        yield DATA[:10]
        raise KeyboardInterrupt

    def refuse(_):
        raise FormatError("not this one")

    with pytest.raises(KeyboardInterrupt):
        write_file(path, TEXTS, TENSORS, chunks())
    with pytest.raises(FormatError, match="not this one"):
        write_file(path, TEXTS, TENSORS, [DATA], check=refuse)
    with pytest.raises(ConfigError, match="make it first"):
        write_file(path.parent / "missing" / "x.kite", TEXTS, TENSORS, [DATA])
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert path.read_bytes() == OLD_BUNDLE


def test_the_mode_honours_the_umask(path):
    write_file(path, TEXTS, TENSORS, [DATA])
    umask = os.umask(0o022)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644 & ~umask


def test_progress_ends_at_the_size(path):
    seen = []
    write_file(path, TEXTS, TENSORS, [DATA[:20], DATA[20:]], progress=lambda done, total: seen.append((done, total)))
    size = path.stat().st_size
    assert seen == [(size - 21, size), (size, size)]


def test_chunks_are_small_and_end_with_the_file(path):
    path.write_bytes(bytes(3 * 2**20 + 5))
    with path.open("rb") as file:
        sizes = [len(chunk) for chunk in container.read_chunks(file.fileno(), 1, 3 * 2**20 + 5)]
        assert sum(sizes) == 3 * 2**20 + 4
        assert max(sizes) == 2**20
        with pytest.raises(FormatError, match="ends"):
            list(container.read_chunks(file.fileno(), 0, 3 * 2**20 + 6))


def test_a_mapping_notices_that_the_file_changed(path):
    path.write_bytes(b"0123456789")
    mapped = MappedFile(path)
    with pytest.raises(FormatError, match="closed"):
        mapped.part(0, 1)
    mapped.map()
    view = mapped.part(2, 5)
    assert view.readonly
    times = path.stat()
    os.utime(path, ns=(1, 1))
    with pytest.raises(FormatError, match="was changed"):
        mapped.part(2, 5)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(FormatError, match="was changed"):
        mapped.part(2, 5)
    assert mapped.changed
    mapped.close()
    mapped.close()
    with pytest.raises(FormatError, match="closed"):
        mapped.part(2, 5)
    assert view == b"234"


def test_a_file_that_changes_before_it_is_mapped_is_refused(path):
    path.write_bytes(b"0123456789")
    mapped = MappedFile(path)
    with path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(FormatError, match="changed while it was opened"):
        mapped.map()
    mapped.close()


def test_only_regular_files_are_mapped(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    before = os.listdir("/proc/self/fd")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(FormatError, match="no regular file"):
            MappedFile(path)
    assert os.listdir("/proc/self/fd") == before


def test_the_header_is_plain_json_and_padded():
    raw = encode_header(TEXTS, TENSORS)
    assert len(raw) % 64 == 0
    text = raw[8:].decode("ascii")
    assert text.rstrip(" ").endswith("}")
    assert dump(parse(text.encode(), "it")) == text.rstrip(" ")
