"""Passages moved instead of computed: how far the model's output is from full prefill, and what that saves.

.venv/bin/python tests/benchmarks/yoco_passages.py --threads 2 --json passages.json

The task is a needle in chunks. A library of passages about bank branches is computed once, each alone; one sentence in each
says the branch's access code, at a random place among others. A question comes with some of them in random order and asks
for the code of one; the answer is begun, so that its first token is the code's first digit. All ways answer the same
prompts, token for token, in turn. Full prefill is the reference; it reuses the prefix that a prompt shares with earlier
ones, which is the system prompt and, for most, the first passage.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import importlib
import math
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from lite_report import Report, _cpu_name, median, progress
from lite_text import PromptSource

from kitelib import KiteEngine, Passage, ReusePolicy
from kitelib.config import PassageMode
from kitelib.engine.results import Generation

_BRANCHES = (
    *("Harrow", "Leiden", "Porto", "Tartu", "Graz", "Cork", "Aarhus", "Verona", "Basel", "Ghent", "Turku", "Bergen"),
    *(
        "Lublin",
        "Split",
        "Nantes",
        "Malaga",
        "Uppsala",
        "Brno",
        "Dundee",
        "Riga",
        "Lugano",
        "Toledo",
        "Odense",
        "Bruges",
    ),
)
_SYSTEM = (
    "<|im_start|>system\nYou answer questions about bank branches from the notes that you are given, and only from them. "
    "Give the code exactly as it stands there.<|im_end|>\n<|im_start|>user\nNotes:\n"
)
_ASK = "\nWhat is the access code of the branch in {branch}?<|im_end|>\n<|im_start|>assistant\n"
_BEGUN = "The access code of the branch in {branch} is "  # the next token is the first digit
_TOP = 100


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """One way to answer: a mode of `ReusePolicy.passages`, and the tokens at the head of each passage that are computed."""

    mode: PassageMode
    head_tokens: int = 16

    @property
    def name(self) -> str:
        """As the table calls it."""
        return "full prefill" if self.mode == "exact" else f"{self.mode}, head {self.head_tokens}"


FULL = Way("exact")
WAYS = (FULL, *(Way("reuse", head) for head in (0, 4, 8, 16, 32)), Way("blend", 0), Way("blend", 16))


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """A prompt as parts: what comes before the passages, those, and what comes after."""

    before: list[int]
    passages: list[list[int]]
    after: list[int]
    code: str

    def prompt(self, way: Way) -> list[Any]:
        """The parts for `KiteEngine.generate`."""
        return [self.before, *(Passage(ids, way.head_tokens) for ids in self.passages), self.after]


@dataclasses.dataclass(slots=True)
class Outcome:
    """What one way gave, a value per question."""

    kl: list[float] = dataclasses.field(default_factory=list)
    first: list[bool] = dataclasses.field(default_factory=list)
    whole: list[bool] = dataclasses.field(default_factory=list)
    found: list[bool] = dataclasses.field(default_factory=list)
    computed: list[float] = dataclasses.field(default_factory=list)
    ttft: list[float] = dataclasses.field(default_factory=list)


async def make_questions(engine: KiteEngine, options: argparse.Namespace) -> tuple[list[list[int]], list[Question]]:
    """The library, and questions about it."""
    rng = random.Random(options.seed)

    async def ids(text: str) -> list[int]:
        return await engine.tokenize(text, add_special=False)

    backend = engine._current.backend  # PromptSource counts tokens outside of a coroutine
    source = PromptSource(lambda text: list(backend.tokenize(text, add_special=False)), seed=options.seed)
    codes = [f"{rng.randrange(10_000):04d}" for _ in _BRANCHES]
    library = []
    for branch, code in zip(_BRANCHES, codes, strict=True):
        sentences = [source._sentence() for _ in range(options.sentences)]
        needle = f"The access code of the branch in {branch} is {code}."
        sentences.insert(rng.randrange(len(sentences) + 1), needle)
        library.append(await ids(f"About {branch}. {' '.join(sentences)}\n"))
    questions = []
    for _ in range(options.questions):
        chosen = rng.sample(range(len(library)), options.passages)
        asked = rng.choice(chosen)
        tail = f"{_ASK}{_BEGUN}".format(branch=_BRANCHES[asked])
        questions.append(
            Question(await ids(_SYSTEM), [library[place] for place in chosen], await ids(tail), codes[asked])
        )
    return library, questions


def divergence(wanted: Mapping[int, float], found: Mapping[int, float]) -> float:
    """KL(wanted || found) in nats, over the tokens that both list and all others as one: a lower bound that is nearly the
    whole, since the lists hold all but a little of the mass. Both are token id -> natural-log probability."""
    common = wanted.keys() & found.keys()
    total, rest_wanted, rest_found = 0.0, 1.0, 1.0
    for token in common:
        mass = math.exp(wanted[token])
        total += mass * (wanted[token] - found[token])
        rest_wanted, rest_found = rest_wanted - mass, rest_found - math.exp(found[token])
    rest_wanted, rest_found = max(rest_wanted, 1e-9), max(rest_found, 1e-9)
    return max(0.0, total + rest_wanted * math.log(rest_wanted / rest_found))


async def measure(engine: KiteEngine, options: argparse.Namespace) -> dict[Way, Outcome]:
    """Every question, answered in every way in turn. Interrupted (Ctrl-C), it gives those that are complete."""
    library, questions = await make_questions(engine, options)
    progress(f"{len(library)} passages of {median([len(ids) for ids in library]):.0f} tokens")
    outcomes = {way: Outcome() for way in WAYS}
    await engine.preheat([*library, questions[0].before])
    for number, question in enumerate(questions):
        found: dict[Way, Generation] = {}
        try:
            # Full prefill first: it is what the others are compared with.
            for way in (FULL, *random.Random(number).sample(WAYS[1:], len(WAYS) - 1)):
                found[way] = await ask(engine, question, way, options.new_tokens)
                await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            progress(f"interrupted: the figures are those of {number} questions")
            break
        progress(f"question {number + 1}, {question.code}: {', '.join(gen.text[:4] for gen in found.values())}")
        for way, gen in found.items():
            note(outcomes[way], question, found[FULL], gen)
    return outcomes


async def ask(engine: KiteEngine, question: Question, way: Way, new_tokens: int) -> Generation:
    """One answer, greedy."""
    policy = ReusePolicy(passages=way.mode, drafts=False, zero_prefill=False)
    prompt: Any = question.prompt(way)
    return await engine.generate(prompt, max_tokens=new_tokens, logprobs=_TOP, ignore_eos=True, reuse=policy)


def note(outcome: Outcome, question: Question, reference: Generation, gen: Generation) -> None:
    """Compares an answer with that of full prefill."""
    assert gen.prompt_token_ids == reference.prompt_token_ids
    assert gen.logprobs is not None
    assert reference.logprobs is not None
    outcome.kl.append(divergence(reference.logprobs[0], gen.logprobs[0]))
    outcome.first.append(gen.token_ids[0] == reference.token_ids[0])
    outcome.whole.append(gen.token_ids == reference.token_ids)
    outcome.found.append(question.code in gen.text)
    outcome.computed.append(gen.reuse.computed_tokens)
    outcome.ttft.append(gen.timing.ttft_s)


def report_all(report: Report, outcomes: Mapping[Way, Outcome]) -> None:
    """One line per way and figure."""
    full = outcomes[FULL]
    for way, outcome in outcomes.items():
        found = f"{sum(outcome.found)} of {len(outcome.found)}"
        report.add(way.name, "needle found", [100.0 * each for each in share(outcome.found)], "%", found)
        report.add(way.name, "prompt tokens computed", outcome.computed, "tokens")
        report.add(way.name, "TTFT", outcome.ttft)
        if way == FULL:
            continue
        mean = sum(outcome.kl) / len(outcome.kl)
        report.add(way.name, "KL of the first token to full prefill, mean", [mean], "nats")
        report.add(way.name, "KL of the first token to full prefill, median", outcome.kl, "nats")
        report.add(way.name, "same first token", [100.0 * each for each in share(outcome.first)], "%")
        report.add(way.name, "same answer", [100.0 * each for each in share(outcome.whole)], "%")
        ratios = [ours / theirs for ours, theirs in zip(outcome.ttft, full.ttft, strict=True)]
        report.add(way.name, "TTFT to full prefill of the same question", ratios, "x")


def share(flags: Sequence[bool]) -> list[float]:
    """The share that is true, as a list of one figure."""
    return [sum(flags) / len(flags)]


def summary(outcomes: Mapping[Way, Outcome]) -> str:
    """The table of docs/passages.md."""
    full = outcomes[FULL]
    lines = [
        "| way | needle found | KL, mean (nats) | KL, median | same first token | same answer | computed | TTFT ratio |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for way, outcome in outcomes.items():
        count = len(outcome.found)
        ratio = median([ours / theirs for ours, theirs in zip(outcome.ttft, full.ttft, strict=True)])
        lines.append(
            f"| {way.name} | {sum(outcome.found)} of {count} | {sum(outcome.kl) / count:.3f} | {median(outcome.kl):.3f} | "
            f"{sum(outcome.first)} | {sum(outcome.whole)} | {median(outcome.computed):.0f} | {ratio:.2f} |"
        )
    return "\n".join(lines)


@contextlib.asynccontextmanager
async def open_engine(folder: Path, options: argparse.Namespace) -> AsyncIterator[KiteEngine]:
    """Bitwise numerics: full prefill is the same however it is cut, so every difference is the moving's."""
    async with KiteEngine.open(
        folder,
        backend="torch",
        threads=options.threads,
        n_ctx=4096,
        kv_tokens=16384,
        max_sequences=8,
        dtype=options.dtype,
    ) as engine:
        yield engine


