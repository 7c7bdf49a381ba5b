"""Tokenizers of folders and GGUF files: the same tokens, bytes and chats as llama.cpp's, and no byte lost."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitelib.backends.chat_template import ChatTemplate
from kitelib.backends.llama_cpp.model import GGUFModel
from kitelib.backends.torch_engine.tokenizer import FolderTokenizer
from kitelib.errors import InvalidRequestError, ModelFormatError, UnsupportedOptionError
from tests.support.hf_folders import write_tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two spaces\n\n\ttab  ",
    "你好，世界。今天天气怎么样？",
    "emoji 😀👩‍👩‍👧‍👦🎉 and accents é ü ñ, 한국어, العربية",
    "def f(x: int) -> int:\n\treturn x ** 2  # 1234567890 3.14\r\n\r\n",
    "with\0NUL\0characters",
    "I'm sure they've said we'll",
    "a" * 300,
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "mid<|endoftext|>dle <|im_start <repo_name> <gh_stars>",
]

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi ü 😀"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": [{"type": "text", "text": "Three "}, {"type": "text", "text": "<|im_end|>"}]},
    ],
]


@pytest.fixture(scope="module")
def llama(smollm2_path: Path) -> Iterator[GGUFModel]:
    model = GGUFModel.load(smollm2_path, vocab_only=True)
    yield model
    model.close()


@pytest.fixture(scope="module")
def folder(smollm2_hf: Path) -> FolderTokenizer:
    return FolderTokenizer(smollm2_hf)


@pytest.fixture(scope="module")
def from_gguf(smollm2_path: Path) -> FolderTokenizer:
    return FolderTokenizer(smollm2_path)


@pytest.fixture(params=["folder", "from_gguf"])
def tokenizer(request: pytest.FixtureRequest) -> FolderTokenizer:
    found: FolderTokenizer = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("add_special", [False, True])
def test_tokens_are_those_of_llama_cpp(tokenizer: FolderTokenizer, llama: GGUFModel, add_special: bool) -> None:
    """The same ids for every kind of text, special tokens by their text included."""
    for text in TEXTS:
        assert tokenizer.tokenize(text, add_special=add_special) == llama.tokenize(text, add_special=add_special), text


def test_bytes_are_those_of_llama_cpp(tokenizer: FolderTokenizer, llama: GGUFModel) -> None:
    """Of every token of the vocabulary; special tokens have none."""
    assert tokenizer.vocab_bytes() == llama.vocab_bytes()
    assert tokenizer.end_token_ids <= llama.end_token_ids


def test_chats_are_those_of_llama_cpp(tokenizer: FolderTokenizer, llama: GGUFModel) -> None:
    """Rendered texts are equal, and so are refusals."""
    bos = llama.token_text(llama.bos_id or 0)
    template = ChatTemplate(llama.chat_template, bos, "<|im_end|>", add_bos=llama.add_bos)
    for chat in CHATS:
        assert tokenizer.render_chat(chat) == template.render(chat)
    with pytest.raises(UnsupportedOptionError, match="ignores them"):
        tokenizer.render_chat(CHATS[0], [{"type": "function", "function": {"name": "f"}}])
    with pytest.raises(InvalidRequestError, match="has role None"):
        tokenizer.render_chat([{"content": "?"}])


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> FolderTokenizer:
    """A vocabulary with all 256 bytes; that of SmolLM2 lacks some that no text of its training had."""
    folder = tmp_path_factory.mktemp("small")
    write_tokenizer(folder)
    return FolderTokenizer(folder)


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=60))
def test_no_byte_is_lost(small: FolderTokenizer, text: str) -> None:
    """Tokens of a plain text, joined one by one, are its UTF-8 bytes."""
    tokens = small.tokenize(text, add_special=False)
    assert b"".join(map(small.token_bytes, tokens)) == small.detokenize(tokens) == text.encode()


def test_parts_of_characters(folder: FolderTokenizer) -> None:
    """A token may be part of a character; its text is for people only."""
    tokens = folder.tokenize("🜁", add_special=False)
    assert len(tokens) > 1
    assert folder.detokenize(tokens[:1]) + folder.detokenize(tokens[1:]) == "🜁".encode()
    assert "\ufffd" in folder.token_text(tokens[0])


def test_special_tokens_have_a_text_but_no_bytes(folder: FolderTokenizer) -> None:
    """They are seen by people and never by a text."""
    (token,) = folder.tokenize("<|im_end|>", add_special=False)
    assert folder.token_text(token) == "<|im_end|>"
    assert folder.token_bytes(token) == b""
    assert token in folder.end_token_ids


def test_lone_surrogates_are_refused(folder: FolderTokenizer) -> None:
    """Half a surrogate pair has no bytes."""
    with pytest.raises(InvalidRequestError, match="index 1, half of a surrogate pair"):
        folder.tokenize("a\ud83d", add_special=False)


def test_ids_beyond_the_vocabulary(tmp_path: Path) -> None:
    """Ids that the model has and the tokenizer does not give no bytes; others don't exist."""
    write_tokenizer(tmp_path)
    tokenizer = FolderTokenizer(tmp_path, vocab_size=1000)
    assert tokenizer.token_bytes(999) == b""
    assert tokenizer.token_text(999) == ""
    assert len(tokenizer.vocab_bytes()) == 1000
    for token in (-1, 1000):
        with pytest.raises(InvalidRequestError, match=r"ids 0 to 999"):
            tokenizer.token_bytes(token)


