"""Options, as small frozen dataclasses. Every field says its unit and its default."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from kitelib.config_file import check_bytes, check_choice, check_count, check_seconds, read_yaml, section, shown
from kitelib.config_sections import LifecycleSection, PoolSection, UnitTypeSection, redis_tier, unit_types
from kitelib.errors import ConfigError, InvalidSamplingError

__all__ = [
    "AdapterConfig",
    "KiteConfig",
    "LifecycleSection",
    "PoolConfig",
    "PoolSection",
    "ReusePolicy",
    "SamplingParams",
    "TierThresholds",
    "UnitTypeSection",
    "block_tokens_of",
]

_MAX_BLOCK_TOKENS = 256
_DIGEST = re.compile(r"[0-9A-Fa-f]{64}")

ReuseMode = Literal["exact", "semantic", "off"]
Numerics = Literal["bitwise", "standard"]
MatchLevel = Literal["canonical", "structural"]
PassageMode = Literal["exact", "reuse", "blend"]

GREEDY_TEMPERATURE = 1e-5
"""Below it the most likely token is taken."""


@dataclasses.dataclass(frozen=True, slots=True)
class TierThresholds:
    """When a unit counts as hot, warm or cold.

    Attributes:
        hot_hits_per_hour: more hits than this within an hour make a unit hot: it is copied to every faster
            tier; default 100.
        warm_hits_per_day: more hits than this within 24 hours make a unit warm: it is copied back from the archive to
            Redis, and with ``share="when_warm"`` only warm units go to Redis at all; default 10.
        cold_after_s: seconds without a hit after which a unit is cold and moves to the archive (S3); default 7 days.
    """

    hot_hits_per_hour: int = 100
    warm_hits_per_day: int = 10
    cold_after_s: float = 7 * 86400.0

    def __post_init__(self) -> None:
        for name in ("hot_hits_per_hour", "warm_hits_per_day"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"TierThresholds.{name} is {shown(value)}; give a whole number of hits, 0 or more")
        check_seconds("TierThresholds.cold_after_s", self.cold_after_s)


@dataclasses.dataclass(frozen=True, slots=True)
class PoolConfig:
    """Where recyclable units are kept.

    Attributes:
        memory_bytes: bound of the in-process tier, bytes; None means a quarter of the memory that is really
            available (cgroup limits included); 0 turns the tier off.
        yoco_lite_cache_size: most units in the in-process tier, besides the bound in bytes; None (default) means no
            such bound. A unit of kind `kv` is one block of tokens.
        disk: folder of the disk tier, which survives restarts and may be used by several processes at once; None
            means no disk tier.
        disk_bytes: bound of the disk tier, bytes that its files take on the disk; default 20 GiB.
        redis: URL of the Redis tier: ``redis://``, ``rediss://`` (TLS), ``redis+cluster://host:port,host:port``,
            ``rediss+cluster://``, ``redis+sentinel://host:port,host:port/service/db``; None means none. A user and
            password go before an ``@``.
        s3: ``s3://bucket/prefix`` of the S3 tier, the archive of cold units; None means none.
        s3_options: settings of the S3 client, such as ``endpoint``, ``region``, ``access_key_id``,
            ``secret_access_key``; what is not given comes from the usual ``AWS_...`` variables.
        stores: URLs of further tiers, fastest first, whose schemes are registered by installed packages (entry points
            ``kitelib.stores``); they come after Redis and before S3.
        hmac_key: key that authenticates values outside this process, one derived key per namespace; None means values
            are only checksummed.
        namespace_secret: server-side secret from which private tenant namespaces are derived; None means that
            tenants are told apart by the plain name of their namespace.
        ttl_seconds: seconds after which a unit in the pool counts as gone; None (default) means never. What is in
            the model's own context does not age.
        connect_timeout: seconds that opening a connection to a remote tier may take; default 0.5.
        socket_timeout: seconds that a remote tier may stay silent within a call; default 0.3.
        freshness_check_interval: seconds between two looks at the epochs that other processes raised, which are also
            when expired and cold units are looked for; default 60.
        write_bytes: most bytes on the way to each tier; past it, new writes are dropped and counted; default 256 MiB.
        drain_seconds: how long closing waits for what is on the way to the tiers; default 5.
        share: "at_once" (default) writes every new unit to Redis too, so that other processes find it; "when_warm"
            waits until a unit is warm.
        thresholds: what hot, warm and cold mean.
        replica_reads: read from Redis replicas as well; a replica that lags is a miss. Default False.
        codec: how units are stored outside this process: "auto" (default) compresses where that is faster than
            the tier it saves bytes for, "none", "zstd" or "entropy" (of 16-bit floats, so not with "int8" below).
        kv_precision: "exact" (default), or "int8": K and V are kept as 8-bit integers, which changes answers slightly,
            takes half the bytes, and never mixes with exact units.
        logits_codec: "raw" (default), or "fp16_quant": last-position logits are kept as float16, half the bytes. An
            engine with ``numerics="bitwise"`` keeps them as they are whatever stands here.
    """

    memory_bytes: int | None = None
    yoco_lite_cache_size: int | None = None
    disk: str | None = None
    disk_bytes: int = 20 * 2**30
    redis: str | None = dataclasses.field(default=None, repr=False)
    s3: str | None = None
    s3_options: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    stores: tuple[str, ...] = dataclasses.field(default=(), repr=False)
    hmac_key: bytes | None = dataclasses.field(default=None, repr=False)
    namespace_secret: bytes | None = dataclasses.field(default=None, repr=False)
    ttl_seconds: float | None = None
    connect_timeout: float = 0.5
    socket_timeout: float = 0.3
    freshness_check_interval: float = 60.0
    write_bytes: int = 256 * 2**20
    drain_seconds: float = 5.0
    share: Literal["at_once", "when_warm"] = "at_once"
    thresholds: TierThresholds = TierThresholds()
    replica_reads: bool = False
    codec: Literal["auto", "none", "zstd", "entropy"] = "auto"
    kv_precision: Literal["exact", "int8"] = "exact"
    logits_codec: Literal["raw", "fp16_quant"] = "raw"

    def __post_init__(self) -> None:
        if self.memory_bytes is not None:
            check_bytes("PoolConfig.memory_bytes", self.memory_bytes, least=0)
        if self.yoco_lite_cache_size is not None:
            check_count("PoolConfig.yoco_lite_cache_size", self.yoco_lite_cache_size)
        for name in ("disk_bytes", "write_bytes"):
            check_bytes(f"PoolConfig.{name}", getattr(self, name))
        if self.disk is not None:
            object.__setattr__(self, "disk", os.fspath(self.disk))
            if not self.disk:
                raise ConfigError("PoolConfig.disk is empty; give a folder, or None for no disk tier")
        for name in ("connect_timeout", "socket_timeout", "freshness_check_interval"):
            check_seconds(f"PoolConfig.{name}", getattr(self, name))
        if self.ttl_seconds is not None:
            check_seconds("PoolConfig.ttl_seconds", self.ttl_seconds)
        if self.drain_seconds != 0:
            check_seconds("PoolConfig.drain_seconds", self.drain_seconds)
        if isinstance(self.stores, str):
            raise ConfigError("PoolConfig.stores is a str; give a tuple of URLs")
        object.__setattr__(self, "stores", tuple(self.stores))
        check_choice("PoolConfig.share", self.share, ["at_once", "when_warm"])
        check_choice("PoolConfig.codec", self.codec, ["auto", "none", "zstd", "entropy"])
        check_choice("PoolConfig.kv_precision", self.kv_precision, ["exact", "int8"])
        check_choice("PoolConfig.logits_codec", self.logits_codec, ["raw", "fp16_quant"])
        if self.kv_precision == "int8" and self.codec == "entropy":
            raise ConfigError('PoolConfig.codec is "entropy", which 8-bit integers don\'t have; use "auto" with "int8"')


@dataclasses.dataclass(frozen=True, slots=True)
class ReusePolicy:
    """What may be reused, and how exact the result has to be.

    Attributes:
        mode: "exact" (default) reuses only what the same computation left behind; "off" reuses nothing, not even
            inside the engine (for cold measurements); "semantic" also takes the stored wording of a question that
            `level` calls the same, and reports the answer as "approximate". Only the last user message of `messages`
            is ever compared that way.
        level: with mode="semantic", what the same question is: "canonical" (default) ignores case, width, punctuation,
            greetings and fillers, and spelling variants; "structural" also folds forms of asking ("how do I" and "what
            is the way to", 能不能 and 可以..吗). See docs/matching.md.
        neighbours: with mode="semantic", in an engine opened with ``encoder=``, also ask the model whether the nearest stored question (extra ``semantic``)
            means the same, if numbers, names, negation and so on agree; default False.
        zero_prefill: sample the first token from stored last-position logits when the whole prompt is known;
            default True.
        completions: an identical prompt with identical deterministic sampling (temperature 0, or a seed) gives the
            stored completion, without a model step; default False.
        drafts: let the model verify guesses of what it will say, from earlier answers and from the prompt, several
            tokens per step; the answer is the same without; default True. Models that can't take tokens back
            (recurrent ones) have none.
        passages: what `Passage` parts of a prompt are: "exact" (default) computes them like any text; "reuse" takes
            their KV from where each was computed alone, moved to its new place, and reports "approximate"; "blend"
            also computes again the tokens that differ most there. Both are of the torch engine only.
        numerics: "bitwise" gives the same bits with and without reuse; "standard" gives the same values up to
            floating-point reduction order and lets the backend use its fastest kernels. None (default) means
            "bitwise" when an engine is opened, and the engine's own in a call. It shapes how the model is loaded, so
            a call may not ask for more than the engine was opened with.
        namespace: tenant; units are never shared across namespaces. None means the engine's own namespace.
    """

    mode: ReuseMode = "exact"
    level: MatchLevel = "canonical"
    neighbours: bool = False
    zero_prefill: bool = True
    completions: bool = False
    drafts: bool = True
    passages: PassageMode = "exact"
    numerics: Numerics | None = None
    namespace: str | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("exact", "semantic", "off"):
            raise ConfigError(f"ReusePolicy.mode is {self.mode!r}; it must be 'exact', 'semantic' or 'off'")
        if self.level not in ("canonical", "structural"):
            raise ConfigError(f"ReusePolicy.level is {self.level!r}; it must be 'canonical' or 'structural'")
        for name in ("neighbours", "zero_prefill", "completions", "drafts"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"ReusePolicy.{name} is {getattr(self, name)!r}; give True or False")
        if self.neighbours and self.mode != "semantic":
            raise ConfigError(f"ReusePolicy.neighbours needs mode='semantic', and the mode is {self.mode!r}")
        if self.passages not in ("exact", "reuse", "blend"):
            raise ConfigError(f"ReusePolicy.passages is {self.passages!r}; it must be 'exact', 'reuse' or 'blend'")
        if self.numerics not in (None, "bitwise", "standard"):
            raise ConfigError(f"ReusePolicy.numerics is {self.numerics!r}; it must be 'bitwise' or 'standard'")


@dataclasses.dataclass(frozen=True, slots=True)
class AdapterConfig:
    """One LoRA adapter.

    Attributes:
        path: GGUF file of the adapter (llama_cpp), or folder that PEFT saved (torch).
        scale: factor applied to the adapter, no unit; default 1.0.
        digest: digest of the content that the adapter must have, 64 hexadecimal digits; None (default) takes what is
            there. The torch backend finds an adapter by it in the pool, also where the folder is absent.
    """

    path: str
    scale: float = 1.0
    digest: str | None = None

    def __post_init__(self) -> None:
        if self.digest is None:
            return
        if not isinstance(self.digest, str) or not _DIGEST.fullmatch(self.digest):
            raise ConfigError(f"AdapterConfig.digest is {shown(self.digest)}; give 64 hexadecimal digits, or None")
        object.__setattr__(self, "digest", self.digest.lower())


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

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken and nothing is drawn: a temperature below 1e-5."""
        return self.temperature < GREEDY_TEMPERATURE

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
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else _as_tuple("stop", self.stop))
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidSamplingError(f"stop holds {text!r}; give non-empty strings")
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        for token in self.stop_token_ids:
            _check_integer("stop_token_ids", token, 0, None)
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidSamplingError(f"logit_bias is {self.logit_bias!r}; give a mapping of token ids to numbers")
        for token, bias in self.logit_bias.items():
            _check_integer("logit_bias key", token, 0, None)
            if isinstance(bias, bool) or not isinstance(bias, (int, float)) or math.isnan(bias):
                raise InvalidSamplingError(f"logit_bias[{token}] is {bias!r}; give a number")
        if self.regex is not None and not isinstance(self.regex, str):
            raise InvalidSamplingError(f"regex is {self.regex!r}; give a regular expression as a string")
        if self.json_schema is not None and self.regex is not None:
            raise InvalidSamplingError("json_schema and regex are both set; give at most one constraint")


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    try:
        return tuple(value)
    except TypeError:
        raise InvalidSamplingError(f"{name} is {value!r}; give a list") from None


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


