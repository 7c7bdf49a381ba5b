"""One call of `generate` or `stream`: its arguments, their checks, and the way to a `Request`."""

from __future__ import annotations

import dataclasses
import operator
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kitelib.abc import Message
from kitelib.config import ReusePolicy, SamplingParams
from kitelib.engine.passages import Parts, Passage, Splices, is_parted, prepare_splices, tokenize_parts
from kitelib.engine.recall import NOTHING_ASKED, Asking, Recall
from kitelib.engine.request import Deliver, Request
from kitelib.engine.results import Generation
from kitelib.engine.serving import Serving
from kitelib.engine.streaming import Submitted
from kitelib.engine.verifying import CHECK_OPTIONS
from kitelib.errors import (
    EmptyPromptError,
    InvalidRequestError,
    InvalidSamplingError,
    PromptTooLongError,
    UnknownAdapterError,
    UnsupportedOptionError,
)
from kitelib.fingerprint import Fingerprint
from kitelib.runtime.streams import Mailbox
from kitelib.runtime.threads import ThreadDoor
from kitelib.yoco.wordings import Question, question_of, with_question

__all__ = ["Call", "Prompt", "check_adapter", "check_policy", "sampling_params", "tokenize_chat"]

Prompt = str | Sequence[int] | Sequence[str | Passage | Sequence[int]]

_LAST = -(2**31)  # priority of what can wait for everything else
_SAMPLING_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """What the caller gave, the policy already resolved; see `KiteEngine.generate`."""

    prompt: Prompt | None
    messages: Sequence[Message] | None
    tools: Sequence[Mapping[str, Any]] | None
    params: SamplingParams
    policy: ReusePolicy
    adapter: str | None
    deadline: float | None
    priority: int
    streaming: bool = False

    def __post_init__(self) -> None:
        _check_urgency(self.deadline, self.priority)

    @classmethod
    def of(
        cls,
        prompt: Prompt | None,
        messages: Sequence[Message] | None,
        tools: Sequence[Mapping[str, Any]] | None,
        sampling: SamplingParams | None,
        options: Mapping[str, Any],
        reuse: ReusePolicy | None,
        engine_reuse: ReusePolicy,
        adapter: str | None,
        deadline: float | None,
        priority: int,
    ) -> Call:
        """The call with its sampling options put together and its policy resolved."""
        params, policy = sampling_params(sampling, options), check_policy(reuse, engine_reuse)
        return cls(prompt, messages, tools, params, policy, adapter, deadline, priority)

    async def request(
        self, serving: Serving, door: ThreadDoor, epoch: int, deliver: Deliver, created: float
    ) -> Request:
        """The request for the scheduler: checked, tokenized, fingerprinted, and looked up in the pool.

        `created` is when the call was made, on `time.monotonic`.

        Raises:
            InvalidRequestError and its subclasses.
        """
        params, policy = self.params, self.policy
        check_adapter(serving, self.adapter)
        if policy.neighbours and not serving.matcher.encodes:
            raise UnsupportedOptionError(
                "ReusePolicy.neighbours needs an encoder; open the engine with encoder='use' (extra 'semantic')"
            )
        tokens, parts = await self._tokens(serving, door)
        _check_sampling(serving, params)
        constraint = None
        if params.json_schema is not None or params.regex is not None:
            constraint = await door.run(lambda: serving.constraint(params))
        root = serving.root(policy, self.adapter)
        inner = _Inner(self, serving, door, epoch, created)
        recall = Recall(serving, door, root, policy, params, inner.ask, inner.judge, constraint)
        splices = None if parts is None else await self._splices(serving, parts, root, inner)
        if splices is not None:
            known = recall.moved(tokens, splices.chain)
        else:
            known = await recall.prompt(tokens, await self._asking(serving, door))
        return Request(
            prompt=known.prompt,
            chain=known.chain,
            params=params,
            policy=policy,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            max_new_tokens=min(params.max_tokens, serving.backend.info.context_tokens - len(known.prompt)),
            adapter=self.adapter,
            priority=self.priority,
            deadline=None if self.deadline is None else created + self.deadline,
            constraint=constraint,
            deliver=deliver,
            streaming=self.streaming,
            epoch=epoch,
            prefix=known.prefix,
            asked=known.asked,
            guess=known.guess,
            seek_guess=known.seek_guess,
            answer=known.answer,
            sampling=known.sampling,
            question=known.question,
            vector=known.vector,
            rewords=known.rewords,
            wording=known.wording,
            splices=splices,
            created=created,
        )

    async def _asking(self, serving: Serving, door: ThreadDoor) -> Asking:
        """What the chat asks, if anybody wants to know."""
        messages, tools, policy = self.messages, self.tools, self.policy
        if messages is None or policy.mode == "off" or not (policy.drafts or policy.mode == "semantic"):
            return NOTHING_ASKED

        def read() -> tuple[Question | None, bytes | None]:
            question = question_of(messages, tools)
            return question, None if question is None else question.digest("structural")

        async def render(text: str) -> list[int] | None:
            other = with_question(messages, text)
            return None if other is None else await tokenize_chat(serving, door, other, tools)

        return Asking(*await door.run(read), render)

    async def _splices(self, serving: Serving, parts: Parts, root: Fingerprint, inner: _Inner) -> Splices | None:
        """The passages whose KV is moved, ready for it; None if there are none."""
        mode = self.policy.passages
        if mode == "exact" or self.policy.mode == "off":
            return None

        async def compute(token_ids: list[int]) -> int:
            gen = await inner.generate(zero_prefill=False, prompt=token_ids, params=SamplingParams(max_tokens=1))
            return len(token_ids) - gen.usage.cached_tokens

        return await prepare_splices(serving, parts, root, mode, compute)

    async def _tokens(self, serving: Serving, door: ThreadDoor) -> tuple[list[int], Parts | None]:
        """The prompt's token ids, and its parts if it has some."""
        prompt, backend = self.prompt, serving.backend
        parts = None
        if (prompt is None) == (self.messages is None):
            raise InvalidRequestError("give exactly one of prompt and messages")
        if self.tools is not None and self.messages is None:
            raise InvalidRequestError("tools only go with messages: the chat template renders them")
        if self.messages is not None:
            tokens = await tokenize_chat(serving, door, self.messages, self.tools)
        elif isinstance(prompt, str):
            tokens = await door.run(lambda: backend.tokenize(prompt, add_special=True)) if prompt else []
        elif is_parted(prompt):
            parts = await door.run(lambda: tokenize_parts(prompt, backend, _checked_ids))
            tokens = parts.token_ids
        else:
            tokens = _checked_ids(prompt, backend.info.vocab_size)
        if not tokens:
            raise EmptyPromptError("the prompt is empty; give at least one token")
        limit = backend.info.context_tokens - 1
        if len(tokens) > limit:
            raise PromptTooLongError(len(tokens), limit)
        return tokens, parts


