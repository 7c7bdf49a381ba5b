"""Weight files of a folder: which they are, their digest, reading ahead."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kitelib.backends.torch_engine import weights
from kitelib.backends.torch_engine.weights import files_digest, read_ahead, stored_dtype, weight_files, weights_digest
from kitelib.errors import ModelFormatError, ModelNotFoundError, UnsupportedOptionError


def sharded(folder: Path, contents: dict[str, bytes], listed: list[str] | None = None) -> Path:
    """A folder of shards whose index names `listed`, or all of them."""
    folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    names = list(contents) if listed is None else listed
    index = {"weight_map": {f"tensor.{number}": name for number, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_one_file_is_digested_as_it_is(tmp_path: Path) -> None:
    """The digest of a single file is its SHA-256."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert weights_digest(tmp_path, tmp_path / "cache") == hashlib.sha256(b"weights").digest()


def test_shards_count_in_name_order(tmp_path: Path) -> None:
    """The digest of shards is over their digests in name order, whatever order the index lists them in."""
    folder = sharded(tmp_path, {"b.safetensors": b"two", "a.safetensors": b"one"})
    wanted = hashlib.sha256(hashlib.sha256(b"one").digest() + hashlib.sha256(b"two").digest()).digest()
    assert [file.name for file in weight_files(folder)] == ["a.safetensors", "b.safetensors"]
    assert weights_digest(folder, tmp_path / "cache") == wanted


def test_one_changed_byte_of_one_shard_changes_the_digest(tmp_path: Path) -> None:
    """Every shard's content counts."""
    folder = sharded(tmp_path, {"a.safetensors": b"one", "b.safetensors": b"two"})
    before = weights_digest(folder, tmp_path / "cache")
    (folder / "b.safetensors").write_bytes(b"twp")
    assert weights_digest(folder, tmp_path / "cache") != before


def test_digests_are_remembered_per_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unchanged shard is not read again."""
    monkeypatch.setattr("kitelib.backends.digest._SETTLED_NS", 0)
    folder = sharded(tmp_path, {"a.safetensors": b"one", "b.safetensors": b"two"})
    before = weights_digest(folder, tmp_path / "cache")
    monkeypatch.setattr("kitelib.backends.digest._hash", lambda *_: pytest.fail("read again"))
    assert weights_digest(folder, tmp_path / "cache") == before


def test_progress_grows_to_one(tmp_path: Path) -> None:
    """Progress is told on the calling thread and never goes back."""
    folder = sharded(tmp_path, {"a.safetensors": bytes(3 << 20), "b.safetensors": bytes(1 << 20)})
    seen: list[float] = []
    files_digest(weight_files(folder), tmp_path / "cache", seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_what_progress_raises_comes_out(tmp_path: Path) -> None:
    """A caller can stop the reading."""
    folder = sharded(tmp_path, {"a.safetensors": bytes(8 << 20), "b.safetensors": b""})

    def stop(_: float) -> None:
        raise InterruptedError("enough")

    with pytest.raises(InterruptedError, match="enough"):
        files_digest(weight_files(folder), tmp_path / "cache", stop)


def test_read_ahead_reads_only_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks in the page cache are left alone, others are read in full."""
    file = tmp_path / "a.safetensors"
    file.write_bytes(bytes(3000))
    monkeypatch.setattr(weights, "_CHUNK_BYTES", 1000)
    read: list[int] = []
    preadv = weights.os.preadv
    monkeypatch.setattr(weights, "_resident", lambda handle, start, size: start == 1000)
    monkeypatch.setattr(weights.os, "preadv", lambda handle, to, at: (read.append(at), preadv(handle, to, at))[1])
    seen: list[float] = []
    read_ahead([file], seen.append)
    assert read == [0, 2000]
    assert seen[-1] == 1.0


def test_what_was_just_written_is_in_the_page_cache(tmp_path: Path) -> None:
    """The test for the page cache finds a fresh file, where the file system can tell."""
    file = tmp_path / "a.safetensors"
    file.write_bytes(bytes(10_000))
    with file.open("rb") as stream:
        try:
            weights.os.preadv(stream.fileno(), [bytearray(1)], 0, weights.os.RWF_NOWAIT)
        except OSError:
            pytest.skip("this file system can't tell what is in the page cache")
        assert weights._resident(stream.fileno(), 0, 10_000)


def test_type_of_the_stored_weights(hf_model: Callable[..., Path]) -> None:
    """It is read from the header alone."""
    assert stored_dtype(hf_model("llama") / "model.safetensors") == "float32"
    assert stored_dtype(hf_model("llama", dtype="bfloat16") / "model.safetensors") == "bfloat16"


@pytest.mark.parametrize("content", [b"", b"\x05\0\0\0\0\0\0\0oops!", b"\xff" * 20, b"\x02\0\0\0\0\0\0\0[]"])
def test_damaged_headers_are_refused(tmp_path: Path, content: bytes) -> None:
    """A header that makes no sense names the file."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ModelFormatError, match="model.safetensors"):
        stored_dtype(file)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    """An incomplete download says which files are missing."""
    folder = sharded(tmp_path, {"a.safetensors": b"one"}, ["a.safetensors", "b.safetensors"])
    with pytest.raises(ModelFormatError, match=r"lacks 1 of its 2 weight files: b\.safetensors"):
        weight_files(folder)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "deep/a.safetensors", "weights.bin"])
def test_an_index_may_only_name_files_of_its_folder(tmp_path: Path, name: str) -> None:
    """A folder from anywhere can't point elsewhere."""
    with pytest.raises(ModelFormatError, match="only safetensors files of the same folder"):
        weight_files(sharded(tmp_path, {}, [name]))


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}', '{"weight_map": {}}'])
def test_a_damaged_index_is_refused(tmp_path: Path, text: str) -> None:
    """An index that names nothing is no index."""
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelFormatError, match="index.json"):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("pytorch_model.bin", "pickles"),
        ("model.gguf", "GGUF"),
        ("adapter_config.json", "LoRA adapter"),
    ],
)
def test_other_folders_say_what_they_are(tmp_path: Path, file: str, reason: str) -> None:
    """Weights of another kind are refused with a remedy."""
    (tmp_path / file).write_bytes(b"{}")
    with pytest.raises(UnsupportedOptionError, match=reason):
        weight_files(tmp_path)


def test_no_folder_and_no_weights(tmp_path: Path) -> None:
    """A wrong path and an empty folder are told apart."""
    with pytest.raises(ModelNotFoundError, match="check the path"):
        weight_files(tmp_path / "none")
    with pytest.raises(ModelFormatError, match="neither"):
        weight_files(tmp_path)