async def run(folder: Path, options: argparse.Namespace) -> dict[Way, Outcome]:
    async with open_engine(folder, options) as engine:
        return await measure(engine, options)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    report = Report(options.threads)
    with tempfile.TemporaryDirectory() as made:
        folder = options.model or make_folder(Path(made))
        outcomes = asyncio.run(run(folder, options))
        host = describe(folder, options)
    report_all(report, outcomes)
    if options.json:
        report.write(options.json, host)
    print(f"\nmodel {host['model']}, {host['cpu']} with {host['cores']} cores, load {host['load_average']}")
    print(report.table())
    print()
    print(summary(outcomes))
    return 0


def make_folder(place: Path) -> Path:
    """SmolLM2 as a folder, in bfloat16."""
    root = str(Path(__file__).resolve().parents[2])
    if root not in sys.path:
        sys.path.append(root)
    progress("writing the model folder")
    found: Path = importlib.import_module("tests.support.hf_folders").smollm2_folder(place / "smollm2-135m-instruct")
    return found


def describe(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Facts without which the figures say little."""
    return {
        "model": folder.name,
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in ("kitelib", "torch", "transformers")},
        "options": {name: str(value) for name, value in vars(options).items()},
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Moved passages against full prefill.")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="default: 2")
    parser.add_argument("--questions", type=int, default=40, help="default: 40")
    parser.add_argument("--passages", type=int, default=6, help="passages in each prompt, at most 24; default: 6")
    parser.add_argument("--sentences", type=int, default=5, help="beside the needle in each passage; default: 5")
    parser.add_argument("--new-tokens", type=int, default=6, help="length of an answer; default: 6")
    parser.add_argument("--seed", type=int, default=11)
    parser.add_argument("--dtype", default="auto", help="type of the weights and the KV; default: the files'")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures with their samples")
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="default: SmolLM2-135M in bfloat16, made from GGUF"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
