"""Broken files are refused by name, with what is wrong; sound ones are summarized."""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitelib.backends.llama_cpp.gguf import _TENSOR_TYPES, GGUFArray, check_file, split_paths
from kitelib.errors import BackendError, ModelFormatError, ModelNotFoundError
from tests.support.gguf_files import corrupt_copy, truncated_copy


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def header(tensors: int, entries: int, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return struct.pack("<4sIQQ", magic, version, tensors, entries)


ARCH = entry("general.architecture", 8, text("llama"))


def tensor(name: str, shape: list[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def write(path: Path, *parts: bytes) -> Path:
    path.write_bytes(b"".join(parts))
    return path


def test_a_real_model(smollm2_path: Path) -> None:
    found = check_file(smollm2_path)
    assert (found.architecture, found.kind, found.num_tensors) == ("llama", "model", 272)
    assert found.of_architecture("context_length") == 8192
    assert found.of_architecture("no_such_key") is None
    assert found.metadata["tokenizer.ggml.eos_token_id"] == 2
    assert "<|im_start|>" in str(found.metadata["tokenizer.chat_template"])
    assert found.arrays["tokenizer.ggml.tokens"] == GGUFArray(8, 49152)
    assert found.size_bytes == smollm2_path.stat().st_size
    assert split_paths(found) == [smollm2_path]


def test_another_real_model(gemma_path: Path) -> None:
    found = check_file(gemma_path)
    assert (found.architecture, found.of_architecture("attention.sliding_window")) == ("gemma3", 512)


def test_tensor_sizes_agree_with_the_gguf_package() -> None:
    other = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    # The package still gives Q8_1 two 32-bit scales; ggml has had two 16-bit ones since 2024.
    del other[9]
    assert {kind: _TENSOR_TYPES[kind] for kind in other} == other


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="none.gguf") as caught:
        check_file(tmp_path / "none.gguf")
    assert isinstance(caught.value, FileNotFoundError)
    with pytest.raises(ModelNotFoundError):
        check_file(write(tmp_path / "file", b"x") / "below-a-file")


def test_a_folder_and_a_pipe_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="a folder"):
        check_file(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelFormatError, match="not a regular file"):
        check_file(tmp_path / "pipe")


def test_a_path_with_a_nul_is_an_error_of_ours() -> None:
    with pytest.raises(BackendError):
        check_file("a\0b")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "0 bytes, too few"),
        (b"GGUF", "4 bytes, too few"),
        (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git lfs pull"),
        (header(0, 0, version=1), "GGUF version 1"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "big-endian"),
        (header(0, 2**62), "metadata entries, more than"),
        (header(2**40, 0), "tensors and 0 metadata entries, more than"),
        (header(0, 0), "architecture"),
        (header(0, 1) + struct.pack("<Q", 2**63) + bytes(99), "needs 9223372036854775808 bytes"),
        (header(0, 1) + entry("k", 99, bytes(20)), "unknown type 99"),
        (header(0, 1) + entry("k", 9, struct.pack("<IQ", 9, 1) + bytes(20)), "array of the unknown type 9"),
        (header(0, 1) + entry("k", 9, struct.pack("<IQ", 5, 2**60)), "truncated or corrupt"),
        (header(0, 1) + entry("k", 9, struct.pack("<IQ", 8, 2**60)), "truncated or corrupt"),
        (
            header(0, 1) + entry("k", 9, struct.pack("<IQ", 8, 2)) + text("a") + struct.pack("<Q", 2**64 - 1),
            "truncated",
        ),
        (header(0, 2) + ARCH + ARCH, "occurs twice"),
        (header(0, 1) + entry("general.architecture", 4, struct.pack("<I", 7)), "architecture"),
        (header(0, 2) + ARCH + entry("general.type", 4, struct.pack("<I", 7)), "'general.type' is not a string"),
        (header(0, 2) + ARCH + entry("general.alignment", 4, struct.pack("<I", 3)), "not a power of two"),
        (header(0, 2) + ARCH + entry("general.alignment", 4, struct.pack("<I", 0)), "not a power of two"),
        (header(0, 2) + ARCH + entry("llama.block_count", 4, struct.pack("<I", 10**6)), "block_count is 1000000"),
        (header(0, 2) + ARCH + entry("llama.block_count", 8, text("two words")), "is not a count"),
        (header(1, 1) + ARCH + tensor("t", [32, 4], 0, 0), "need 640 bytes, but the file has"),
        (header(1, 1) + ARCH + tensor("t", [33], 3, 0) + bytes(999), "not aligned"),
        (header(1, 1) + ARCH + tensor("t", [32], 0, 8) + bytes(999), "not aligned"),
        (header(1, 1) + ARCH + tensor("t", [1] * 5, 0, 0) + bytes(999), "5 dimensions"),
        (header(1, 1) + ARCH + tensor("t" * 64, [1], 0, 0) + bytes(999), "longer than 63"),
        (header(2, 1) + ARCH + tensor("t", [1], 0, 0) * 2 + bytes(999), "occurs twice"),
        (header(1, 1) + ARCH + tensor("t", [2**63, 2**63], 0, 0) + bytes(999), "truncated or corrupt"),
    ],
)
def test_damage_is_refused_with_its_reason(tmp_path: Path, content: bytes, says: str) -> None:
    path = write(tmp_path / "broken.gguf", content)
    with pytest.raises(ModelFormatError, match=says) as caught:
        check_file(path)
    assert "broken.gguf" in str(caught.value)