class _Inner:
    """Calls that a call makes on its way: within its namespace, and without going through the gate again, where they
    could wait for the call itself."""

    def __init__(self, call: Call, serving: Serving, door: ThreadDoor, epoch: int, created: float) -> None:
        self._call = call
        self._serving = serving
        self._door = door
        self._epoch = epoch
        self._created = created

    async def generate(self, *, zero_prefill: bool = True, **changes: Any) -> Generation:
        """The call with some of it changed."""
        own = self._call.policy
        policy = ReusePolicy(zero_prefill=zero_prefill, drafts=False, numerics=own.numerics, namespace=own.namespace)
        call = dataclasses.replace(self._call, policy=policy, streaming=False, **changes)
        mailbox: Mailbox[Any] = Mailbox()
        request = await call.request(self._serving, self._door, self._epoch, mailbox.put, self._created)
        with Submitted(self._serving.scheduler, request) as submitted:
            self._serving.scheduler.submit(request)
            self._serving.submitted(request)
            generation = submitted.take(await mailbox.get())
        assert isinstance(generation, Generation)
        return generation

    async def ask(self, messages: list[Message]) -> Generation:
        """Lets the model judge; see `verifying.Ask`."""
        return await self.generate(params=_check_params(), **_chat(messages))

    async def judge(self, messages: list[Message]) -> Generation:
        """As `ask`, for the engine itself: in no tenant's namespace, whenever nobody else has anything to do."""
        policy = ReusePolicy(numerics=self._call.policy.numerics)
        call = dataclasses.replace(self._call, policy=policy, deadline=None, priority=_LAST)
        inner = _Inner(call, self._serving, self._door, self._serving.pool.epoch, time.monotonic())
        return await inner.generate(params=_check_params(), **_chat(messages))


