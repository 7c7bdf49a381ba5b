"""Tokenizers and chat templates of Hugging Face folders and GGUF files."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kitelib.backends.chat_template import ChatTemplate
from kitelib.backends.torch_engine.quiet import quiet_transformers
from kitelib.errors import InvalidRequestError, ModelFormatError, UnsupportedOptionError

if TYPE_CHECKING:
    import tokenizers

__all__ = ["FolderTokenizer"]

# What models that were trained for chats write at the end of a turn, whether or not their files say so.
_END_TEXTS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<end_of_turn>",
    "<|end▁of▁sentence|>",
)


class FolderTokenizer:
    """The tokenizer of a model folder or GGUF file. Thread-safe.

    Args:
        path: a folder with tokenizer files, or a GGUF file.
        vocab_size: number of token ids of the model; None means as many as the tokenizer knows.
        end_token_ids: what the model's configuration names as end tokens.

    Attributes:
        vocab_size: ids 0 to this, exclusive, exist; those without a token give no bytes.
        end_token_ids: all token ids that end a text.
        bos_id: token id that begins a text; None if there is none.
        add_bos: whether the model wants `bos_id` before a text.

    Raises:
        ModelFormatError: no tokenizer files, or damaged ones.
        UnsupportedOptionError: a tokenizer of a kind whose tokens have no bytes of their own, or one that needs code
            from the folder.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        vocab_size: int | None = None,
        end_token_ids: Iterable[int] = (),
    ) -> None:
        loaded = _load(pathlib.Path(path))
        self._tokenizer: tokenizers.Tokenizer = loaded.backend_tokenizer
        # Files may ask for cut or padded texts, which is for training.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, entry in added.items() if entry.special)
        self._verbatim: dict[int, bytes] = {
            token: entry.content.encode() for token, entry in added.items() if not entry.special
        }
        self._bytes_of = _bytes_function(self._tokenizer.decoder, path)
        self.vocab_size = vocab_size or self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._pieces: list[bytes | None] = [None] * self.vocab_size
        self.bos_id: int | None = loaded.bos_token_id
        self.add_bos = self.bos_id is not None and self._tokenizer.encode("").ids[:1] == [self.bos_id]
        self.end_token_ids = frozenset(end_token_ids) | self._known_ends(loaded.eos_token_id)
        self._template = _chat_template(loaded, self.add_bos)

    def tokenize(self, text: str, *, add_special: bool) -> list[int]:
        """Token ids of `text`; the text of a special token, such as ``<|im_start|>``, becomes that token.

        Args:
            text: any text.
            add_special: add BOS, EOS and the like where the model asks for them.

        Raises:
            InvalidRequestError: the text holds lone surrogates.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the text holds {text[error.start]!r} at index {error.start}, half of a surrogate pair, which has no UTF-8 "
                "form; decode the text with errors='replace'"
            ) from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special).ids
        return ids

    def token_bytes(self, token: int) -> bytes:
        """Bytes that a token adds to a text, maybe part of a character; b"" for special tokens.

        Raises:
            InvalidRequestError: no such token.
        """
        if not 0 <= token < self.vocab_size:
            raise InvalidRequestError(
                f"token id {token} does not exist; the vocabulary has ids 0 to {self.vocab_size - 1}"
            )
        piece = self._pieces[token]
        if piece is None:
            self._pieces[token] = piece = self._piece(token)
        return piece

    def detokenize(self, ids: Iterable[int]) -> bytes:
        """The concatenated `token_bytes`, so that a text is the same streamed or whole."""
        return b"".join(map(self.token_bytes, ids))

    def vocab_bytes(self) -> list[bytes]:
        """`token_bytes` of every token, in order of ids; the first call takes about 2 us per token."""
        return [self.token_bytes(token) for token in range(self.vocab_size)]

    def token_text(self, token: int) -> str:
        """The token for people: special tokens by name, parts of characters as U+FFFD."""
        piece = self.token_bytes(token)
        if token in self._special:
            return self._tokenizer.id_to_token(token) or ""
        return piece.decode("utf-8", "replace")

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """The chat as one prompt text, ending where the assistant's answer starts. As `ChatTemplate.render`."""
        return self._template.render(messages, tools)

    def _piece(self, token: int) -> bytes:
        if token in self._special:
            return b""
        if token in self._verbatim:
            return self._verbatim[token]
        text: str | None = self._tokenizer.id_to_token(token)
        return b"" if text is None else self._bytes_of(text)

    def _known_ends(self, eos_id: int | None) -> set[int]:
        found = [eos_id, *map(self._tokenizer.token_to_id, _END_TEXTS)]
        return {token for token in found if token is not None and (token == eos_id or token in self._special)}


