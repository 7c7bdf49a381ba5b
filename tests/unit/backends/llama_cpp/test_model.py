"""Loading, refusing, tokenizing: with real vocabularies, real weights and damaged copies of them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitelib.backends.digest import content_digest
from kitelib.backends.llama_cpp.model import GGUFModel
from kitelib.backends.llama_cpp.runs import MAX_RUN_CHARS, cut_long_runs
from kitelib.config import AdapterConfig
from kitelib.errors import (
    BackendError,
    ConfigError,
    EngineClosedError,
    InvalidRequestError,
    ModelFormatError,
    ModelNotFoundError,
)
from tests.support.gguf_files import corrupt_copy, modified_copy, truncated_copy

TEXTS = [
    "Hello, world!",
    "  two spaces\n\n\ttab  ",
    "你好，世界。今天天气怎么样？",
    "emoji 😀👩‍👩‍👧‍👦🎉 and accents é ü ñ, 한국어, العربية",
    "with\0NUL\0characters",
    "<not|special>",
]


@pytest.fixture(scope="module")
def smollm2_vocab(smollm2_path: Path) -> Iterator[GGUFModel]:
    model = GGUFModel.load(smollm2_path, vocab_only=True)
    yield model
    model.close()


@pytest.fixture(scope="module")
def gemma_vocab(gemma_path: Path) -> Iterator[GGUFModel]:
    model = GGUFModel.load(gemma_path, vocab_only=True)
    yield model
    model.close()


@pytest.fixture(params=["smollm2_vocab", "gemma_vocab"])
def vocab(request: pytest.FixtureRequest) -> GGUFModel:
    model: GGUFModel = request.getfixturevalue(request.param)
    return model


def test_a_loaded_model_describes_itself(smollm2_path: Path, tmp_path: Path) -> None:
    seen: list[float] = []
    model = GGUFModel.load(smollm2_path, progress=seen.append)
    try:
        assert (model.architecture, model.n_vocab, model.n_ctx_train) == ("llama", 49152, 8192)
        assert (model.n_layer, model.n_head, model.n_params) == (30, 9, 134_515_008)
        assert (model.n_swa, model.is_recurrent, model.is_hybrid) == (0, False, False)
        assert (model.bos_id, model.add_bos) == (1, False)
        assert model.end_token_ids >= {0, 2}  # <|endoftext|>, <|im_end|>
        assert model.chat_template is not None
        assert model.weights_digest == content_digest(smollm2_path, tmp_path)
        assert seen == sorted(seen)
        assert (seen[0] >= 0, seen[-1]) == (True, 1.0)
    finally:
        model.close()


def test_gemma_has_a_window_and_wants_bos(gemma_path: Path) -> None:
    model = GGUFModel.load(gemma_path)
    assert (model.architecture, model.n_swa, model.add_bos, model.bos_id) == ("gemma3", 512, True, 2)
    assert (model.chat_template, model.end_token_ids >= {1, 106}) == (None, True)
    model.close()


@pytest.mark.parametrize(("architecture", "flags"), [("mamba", (True, False)), ("lfm2", (False, True))])
def test_recurrent_and_hybrid_models_are_told_apart(
    tiny_model: Callable[..., Path], architecture: str, flags: tuple[bool, bool]
) -> None:
    model = GGUFModel.load(tiny_model(architecture), use_mmap=False)
    assert (model.is_recurrent, model.is_hybrid) == flags
    model.close()


def test_one_changed_byte_changes_the_digest(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny_model("llama")
    models = [GGUFModel.load(p) for p in (path, modified_copy(path, tmp_path / "changed.gguf"))]
    assert models[0].weights_digest != models[1].weights_digest
    for model in models:
        model.close()


def test_closing_twice_is_fine_and_using_it_afterwards_is_not(tiny_model: Callable[..., Path]) -> None:
    model = GGUFModel.load(tiny_model("llama"))
    model.close()
    model.close()
    for call in (lambda: model.tokenize("a", add_special=True), lambda: model.token_text(5), model.vocab_bytes):
        with pytest.raises(EngineClosedError):
            call()


# -- refusals -------------------------------------------------------------------------------------------------------


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="none.gguf"):
        GGUFModel.load(tmp_path / "none.gguf")


def test_a_truncated_file(smollm2_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="truncated"):
        GGUFModel.load(truncated_copy(smollm2_path, tmp_path / "part.gguf"))


@pytest.mark.parametrize("damage", ["magic", "metadata", "tensor_type"])
def test_a_corrupt_file(tiny_model: Callable[..., Path], tmp_path: Path, damage: str) -> None:
    with pytest.raises(ModelFormatError, match="bad.gguf"):
        GGUFModel.load(corrupt_copy(tiny_model("llama"), tmp_path / "bad.gguf", damage=damage))


def write_gguf(path: Path, architecture: str, *, tensors: int = 1, **strings: str) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in strings.items():
        writer.add_string(key.replace("__", "."), value)
    writer.add_uint32(f"{architecture}.block_count", 1)
    import numpy as np

    for index in range(tensors):
        writer.add_tensor(f"t{index}", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_reason_of_the_library_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="unknown model architecture: 'nonesuch'"):
        GGUFModel.load(write_gguf(tmp_path / "m.gguf", "nonesuch"))


@pytest.mark.parametrize(
    ("architecture", "strings", "says"),
    [
        ("llama", {"general__type": "adapter", "adapter__type": "lora"}, "LoRA adapter; open its base model"),
        ("clip", {"general__type": "mmproj"}, "'mmproj', not a language model"),
        ("clip", {}, "'clip', not a language model"),
    ],
)
def test_other_kinds_of_files(tmp_path: Path, architecture: str, strings: dict[str, str], says: str) -> None:
    with pytest.raises(ModelFormatError, match=says):
        GGUFModel.load(write_gguf(tmp_path / "m.gguf", architecture, **strings))


def test_a_vocabulary_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match="no weights"):
        GGUFModel.load(write_gguf(tmp_path / "m.gguf", "llama", tensors=0))


def altered(path: Path, out: Path, add: Callable[[gguf.GGUFWriter], None]) -> Path:
    """A copy of a small model with more metadata; only its vocabulary is kept."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, str(reader.fields["general.architecture"].contents()))
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            element = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], element)
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