def _check_params() -> SamplingParams:
    options: Any = CHECK_OPTIONS
    return SamplingParams(**options)


def _chat(messages: list[Message]) -> dict[str, Any]:
    return {"prompt": None, "messages": messages, "tools": None, "adapter": None}


async def tokenize_chat(
    serving: Serving, door: ThreadDoor, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
) -> list[int]:
    """Token ids of a rendered chat, up to where the assistant's answer starts."""
    if isinstance(messages, (list, tuple)) and not messages:
        raise EmptyPromptError("messages is empty; give at least one message")
    if isinstance(messages, (str, bytes)) or not messages:
        raise InvalidRequestError("messages must be a non-empty list of mappings with 'role' and 'content'")
    backend = serving.backend

    def work() -> list[int]:
        return list(backend.tokenize(backend.render_chat(messages, tools), add_special=False))

    return await door.run(work)


def sampling_params(sampling: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
    """The sampling options of a call, given as one object or as keywords.

    Raises:
        InvalidSamplingError: an unknown keyword, a bad value, or both ways at once.
    """
    if sampling is not None and not isinstance(sampling, SamplingParams):
        raise InvalidSamplingError(f"sampling is {sampling!r}; give a SamplingParams, or the options as keywords")
    if not options:
        return sampling or SamplingParams()
    unknown = sorted(set(options) - _SAMPLING_FIELDS)
    if unknown:
        raise InvalidSamplingError(
            f"unknown option {unknown[0]!r}; sampling options are {', '.join(sorted(_SAMPLING_FIELDS))}"
        )
    if sampling is not None:
        raise InvalidSamplingError(
            f"sampling= and the keyword {min(options)!r} are both given; use one way or the other"
        )
    return SamplingParams(**options)


def check_policy(policy: ReusePolicy | None, engine_policy: ReusePolicy) -> ReusePolicy:
    """The policy of a call, with what it leaves open taken from the engine's.

    Raises:
        InvalidRequestError, UnsupportedOptionError
    """
    if policy is None:
        return engine_policy
    if not isinstance(policy, ReusePolicy):
        raise InvalidRequestError(f"reuse is {policy!r}; give a ReusePolicy, such as ReusePolicy(mode='off')")
    if policy.numerics == "bitwise" and engine_policy.numerics == "standard":
        raise UnsupportedOptionError(
            "a call asks for numerics='bitwise', but the engine was opened with 'standard'; "
            "open it with reuse=ReusePolicy(numerics='bitwise')"
        )
    return dataclasses.replace(policy, numerics=policy.numerics or engine_policy.numerics)


def check_adapter(serving: Serving, adapter: str | None) -> None:
    """Raises UnknownAdapterError unless the engine was opened with the adapter, or none is asked for."""
    states = serving.backend.adapter_states
    if adapter is not None and adapter not in states:
        known = ", ".join(sorted(states)) or "none"
        raise UnknownAdapterError(f"no adapter is called {adapter!r}; this engine has: {known}")


def _check_sampling(serving: Serving, params: SamplingParams) -> None:
    info = serving.backend.info
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        for token in ids:
            if token >= info.vocab_size:
                raise InvalidSamplingError(f"{name} holds {token}; this model's token ids end at {info.vocab_size - 1}")
    if params.n > info.max_sequences:
        raise InvalidSamplingError(
            f"n is {params.n}; this engine computes at most {info.max_sequences} sequences at once (max_sequences)"
        )


def _check_urgency(deadline: Any, priority: Any) -> None:
    number = isinstance(deadline, (int, float)) and not isinstance(deadline, bool)
    if deadline is not None and not (number and deadline > 0):
        raise InvalidRequestError(f"deadline is {deadline!r}; give a positive number of seconds, or None")
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidRequestError(f"priority is {priority!r}; give a whole number, higher for sooner")


def _checked_ids(prompt: Any, vocab_size: int) -> list[int]:
    try:
        if isinstance(prompt, (bytes, bytearray)):
            raise TypeError
        # Not int(): a float or a digit string is a mistake, and would be cut to some other token.
        ids = [operator.index(token) for token in prompt]
    except TypeError:
        raise InvalidRequestError(
            f"a prompt must be a str, a flat list of token ids, or a list of parts with a Passage among them, not {_shorten(repr(prompt))}"
        ) from None
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(f"the prompt holds token id {token}; this model has 0 to {vocab_size - 1}")
    return ids


def _shorten(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
