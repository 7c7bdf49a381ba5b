"""What KV that came back from a lossy codec does to logits and to greedy answers."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from kitelib.abc import BlockPayload, Codec, SequenceId, StepWork
from kitelib.backends.llama_cpp.backend import LlamaCppBackend

__all__ = ["LastBit", "answers"]

SYSTEM = (
    "You are the assistant of a bank. Answer the customer's question in two sentences. Never ask for a PIN or a "
    "password. If a card is lost or stolen, say first how to freeze it in the app. Fees depend on the plan: Standard is "
    "free and includes two withdrawals a month, Plus costs three euros and includes five, Premium has no limit."
)
NEW_TOKENS = 32


class LastBit:
    """No codec at all: flips the last mantissa bit of half the elements. What this does to answers is the model's own
    sensitivity, below which no lossy codec can stay."""

    name = "last bit"

    def encode(self, data: np.ndarray, dtype: str, shape: tuple[int, ...]) -> bytes:
        flips = np.random.default_rng(len(data)).integers(0, 2, len(data) // 2).astype("<u2")
        return (data.view("<u2") ^ flips).tobytes()

    def decode(self, blob: bytes | memoryview, num_bytes: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        return np.frombuffer(blob, np.uint8)


def answers(backend: LlamaCppBackend, questions: Sequence[str], codecs: dict[str, Codec]) -> dict[str, Any]:
    """Per codec: how the logits after the prompt and the greedy answer change when the prompt's KV went through it.

    The last token of each prompt is computed, everything before it is restored, with the exact KV and with what the
    codec gives back. "equal tokens" counts positions of the two answers that agree; after the first difference they
    go separate ways, which says more about the model than about the codec, hence the second count.
    """
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in codecs}
    for question in questions:
        ids = _prompt(backend, question)
        payloads = _computed(backend, ids)
        exact_logits, exact = _answer(backend, ids, payloads)
        for name, codec in codecs.items():
            logits, answer = _answer(backend, ids, [_through(codec, payload) for payload in payloads])
            rows[name].append(_compare(exact_logits, logits, exact, answer))
    return {name: {"prompts": len(each), **_summary(each)} for name, each in rows.items()}


def _prompt(backend: LlamaCppBackend, question: str) -> list[int]:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return backend.tokenize(backend.render_chat(messages), add_special=False)


def _computed(backend: LlamaCppBackend, ids: Sequence[int]) -> list[BlockPayload]:
    """The KV of all tokens but the last."""
    sequence, size, known = backend.create(), backend.info.block_tokens, len(ids) - 1
    for start in range(0, known, backend.info.max_step_tokens):
        part = ids[start : min(start + backend.info.max_step_tokens, known)]
        backend.step([StepWork(sequence, part, start, logits=False)])
    payloads = backend.export_blocks(sequence, 0, -(-known // size), known)
    backend.release(sequence)
    return payloads


def _through(codec: Codec, payload: BlockPayload) -> BlockPayload:
    blob = codec.encode(payload.data, payload.dtype, payload.shape)
    data = codec.decode(blob, len(payload.data), payload.dtype, payload.shape)
    return dataclasses.replace(payload, data=data)


def _answer(
    backend: LlamaCppBackend, ids: Sequence[int], payloads: Sequence[BlockPayload]
) -> tuple[np.ndarray, list[int]]:
    """Logits after the prompt, and the greedy tokens that follow."""
    sequence, known = backend.create(), len(ids) - 1
    backend.restore_blocks(sequence, 0, payloads)
    logits = first = _step(backend, sequence, ids[-1], known)
    tokens: list[int] = []
    while len(tokens) < NEW_TOKENS:
        tokens.append(int(logits.argmax()))
        if tokens[-1] in backend.info.end_token_ids:
            break
        logits = _step(backend, sequence, tokens[-1], len(ids) - 1 + len(tokens))
    backend.release(sequence)
    return first, tokens


def _step(backend: LlamaCppBackend, sequence: SequenceId, token: int, position: int) -> np.ndarray:
    logits = backend.step([StepWork(sequence, [token], position, logits=True)]).logits[0]
    assert logits is not None
    return logits.astype(np.float64)


def _compare(exact: np.ndarray, other: np.ndarray, tokens: list[int], others: list[int]) -> dict[str, float]:
    difference = np.abs(exact - other)
    log_p, log_q = (each - each.max() - np.log(np.exp(each - each.max()).sum()) for each in (exact, other))
    equal = [a == b for a, b in zip(tokens, others, strict=False)]
    run = equal.index(False) if False in equal else len(equal)
    length = max(len(tokens), len(others))
    return {
        "max": float(difference.max()),
        "mean": float(difference.mean()),
        "kl": float((np.exp(log_p) * (log_p - log_q)).sum()),
        "same_first": float(equal[0]),
        "equal": sum(equal) / length,
        "run": run / length,
        "same": float(tokens == others),
    }


def _summary(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    def mean(key: str) -> float:
        return statistics.fmean(row[key] for row in rows)

    return {
        "max logit difference": round(max(row["max"] for row in rows), 4),
        "mean logit difference": round(mean("mean"), 4),
        "KL divergence, mean": round(mean("kl"), 6),
        "KL divergence, max": round(max(row["kl"] for row in rows), 6),
        "same first token": round(mean("same_first"), 3),
        "equal tokens": round(mean("equal"), 3),
        "equal until the first difference": round(mean("run"), 3),
        "same answers": round(mean("same"), 3),
    }