@pytest.mark.parametrize(
    "add",
    [
        lambda writer: writer.add_bool("llama.attention.causal", False),
        lambda writer: writer.add_uint32("llama.pooling_type", 1),
    ],
)
def test_embedding_models(
    tiny_model: Callable[..., Path], tmp_path: Path, add: Callable[[gguf.GGUFWriter], None]
) -> None:
    with pytest.raises(ModelFormatError, match="computes embeddings; only decoder-only"):
        GGUFModel.load(altered(tiny_model("llama"), tmp_path / "m.gguf", add), vocab_only=True)


def test_what_the_progress_callback_raises_stops_the_load(tiny_model: Callable[..., Path]) -> None:
    def stop(fraction: float) -> None:
        if fraction > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        GGUFModel.load(tiny_model("llama"), progress=stop)


def test_a_file_that_changes_while_it_is_loaded(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    path = modified_copy(tiny_model("llama"), tmp_path / "m.gguf")

    def touch(fraction: float) -> None:
        if fraction > 0.5:
            path.touch()

    with pytest.raises(ModelFormatError, match="changed while it was loaded"):
        GGUFModel.load(path, progress=touch)


# -- adapters -------------------------------------------------------------------------------------------------------


def test_adapters_are_known_by_content(smollm2_path: Path, smollm2_lora: Path, tmp_path: Path) -> None:
    model = GGUFModel.load(smollm2_path, adapters={"legal": AdapterConfig(str(smollm2_lora), scale=0.5)})
    adapter = model.adapters["legal"]
    assert adapter.handle
    assert (adapter.scale, adapter.digest) == (0.5, content_digest(smollm2_lora, tmp_path))
    model.close()
    assert model.adapters == {}


def test_unfit_adapters_are_refused(tiny_model: Callable[..., Path], smollm2_lora: Path, tmp_path: Path) -> None:
    llama, qwen2 = tiny_model("llama"), tiny_model("qwen2")

    def load(base: Path, path: Path, scale: float = 1.0) -> None:
        GGUFModel.load(base, adapters={"mine": AdapterConfig(str(path), scale)})

    with pytest.raises(ModelNotFoundError, match="none.gguf"):
        load(llama, tmp_path / "none.gguf")
    with pytest.raises(ModelFormatError, match="adapter 'mine'.*kind 'model'.*not a LoRA adapter"):
        load(llama, llama)
    with pytest.raises(ModelFormatError, match="architecture 'llama', the model has 'qwen2'"):
        load(qwen2, smollm2_lora)
    with pytest.raises(ModelFormatError, match="llama.cpp refuses the adapter 'mine'"):
        load(llama, smollm2_lora)  # shapes of another llama
    with pytest.raises(ConfigError, match="scale nan"):
        load(llama, smollm2_lora, float("nan"))


# -- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_as_it_was(vocab: GGUFModel, text: str) -> None:
    tokens = vocab.tokenize(text, add_special=True)
    pieces = [vocab.token_bytes(token) for token in tokens]
    assert b"".join(pieces) == text.encode() == vocab.detokenize(tokens)


@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(exclude_categories=["C"], max_codepoint=0x1FFFF), max_size=60))
def test_any_text_comes_back_as_it_was(smollm2_vocab: GGUFModel, text: str) -> None:
    tokens = smollm2_vocab.tokenize(text, add_special=True, parse_special=False)
    assert smollm2_vocab.detokenize(tokens) == text.encode()