def test_a_minimal_file_of_full_length_is_accepted(tmp_path: Path) -> None:
    parts = header(1, 1) + ARCH + tensor("t", [32, 4], 0, 0)
    padded = parts + bytes(-len(parts) % 32)
    found = check_file(write(tmp_path / "m.gguf", padded, bytes(512)))
    assert (found.data_offset, found.size_bytes, found.name) == (len(padded), len(padded) + 512, "m")
    with pytest.raises(ModelFormatError, match=f"need {len(padded) + 512} bytes, but the file has {len(padded) + 511}"):
        check_file(write(tmp_path / "m.gguf", padded, bytes(511)))


def test_tensors_of_unknown_type_are_left_to_the_library(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", header(1, 1), ARCH, tensor("t", [7], 200, 0), bytes(31))
    assert check_file(path).num_tensors == 1


@pytest.mark.parametrize("fraction", [0.0001, 0.01, 0.5, 0.999999])
def test_a_truncated_download_is_refused_with_both_sizes(smollm2_path: Path, tmp_path: Path, fraction: float) -> None:
    path = truncated_copy(smollm2_path, tmp_path / "part.gguf", fraction=fraction)
    with pytest.raises(ModelFormatError, match=f"the file has {path.stat().st_size} bytes"):
        check_file(path)


@pytest.mark.parametrize("damage", ["magic", "metadata"])
def test_a_corrupt_copy_is_refused(smollm2_path: Path, tmp_path: Path, damage: str) -> None:
    with pytest.raises(ModelFormatError):
        check_file(corrupt_copy(smollm2_path, tmp_path / "bad.gguf", damage=damage))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400), st.integers(0, 3), st.integers(0, 6))
def test_no_bytes_raise_anything_but_our_errors(
    tmp_path_factory: pytest.TempPathFactory, tail: bytes, tensors: int, entries: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.gguf"
    write(path, header(tensors, entries + 1), ARCH, tail)
    with contextlib.suppress(ModelFormatError):
        assert check_file(path).architecture == "llama"


def test_the_files_of_a_split_model(tmp_path: Path) -> None:
    count = entry("split.count", 2, struct.pack("<H", 3))
    first = write(tmp_path / "m-00001-of-00003.gguf", header(0, 2), ARCH, count)
    assert [path.name for path in split_paths(check_file(first))] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for name in ("m-00002-of-00003.gguf", "m-00001-of-00002.gguf", "renamed.gguf"):
        with pytest.raises(ModelFormatError, match="open the first one"):
            split_paths(check_file(write(tmp_path / name, header(0, 2), ARCH, count)))
