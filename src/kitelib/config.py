"""Options, as small frozen dataclasses. Every field says its unit and its default."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from kitelib.errors import ConfigError, InvalidSamplingError

__all__ = ["AdapterConfig", "PoolConfig", "ReusePolicy", "SamplingParams"]

ReuseMode = Literal["exact", "semantic", "off"]
Numerics = Literal["bitwise", "standard"]


@dataclasses.dataclass(frozen=True, slots=True)
class PoolConfig:
    """Where recyclable units are kept.

    Attributes:
        memory_bytes: bound of the in-process tier, bytes; None means a quarter of the memory that is really
            available (cgroup limits included); 0 turns the tier off.
        disk: folder of the disk tier; None means no disk tier.
        disk_bytes: bound of the disk tier, bytes; default 20 GiB.
        redis: URL of the Redis tier (``redis://``, ``rediss://``, ``redis+cluster://host:port,host:port``,
            ``redis+sentinel://``); None means none.
        s3: ``s3://bucket/prefix`` of the S3 tier; None means none.
        hmac_key: key that authenticates values in shared tiers; None means values are only checksummed.
        namespace_secret: server-side secret from which private tenant namespaces are derived; None means that
            tenants are told apart by the plain name of their namespace.
    """

    memory_bytes: int | None = None
    disk: str | None = None
    disk_bytes: int = 20 * 2**30
    redis: str | None = None
    s3: str | None = None
    hmac_key: bytes | None = dataclasses.field(default=None, repr=False)
    namespace_secret: bytes | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.memory_bytes is not None and self.memory_bytes < 0:
            raise ConfigError(f"PoolConfig.memory_bytes is {self.memory_bytes}; give None, 0 or a number of bytes")
        if self.disk_bytes <= 0:
            raise ConfigError(f"PoolConfig.disk_bytes is {self.disk_bytes}; give a positive number of bytes")


@dataclasses.dataclass(frozen=True, slots=True)
class ReusePolicy:
    """What may be reused, and how exact the result has to be.

    Attributes:
        mode: "exact" (default) reuses only what the same computation left behind; "off" reuses nothing, not even
            inside the engine (for cold measurements); "semantic" is not available in this release.
        zero_prefill: sample the first token from stored last-position logits when the whole prompt is known;
            default True.
        drafts: use stored completions as speculative drafts; default True; has no effect on backends without it.
        numerics: "bitwise" (default) gives the same bits with and without reuse; "standard" gives the same values
            up to floating-point reduction order and lets the backend use its fastest kernels. It shapes how the
            model is loaded, so a call may not ask for more than the engine was opened with.
        namespace: tenant; units are never shared across namespaces. None means the engine's own namespace.
    """

    mode: ReuseMode = "exact"
    zero_prefill: bool = True
    drafts: bool = True
    numerics: Numerics = "bitwise"
    namespace: str | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("exact", "semantic", "off"):
            raise ConfigError(f"ReusePolicy.mode is {self.mode!r}; it must be 'exact', 'semantic' or 'off'")
        if self.numerics not in ("bitwise", "standard"):
            raise ConfigError(f"ReusePolicy.numerics is {self.numerics!r}; it must be 'bitwise' or 'standard'")


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterConfig:
    """One LoRA adapter.

    Attributes:
        path: GGUF file of the adapter.
        scale: factor applied to the adapter, no unit; default 1.0.
    """

    path: str
    scale: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Defaults are greedy decoding of at most 128 tokens.

    Attributes:
        max_tokens: most tokens to generate, per choice; default 128.
        temperature: 0 means greedy (default); otherwise logits are divided by it.
        top_p: nucleus mass in (0, 1]; 1 (default) keeps everything.
        top_k: keep the k most likely tokens; 0 (default) keeps everything.
        min_p: keep tokens with at least min_p times the highest probability; 0 (default) keeps everything.
        repetition_penalty: > 1 makes seen tokens less likely (Keskar et al. 2019, CTRL); default 1.
        presence_penalty: subtracted once from the logit of each generated token; -2 to 2, default 0.
        frequency_penalty: subtracted per occurrence in the generated text; -2 to 2, default 0.
        seed: seed of the random generator; None (default) draws one. Choice i of n uses the pair (seed, i).
        stop: strings that end the text; they are not part of it. Found across token boundaries too.
        stop_token_ids: token ids that end the text; they are not part of it.
        logit_bias: token id -> value added to its logit.
        logprobs: None, or how many of the most likely tokens to report per position (the chosen one is always
            there), 0 to 100. Log-probabilities are those of the model, before any of the options above.
        n: number of choices; default 1.
        ignore_eos: go on after an end-of-text token; default False.
        json_schema: constrain the text to a JSON schema (a dict or its JSON text); needs the extra ``guided``.
        regex: constrain the text to a regular expression; needs the extra ``guided``.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    logprobs: int | None = None
    n: int = 1
    ignore_eos: bool = False
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None

    def __post_init__(self) -> None:
        _check_integer("max_tokens", self.max_tokens, 1, None)
        _check_number("temperature", self.temperature, 0.0, None)
        _check_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_integer("top_k", self.top_k, 0, None)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, None, open_low=True)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_integer("n", self.n, 1, None)
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, 2**64 - 1)
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0, 100)
        # A lone string is by far the most common way to give one stop string.
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidSamplingError(f"stop holds {text!r}; give non-empty strings")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            _check_integer("stop_token_ids", token, 0, None)
        for token, bias in self.logit_bias.items():
            _check_integer("logit_bias key", token, 0, None)
            if isinstance(bias, bool) or not isinstance(bias, (int, float)) or math.isnan(bias):
                raise InvalidSamplingError(f"logit_bias[{token}] is {bias!r}; give a number")
        if self.json_schema is not None and self.regex is not None:
            raise InvalidSamplingError("json_schema and regex are both set; give at most one constraint")


def _check_integer(name: str, value: Any, low: int, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        bound = f"from {low} to {high}" if high is not None else f"of at least {low}"
        raise InvalidSamplingError(f"{name} is {value!r}; give a whole number {bound}")


def _check_number(name: str, value: Any, low: float, high: float | None, *, open_low: bool = False) -> None:
    good = not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value)
    good = good and (value > low if open_low else value >= low) and (high is None or value <= high)
    if not good:
        edge = f"above {low}" if open_low else f"of at least {low}"
        raise InvalidSamplingError(
            f"{name} is {value!r}; give a number {edge}{'' if high is None else f', at most {high}'}"
        )