def test_bos_is_added_where_the_model_wants_it(smollm2_vocab: GGUFModel, gemma_vocab: GGUFModel) -> None:
    assert gemma_vocab.tokenize("Hi", add_special=True)[0] == gemma_vocab.bos_id
    assert gemma_vocab.tokenize("Hi", add_special=False)[0] != gemma_vocab.bos_id
    assert smollm2_vocab.tokenize("Hi", add_special=True) == smollm2_vocab.tokenize("Hi", add_special=False)
    assert gemma_vocab.tokenize("", add_special=True) == [gemma_vocab.bos_id]
    assert smollm2_vocab.tokenize("", add_special=True) == []


def test_special_text_is_parsed_unless_forbidden(smollm2_vocab: GGUFModel) -> None:
    text = "<|im_start|>user"
    tokens = smollm2_vocab.tokenize(text, add_special=False)
    assert tokens[0] == 1
    assert smollm2_vocab.token_text(1) == "<|im_start|>"
    assert smollm2_vocab.token_bytes(1) == b""
    assert smollm2_vocab.detokenize(tokens) == b"user"
    plain = smollm2_vocab.tokenize(text, add_special=False, parse_special=False)
    assert 1 not in plain
    assert smollm2_vocab.detokenize(plain) == text.encode()


def test_the_bytes_of_the_whole_vocabulary(smollm2_vocab: GGUFModel) -> None:
    table = smollm2_vocab.vocab_bytes()
    assert len(table) == smollm2_vocab.n_vocab
    assert table[19556] == b"Hello"
    assert {bytes([byte]) for byte in range(0x20, 0x7F)} <= set(table)
    assert [table[token] for token in smollm2_vocab.end_token_ids] == [b""] * len(smollm2_vocab.end_token_ids)


@pytest.mark.parametrize("token", [-1, 49152, 2**40])
def test_ids_out_of_range_are_refused(smollm2_vocab: GGUFModel, token: int) -> None:
    for call in (smollm2_vocab.token_bytes, smollm2_vocab.token_text, lambda t: smollm2_vocab.detokenize([1, t])):
        with pytest.raises(InvalidRequestError, match="ids 0 to 49151"):
            call(token)


def test_half_a_surrogate_pair_is_refused(smollm2_vocab: GGUFModel) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        smollm2_vocab.tokenize("a\ud800b", add_special=True)