@dataclasses.dataclass(frozen=True, slots=True)
class KiteConfig:
    """A configuration file. Every key may be left out; a key that does not exist is an error.

    Attributes:
        ru_slicing: prefix of an architecture's name -> tokens per block, 1 to 256; default
            ``{llama: 16, qwen: 32, phi: 8}``. Architectures that none of the prefixes fits are cut as without a file.
        ru_types: stored form of each kind of unit; see `UnitTypeSection`.
        ru_pool: where units are kept; see `PoolSection`.
        yoco_lite_cache_size: most units that process memory keeps, whatever the backend of `ru_pool`; None (default)
            means that only `ru_pool.memory_bytes` bounds it.
    """

    ru_slicing: Mapping[str, int] = dataclasses.field(default_factory=lambda: {"llama": 16, "qwen": 32, "phi": 8})
    ru_types: tuple[UnitTypeSection, ...] = (UnitTypeSection("kv_cache"), UnitTypeSection("mlp_activation"))
    ru_pool: PoolSection = dataclasses.field(default_factory=PoolSection)
    yoco_lite_cache_size: int | None = None

    def __post_init__(self) -> None:
        if self.yoco_lite_cache_size is not None:
            check_count("yoco_lite_cache_size", self.yoco_lite_cache_size)
        if not isinstance(self.ru_slicing, Mapping):
            raise ConfigError(f"ru_slicing is {shown(self.ru_slicing)}; give a mapping like {{llama: 16}}")
        for prefix, size in self.ru_slicing.items():
            if not isinstance(prefix, str) or not prefix:
                raise ConfigError(f"ru_slicing has the key {shown(prefix)}; give the start of an architecture's name")
            if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= _MAX_BLOCK_TOKENS:
                raise ConfigError(
                    f"ru_slicing.{prefix} is {shown(size)}; give a whole number of tokens from 1 to {_MAX_BLOCK_TOKENS}"
                )
        object.__setattr__(self, "ru_slicing", dict(self.ru_slicing))
        names = [each.name for each in self.ru_types]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise ConfigError(f"ru_types[{index}].name is {name!r} again; give each kind of unit one entry")

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> KiteConfig:
        """Reads a file (YAML's safe subset). Blocks for as long as a small file takes.

        Raises:
            ConfigError: the file can't be read or is no YAML, or a key or value in it is wrong.
        """
        plain = read_yaml(path)
        if isinstance(plain, dict):
            # A heading with nothing below it is as good as none.
            headings = ("ru_slicing", "ru_types", "ru_pool")
            plain = {key: each for key, each in plain.items() if each is not None or key not in headings}
        try:
            return section(cls, plain, "", {"ru_types": unit_types, "ru_pool": _pool_section})
        except ConfigError as error:
            raise ConfigError(f"{os.fspath(path)}: {error}") from error

    def to_pool_config(self) -> PoolConfig:
        """The pool that the file describes."""
        pool, types = self.ru_pool, {each.name: each for each in self.ru_types}
        kv = types.get("kv_cache") or UnitTypeSection("kv_cache")
        logits = types.get("mlp_activation") or UnitTypeSection("mlp_activation")
        return PoolConfig(
            memory_bytes=pool.memory_bytes,
            yoco_lite_cache_size=self.yoco_lite_cache_size,
            disk=pool.disk_folder if pool.backend in ("disk", "tiered") else None,
            disk_bytes=pool.disk_bytes,
            redis=redis_tier(pool),
            s3=pool.s3_url if pool.backend in ("s3", "tiered") else None,
            ttl_seconds=pool.lifecycle.ttl_seconds,
            connect_timeout=pool.connect_timeout,
            socket_timeout=pool.socket_timeout,
            freshness_check_interval=pool.lifecycle.freshness_check_interval,
            codec=cast(Any, kv.compression),
            kv_precision="int8" if kv.serializer == "int8_kv" else "exact",
            logits_codec=cast(Any, logits.serializer),
        )

    def block_tokens_for(self, architecture: str) -> int | None:
        """Tokens per block for an architecture; None if `ru_slicing` does not name it."""
        return block_tokens_of(self.ru_slicing, architecture)


def block_tokens_of(table: Mapping[str, int], architecture: str) -> int | None:
    """The value of the longest key that `architecture` starts with; None if there is none."""
    fitting = [prefix for prefix in table if architecture.startswith(prefix)]
    return table[max(fitting, key=len)] if fitting else None


def _pool_section(value: Any, place: str) -> PoolSection:
    return section(PoolSection, value, place, {"lifecycle": lambda each, at: section(LifecycleSection, each, at)})
