"""What prompts are counted in: the tokens of a model, or words where no model is named."""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from kitelib.cli.options import resolve_model
from kitelib.cli.prompts import Prompt
from kitelib.config import KiteConfig
from kitelib.errors import MissingExtraError

if TYPE_CHECKING:
    from kitelib.cli.screen import LoadProgress

__all__ = ["Tokens", "WordTokens", "open_tokens"]

_BLOCK: Final = 16
# As tokenizers cut: a word with the space before it, digits in threes, a Chinese or similar character by itself.
_CJK: Final = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORDS: Final = re.compile(rf"[{_CJK}]| ?[^\W\d_{_CJK}]{{1,16}}| ?\d{{1,3}}| ?[^\w\s]{{1,4}}|_+|\s{{1,16}}")


class Tokens(Protocol):
    """Turns prompts into what is counted and compared.

    Attributes:
        unit: "tokens" or "words".
        model: name of the model's file; None for words.
        block_tokens: how many of them the engine keeps as one block.
    """

    unit: str
    model: str | None
    block_tokens: int

    def render(self, prompt: Prompt) -> str:
        """The prompt as the text that is tokenized."""
        ...

    def encode(self, text: str, *, chat: bool) -> tuple[list[int], Callable[[int], str]]:
        """The ids of a rendered prompt, below 2**32, and what gives the text of the one at an index.

        Args:
            chat: whether a chat template wrote `text`, and with it all special tokens.
        """
        ...


class WordTokens:
    """Words, which stand for tokens where no model is named: 16 to a block, as most models have it."""

    unit = "words"
    model: str | None = None

    def __init__(self, block_tokens: int | None = None) -> None:
        self.block_tokens = block_tokens or _BLOCK

    def render(self, prompt: Prompt) -> str:
        """As `Tokens.render`."""
        return prompt.plain()

    def encode(self, text: str, *, chat: bool) -> tuple[list[int], Callable[[int], str]]:  # noqa: ARG002
        """As `Tokens.encode`; the id of a word is its checksum."""
        words = _WORDS.findall(text)
        return [zlib.crc32(word.encode("utf-8", "surrogatepass")) for word in words], words.__getitem__


class _ModelTokens:
    """The tokens of a GGUF file or a model folder, of which only the tokenizer is loaded."""

    unit = "tokens"

    def __init__(
        self,
        model: str,
        block_tokens: int,
        tokenizer: Any,
        render: Callable[[Sequence[Any], Sequence[Any] | None], str],
    ) -> None:
        self.model: str | None = model
        self.block_tokens = block_tokens
        self._tokenizer = tokenizer
        self._render = render

    def render(self, prompt: Prompt) -> str:
        return prompt.text if prompt.text is not None else self._render(prompt.messages, prompt.tools or None)

    def encode(self, text: str, *, chat: bool) -> tuple[list[int], Callable[[int], str]]:
        ids = self._tokenizer.tokenize(text, add_special=not chat)
        return ids, lambda index: str(self._tokenizer.token_text(ids[index]))


@contextlib.contextmanager
def open_tokens(model: str | None, block_tokens: int | None, progress: LoadProgress) -> Iterator[Tokens]:
    """The tokens of `model`, as a person names it; words for None.

    Args:
        block_tokens: of one block; None is what the engine uses for such a model.

    Raises:
        ModelNotFoundError, ModelFormatError, MissingExtraError, BackendError: the model can't be used.
    """
    if model is None:
        yield WordTokens(block_tokens)
        return
    path = resolve_model(model)
    progress(f"Loading the tokenizer of {Path(path).name}")
    if os.path.isdir(path):
        yield _folder_tokens(path, block_tokens)
        return
    from kitelib.backends.llama_cpp.model import GGUFModel

    gguf = GGUFModel.load(path, vocab_only=True, identify=False)
    try:
        size = block_tokens or _block_tokens_of(gguf.architecture)
        yield _ModelTokens(Path(path).name, size, gguf, gguf.template().render)
    finally:
        gguf.close()


def _folder_tokens(path: str, block_tokens: int | None) -> Tokens:
    try:
        from kitelib.backends.torch_engine.tokenizer import FolderTokenizer

        tokenizer = FolderTokenizer(path)
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or "transformers", "torch", "the tokenizer of a model folder") from error
    size = block_tokens or _block_tokens_of(_folder_architecture(path))
    return _ModelTokens(Path(path).name, size, tokenizer, tokenizer.render_chat)


def _folder_architecture(path: str) -> str:
    """The architecture that a folder's configuration names; "" where it has none, as a tokenizer alone."""
    try:
        settings = json.loads(Path(path, "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(settings.get("model_type", "")) if isinstance(settings, dict) else ""


def _block_tokens_of(architecture: str) -> int:
    return KiteConfig().block_tokens_for(architecture) or _BLOCK