def test_threads_tokenize_at_the_same_time_and_close_waits(tiny_model: Callable[..., Path]) -> None:
    model = GGUFModel.load(tiny_model("llama"), vocab_only=True)
    text = "The quick brown fox. " * 2000
    expected = model.tokenize(text, add_special=True)
    results: list[object] = []
    started = threading.Barrier(5)

    def work() -> None:
        started.wait()
        try:
            for _ in range(20):
                tokens = model.tokenize(text, add_special=True)
                results.append(tokens == expected)
        except EngineClosedError:
            results.append("closed")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    started.wait()
    while len(results) < 8:
        time.sleep(0.001)
    model.close()
    for thread in threads:
        thread.join()
    assert set(results) <= {True, "closed"}


# -- long runs ------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["a", "你", " ", "\n", ".", "，", "!", "ab/+=", "<|im_end|>"]), max_size=40), st.data())
def test_cut_pieces_are_the_text_and_short_enough(parts: list[str], data: st.DataObject) -> None:
    text = "".join(part * data.draw(st.sampled_from([1, 3, 700, 3000])) for part in parts)
    pieces = cut_long_runs(text)
    assert "".join(pieces) == text
    assert all(len(run) <= MAX_RUN_CHARS for piece in pieces for run in piece.split())
    assert all(len(run) <= MAX_RUN_CHARS for piece in pieces for run in "".join(map(str, _spaces(piece))).split("x"))


def _spaces(piece: str) -> Iterator[str]:
    return (char if char.isspace() else "x" for char in piece)


def test_unspaced_text_is_cut_without_changing_its_tokens(vocab: GGUFModel) -> None:
    text = "今天天气很好，我们去公园散步。明天会下雨吗？" * 400
    whole = vocab._tokenize(text.encode(), True, True)
    assert len(cut_long_runs(text)) > 5
    assert vocab.tokenize(text, add_special=True) == whole


def test_special_tokens_survive_the_cuts(smollm2_vocab: GGUFModel) -> None:
    text = "你好<|im_end|>" * 1000
    assert smollm2_vocab.tokenize(text, add_special=True).count(2) == 1000


@pytest.mark.parametrize("run", ["a", "你", "!", " ", "aGVsbG8gd29ybGQ"])
def test_a_run_without_end_does_not_end_the_process(tmp_path: Path, smollm2_path: Path, run: str) -> None:
    # The same vocabulary with a pre-tokenizer that runs on std::regex; without cuts this is a segmentation fault.
    field = gguf.GGUFReader(smollm2_path).fields["tokenizer.ggml.pre"]
    image = bytearray(smollm2_path.read_bytes())
    at = field.offset + sum(int(part.nbytes) for part in field.parts[:-1])
    assert image[at : at + 6] == b"smollm"
    image[at : at + 6] = b"falcon"
    path = tmp_path / "falcon.gguf"
    path.write_bytes(image)
    code = f"""
import sys
from kitelib.backends.llama_cpp.model import GGUFModel
model = GGUFModel.load({str(path)!r}, vocab_only=True)
text = {run!r} * 50_000
assert model.detokenize(model.tokenize(text, add_special=True)) == text.encode()
"""
    env = {"PYTHONPATH": ":".join(sys.path), "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_memory_trouble_is_not_blamed_on_the_file() -> None:
    from kitelib.backends.llama_cpp.model import _load_error

    error = _load_error("the model 'm'", ["load: error loading model: unable to allocate CPU buffer"])
    assert type(error) is BackendError
    assert "free some memory" in str(error)


def test_an_unidentified_vocabulary_is_read_without_the_weights(tiny_model, monkeypatch):
    def read(*arguments):
        raise AssertionError("the content was read")

    monkeypatch.setattr("kitelib.backends.llama_cpp.model.weights_digest", read)
    model = GGUFModel.load(tiny_model("llama"), vocab_only=True, identify=False)
    try:
        assert model.weights_digest == b""
        text = model.template().render([{"role": "user", "content": "Hello"}])
        assert model.detokenize(model.tokenize(text, add_special=False, parse_special=False)).decode() == text
    finally:
        model.close()