def _load(path: pathlib.Path) -> Any:
    """A transformers tokenizer that has a `tokenizers.Tokenizer` inside."""
    from transformers import AutoTokenizer

    single = {"gguf_file": path.name} if path.is_file() else {}
    folder = path.parent if path.is_file() else path
    try:
        with quiet_transformers():
            loaded = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False, use_fast=True, **single
            )
    except Exception as error:  # foreign files: anything may come out of reading them
        if "trust_remote_code" in str(error):
            raise UnsupportedOptionError(
                f"the tokenizer in {str(path)!r} needs code from the folder, which is never run; use a model whose tokenizer "
                "is a tokenizer.json"
            ) from error
        raise ModelFormatError(f"{str(path)!r} has no usable tokenizer: {error}") from error
    if getattr(loaded, "backend_tokenizer", None) is None:
        raise UnsupportedOptionError(
            f"the tokenizer in {str(path)!r} is a {type(loaded).__name__}, which can't be read as a tokenizer.json; convert "
            "it to one"
        )
    return loaded


def _chat_template(loaded: Any, add_bos: bool) -> ChatTemplate:
    source: Any = loaded.chat_template
    named = source if isinstance(source, Mapping) else {"default": source}
    return ChatTemplate(
        named.get("default") or None,
        loaded.bos_token or "",
        loaded.eos_token or "",
        add_bos=add_bos,
        tool_source=named.get("tool_use"),
        extra="torch",
    )


def _bytes_function(decoder: Any, path: str | os.PathLike[str]) -> Callable[[str], bytes]:
    """What turns the text of a vocabulary entry into the bytes it stands for.

    A decoder's own `decode` loses a leading space and makes half characters U+FFFD, so its steps are done here.
    """
    steps = [] if decoder is None else _steps(json.loads(decoder.__getstate__()))
    kinds = {step["type"] for step in steps}
    unknown = kinds - {"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    if unknown or any(step["type"] == "Replace" and "String" not in step["pattern"] for step in steps):
        raise UnsupportedOptionError(
            f"the tokenizer in {os.fspath(path)!r} joins tokens by {', '.join(sorted(unknown or kinds))}, so a token has no "
            "bytes of its own; use a model with a byte-level or SentencePiece vocabulary"
        )
    if "ByteLevel" in kinds:
        table = _byte_level_table()

        def byte_level(text: str) -> bytes:
            return b"".join(table.get(character) or character.encode() for character in text)

        return byte_level
    replaced = [(step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"]
    replaced += [(step["replacement"], " ") for step in steps if step["type"] == "Metaspace"]
    fallback = {f"<0x{value:02X}>": bytes([value]) for value in range(256)} if "ByteFallback" in kinds else {}

    def sentence_piece(text: str) -> bytes:
        if text in fallback:
            return fallback[text]
        for old, new in replaced:
            text = text.replace(old, new)
        return text.encode()

    return sentence_piece


def _steps(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if decoder["type"] == "Sequence":
        return [step for each in decoder["decoders"] for step in _steps(each)]
    return [decoder]


def _byte_level_table() -> dict[str, bytes]:
    """Byte-level vocabularies write bytes that are no visible Latin-1 character as the code points from 256 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [value for value in range(256) if value not in set(visible)]
    table = {chr(value): bytes([value]) for value in visible}
    return table | {chr(256 + index): bytes([value]) for index, value in enumerate(hidden)}