def test_many_threads_get_the_same_tokens(folder: FolderTokenizer) -> None:
    """Tokenizing and detokenizing need no lock."""
    expected = [folder.tokenize(text, add_special=False) for text in TEXTS]
    wrong: list[str] = []

    def work() -> None:
        for _ in range(20):
            for text, tokens in zip(TEXTS, expected, strict=True):
                if folder.tokenize(text, add_special=False) != tokens:
                    wrong.append(text)
                folder.detokenize(tokens)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def sentence_piece_folder(folder: Path, *, metaspace: bool = False) -> Path:
    """A tokenizer as SentencePiece models are converted: a space is ▁, bytes without a token are <0xNN>."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{value:02X}>": 3 + value for value in range(256)}}
    for piece in ("▁", "a", "b", "▁a", "ab", "▁ab", "▁▁"):
        vocab[piece] = len(vocab)
    merges = [("▁", "a"), ("a", "b"), ("▁", "ab"), ("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    tokenizer.add_tokens([AddedToken("[mine é]", special=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return folder


def test_byte_fallback(tmp_path: Path) -> None:
    """Bytes without a token come back as bytes, and the space before the first word stays."""
    tokenizer = FolderTokenizer(sentence_piece_folder(tmp_path))
    for text in (" ab a", "ab  é😀", "[mine é] b"):
        tokens = tokenizer.tokenize(text, add_special=False)
        assert b"".join(tokenizer.token_bytes(token) for token in tokens) == text.encode()
    assert tokenizer.token_bytes(3 + 0xC3) == b"\xc3"


def test_metaspace(tmp_path: Path) -> None:
    """A decoder of the older form gives the same bytes; it has no bytes to fall back to."""
    tokenizer = FolderTokenizer(sentence_piece_folder(tmp_path, metaspace=True))
    tokens = tokenizer.tokenize(" ab a", add_special=False)
    assert b"".join(tokenizer.token_bytes(token) for token in tokens) == b" ab a"
    assert tokenizer.token_bytes(3) == b"<0x00>"


def test_bos_comes_once(tmp_path: Path) -> None:
    """A template may write it or not: a chat's text begins with exactly one, a plain text gets it when asked."""
    tokenizer = FolderTokenizer(sentence_piece_folder(tmp_path / "a"))
    assert (tokenizer.bos_id, tokenizer.add_bos) == (1, True)
    assert tokenizer.tokenize("ab", add_special=True) == [1, *tokenizer.tokenize("ab", add_special=False)]
    chat = [{"role": "user", "content": "ab"}]
    assert tokenizer.render_chat(chat) == "<s>ab"
    silent = sentence_piece_folder(tmp_path / "b")
    config = json.loads((silent / "tokenizer_config.json").read_text())
    config["chat_template"] = config["chat_template"].replace("{{ bos_token }}", "")
    (silent / "tokenizer_config.json").write_text(json.dumps(config))
    text = FolderTokenizer(silent).render_chat(chat)
    assert FolderTokenizer(silent).tokenize(text, add_special=False)[:1] == [1]


def test_a_template_of_its_own_for_tools(tmp_path: Path) -> None:
    """Folders may hold several templates by name."""
    write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = {"default": "plain", "tool_use": "{{ tools | length }} tools"}
    config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = FolderTokenizer(tmp_path)
    chat = [{"role": "user", "content": "?"}]
    assert tokenizer.render_chat(chat) == "plain"
    assert tokenizer.render_chat(chat, [{"type": "function"}]) == "1 tools"


def test_a_model_without_template_cant_chat(tmp_path: Path) -> None:
    """Plain prompts work."""
    write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = FolderTokenizer(tmp_path)
    assert tokenizer.tokenize("The customer", add_special=True)
    with pytest.raises(UnsupportedOptionError, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "?"}])


def test_files_for_training_don_t_cut_texts(tmp_path: Path) -> None:
    """Truncation and padding in a tokenizer.json are for training batches."""
    write_tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    pad = {"pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    content["padding"] = {"strategy": {"Fixed": 64}, "direction": "Right", **pad}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    text = "The customer asks about the account in the morning."
    tokenizer = FolderTokenizer(tmp_path)
    assert tokenizer.detokenize(tokenizer.tokenize(text, add_special=True)) == text.encode()


def test_end_tokens_of_configuration_and_vocabulary(tmp_path: Path) -> None:
    """The configuration's, the tokenizer's own and well-known special texts, together."""
    write_tokenizer(tmp_path)
    assert FolderTokenizer(tmp_path, end_token_ids=[17]).end_token_ids == {0, 2, 17}


def test_tokens_that_have_no_bytes_of_their_own_are_refused(tmp_path: Path) -> None:
    """WordPiece joins tokens by rules, so a token alone can't be streamed."""
    write_tokenizer(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UnsupportedOptionError, match="joins tokens by WordPiece"):
        FolderTokenizer(tmp_path)


@pytest.mark.parametrize("content", [None, "{", '{"model": {}}'])
def test_damaged_or_missing_tokenizers_are_refused(
    hf_model: Callable[..., Path], tmp_path: Path, content: str | None
) -> None:
    """The message names the folder."""
    folder = tmp_path / "model"
    shutil.copytree(hf_model("llama"), folder)
    if content is None:
        (folder / "tokenizer.json").unlink()
    else:
        (folder / "tokenizer.json").write_text(content)
    with pytest.raises((ModelFormatError, UnsupportedOptionError), match="model"):
        FolderTokenizer(folder)
