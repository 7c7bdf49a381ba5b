"""What of a template is kept: tokens that are there whatever stands in its marked parts."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kitelib.engine.bundle_building import _token_ids
from kitelib.engine.bundle_prompts import BundlePrompt
from kitelib.engine.bundle_templates import FILLERS, fill, marked_parts, stable_prefix
from kitelib.errors import InvalidRequestError
from tests.support.backends import BackendKit

ENGLISH = "You are the assistant of a car. Be brief, and answer in one sentence.\n\nQuestion: {{question}}\nAnswer:"
TEXTS = {
    "words": ENGLISH,
    "no space": "You are the assistant of a car. Answer the question:{{question}}",
    "inside a word": "You are the assistant of a car. Answer un{{adjective}}ly, please.",
    "after a number": "You are the assistant. It is 20{{year}} now.",
    "after line ends": "You are the assistant of a car.\n\n{{question}}",
    "after spaces": "You are the assistant of a car.   {{question}}",
    "after punctuation": "You are the assistant (of a car)...{{question}}",
    "after an apostrophe": "You are the assistant of a car. It'{{rest}}",
    "Chinese": "你是车载助手。请用一句话回答。问题：{{问题}}",
    "Chinese in a word": "你是车载助手。请用一句话{{动词}}问题。",
    "Russian": "Ты помощник в машине. Вопрос: {{вопрос}}",
    "two parts": "You are the assistant of {{name}}, who drives a {{car}}.",
    "emoji": "You are the assistant of a car 🚗{{question}}",
}


def others(backend: Any) -> list[str]:
    """Texts that `FILLERS` has not: all of ASCII, pieces of the vocabulary, and random ones of many scripts."""
    draw = random.Random(5)
    texts = [chr(code) for code in range(9, 127)] + [f"{chr(code)}bc def" for code in range(32, 127)]
    ids = draw.sample(range(300, 1900), 150)
    texts += [bytes(backend.detokenize([token])).decode(errors="ignore") for token in ids]
    alphabet = "aZ9 \n.,'\"éßñжяعあ漢字，。？🙂\u0301\u200d\u00a0"
    texts += ["".join(draw.choices(alphabet, k=draw.randint(0, 12))) for _ in range(150)]
    return texts


def prefix_of(backend: Any, prompt: BundlePrompt) -> list[int]:
    return _token_ids(backend, prompt)


def check_prefix(backend: Any, prefix: list[int], render: Callable[[str], list[int]]) -> None:
    for text in others(backend):
        assert render(text)[: len(prefix)] == prefix, repr(text)


@pytest.fixture(scope="module")
def backend(kit: BackendKit) -> Any:
    loaded = kit.load(kit.text(), n_ctx=256)
    yield loaded
    loaded.close()


@pytest.mark.parametrize("name", TEXTS)
def test_no_token_of_the_prefix_depends_on_what_follows(backend: Any, name: str) -> None:
    template = TEXTS[name]
    prefix = prefix_of(backend, BundlePrompt(prompt=template, varying=True))
    check_prefix(backend, prefix, lambda text: list(backend.tokenize(fill(template, text), add_special=True)))
    stable = template.split("{{")[0]
    kept = bytes(backend.detokenize(prefix)).decode()
    assert stable.strip().startswith(kept.strip())
    assert len(kept) > len(stable) / 3  # not cut back to nothing


def test_chats_keep_all_up_to_the_question(backend: Any) -> None:
    messages = [
        {"role": "system", "content": "You are the assistant of a car. Be brief."},
        {"role": "user", "content": "{{question}}"},
    ]
    prefix = prefix_of(backend, BundlePrompt(messages=messages, varying=True))

    def render(text: str) -> list[int]:
        return list(backend.tokenize(backend.render_chat(fill(messages, text)), add_special=False))

    check_prefix(backend, prefix, render)
    assert "Be brief." in bytes(backend.detokenize(prefix)).decode()


def test_tokens_without_pretokenizer(gemma_path: Path) -> None:
    """SentencePiece: spaces are part of words, and there is no rule that cuts a text beforehand."""
    from kitelib.backends.llama_cpp.backend import LlamaCppBackend, LlamaCppOptions

    backend = LlamaCppBackend.load(gemma_path, LlamaCppOptions(threads=1, n_ctx=256))
    try:
        for template in TEXTS.values():
            prefix = prefix_of(backend, BundlePrompt(prompt=template, varying=True))
            check_prefix(
                backend, prefix, lambda text, form=template: list(backend.tokenize(fill(form, text), add_special=True))
            )
    finally:
        backend.close()


def test_what_begins_with_a_varying_part_has_no_prefix(backend: Any) -> None:
    for template in ("{{question}} Answer:", "{{a}}{{b}}", "A{{b}}"):
        assert prefix_of(backend, BundlePrompt(prompt=template, varying=True)) == []


def test_marks_and_literal_braces() -> None:
    assert marked_parts('a {{ one }} b {{two_2}} {{{{three}}}} {x} {"y": {"z": 1}}') == ["one", "two_2"]
    assert fill('a {{ one }} b {{{{three}}}} {x} {"y": {"z": 1}}', "F") == 'a F b {{three}} {x} {"y": {"z": 1}}'
    parts = [
        {"role": "user", "name": "{{not}}", "content": [{"type": "text", "text": "{{q}}"}, {"type": "image"}, "{{r}}"]}
    ]
    assert marked_parts(parts) == ["q", "r"]
    assert fill(parts, "F") == [
        {"role": "user", "name": "{{not}}", "content": [{"type": "text", "text": "F"}, {"type": "image"}, "F"]}
    ]
    assert fill([{"role": "assistant", "content": None}], "F") == [{"role": "assistant", "content": None}]
    for wrong in ("{{}}", "{{ }}", "{{now()}}", "{{#each}}", "{{1st}}"):
        with pytest.raises(InvalidRequestError, match="marks no varying part"):
            marked_parts(wrong)


def test_no_two_fillers_begin_alike() -> None:
    assert len({text[0] for text in FILLERS}) == len(FILLERS)


def test_half_characters_and_no_renderings() -> None:
    pieces = {1: b"word", 2: b" next", 3: b"\xe4\xbd", 4: b"\xa0", 5: b""}
    piece = pieces.__getitem__
    assert stable_prefix([[1, 2, 3, 4, 9], [1, 2, 3, 4, 8]], piece) == [1]
    assert stable_prefix([[1, 3, 9], [1, 3, 8]], piece) == []
    assert stable_prefix([[1, 5, 9], [1, 5, 8]], piece) == [1, 5]
    assert stable_prefix([[5, 9], [5, 8]], piece) == []
    assert stable_prefix([], piece) == []
