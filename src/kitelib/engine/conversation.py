"""`Conversation`: a chat that only ever appends tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from kitelib.abc import Message
from kitelib.engine.results import Chunk, Generation
from kitelib.errors import InvalidRequestError, UnsupportedOptionError

if TYPE_CHECKING:
    from kitelib.engine.engine import KiteEngine

__all__ = ["Conversation"]

# Stands for an earlier answer when a template is rendered; long and odd enough not to occur in one by chance.
_MARK = "\u2063KITE-ANSWER-7f3a91\u2063"


class Conversation:
    """Turns of one chat, as token ids.

    Many chat templates render earlier turns anew each time and change them (they drop a reasoning part, add a
    space), and text that is tokenized again may split differently than the model wrote it. Either way the prompt
    leaves the cached run in the middle of the history. Here the history is what the model has seen and written,
    token by token, and a turn only appends: the end of the last answer, the new message, the start of the answer.

    Not for concurrent turns. A turn that fails or is cancelled leaves the conversation as it was.

    Attributes:
        messages: the chat so far.
        token_ids: the history as the model saw it, last answer included.
    """

    def __init__(
        self,
        engine: KiteEngine,
        system: str | None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        """Use `KiteEngine.conversation`."""
        self._engine = engine
        self._tools = tools
        self._options = options
        self.messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.token_ids: list[int] = []
        self._answered = False

    async def send(self, content: str | Message, **options: Any) -> Generation:
        """One turn: the user's text (or a whole message, such as a tool's result) and the model's answer."""
        message, prompt = await self._turn(content)
        gen = await self._engine.generate(prompt, **{**self._options, **options})
        self._append(message, gen)
        return gen

    async def stream(self, content: str | Message, **options: Any) -> AsyncGenerator[Chunk, None]:
        """Like `send`, in chunks; the last one carries the `generation`."""
        message, prompt = await self._turn(content)
        async with aclosing(self._engine.stream(prompt, **{**self._options, **options})) as chunks:
            async for chunk in chunks:
                if chunk.generation is not None:
                    self._append(message, chunk.generation)
                yield chunk

    def _append(self, message: Message, gen: Generation) -> None:
        self.messages += [message, {"role": "assistant", "content": gen.text}]
        self.token_ids = [*gen.prompt_token_ids, *gen.token_ids]
        self._answered = True

    async def _turn(self, content: str | Message) -> tuple[Message, list[int]]:
        message: Message = {"role": "user", "content": content} if isinstance(content, str) else dict(content)
        if not message.get("content"):
            raise InvalidRequestError("a turn's message is empty; give some text")
        if not self._answered:
            return message, await self._engine.tokenize_chat([*self.messages, message], self._tools)
        return message, [*self.token_ids, *await self._continuation(message)]

    async def _continuation(self, message: Message) -> list[int]:
        """Tokens between the end of the last answer and the start of the next."""
        before = [*self.messages[:-1], {"role": "assistant", "content": _MARK}]
        text = await self._engine.render_chat([*before, message], self._tools)
        head, mark, tail = text.rpartition(_MARK)
        if not mark or not head:
            raise UnsupportedOptionError(
                "the model's chat template does not show earlier answers as they are, so a conversation can't be "
                "continued token by token; use chat() with all messages"
            )
        return await self._engine.tokenize(tail, add_special=False)
