"""The sections of the benchmark of drafts, and the engine that they run on."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from lite_report import Report, progress
from yoco_pairs import OFF, ON, Group, Job, Pairs, measure, speed, tokens_per_step
from yoco_texts import Deck, Texts, random_prompt

from kitelib import KiteEngine, ReusePolicy
from kitelib.engine.results import Generation
from kitelib.yoco.drafts import Asked, DraftLibrary

__all__ = ["ENGINES", "SECTIONS", "Engine", "Rig", "Sizes", "run_engine"]

_SYSTEM = (
    "You are the assistant of a bank. Answer the customer's question about cards, accounts, transfers and top-ups briefly "
    "and politely."
)
_NEVER_SLOWER = 0.98
_WARM_UP_STEPS = 24
_HISTORY_AT_ONCE = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Engine:
    """One way to run the model, and what drafts have to give there (tokens per second with over without)."""

    label: str
    backend: Literal["llama_cpp", "torch"]
    numerics: Literal["bitwise", "standard"]
    threads: int
    repeated: float
    unseen: float


ENGINES = {
    "llama_cpp": Engine("llama.cpp, bitwise", "llama_cpp", "bitwise", 1, 1.5, _NEVER_SLOWER),
    "torch": Engine("torch, bitwise", "torch", "bitwise", 2, 2.0, 1.4),
    "torch-standard": Engine("torch, standard", "torch", "standard", 2, 2.0, 1.4),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured.

    Attributes:
        seen: questions answered before anything is measured.
        new_tokens: most tokens of an answer.
        together: requests at once in the second block.
        most: groups of a measurement of single requests, at most.
        most_together: the same for requests put together.
        least: groups that are measured however long they take.
        limits_s: seconds for a measurement, by section; "together" is for those of requests put together.
    """

    seen: int = 200
    new_tokens: int = 48
    together: int = 8
    most: int = 24
    most_together: int = 4
    least: int = 2
    limits_s: dict[str, float] = dataclasses.field(
        default_factory=lambda: {"repeated": 8.0, "unseen": 24.0, "dialogue": 14.0, "random": 14.0, "together": 5.0}
    )

    @classmethod
    def quick(cls) -> Sizes:
        """For checking that the benchmark works, not for quoting."""
        return cls(seen=8, new_tokens=12, most=2, most_together=1)


@dataclasses.dataclass(slots=True)
class Rig:
    """One run of one engine.

    Attributes:
        facts: what is known of the engine, for people.
        pairs: samples by section and measurement, for JSON.
        failed: a section ended with an error.
        known: prompts and answers of the questions seen, as token ids.
    """

    engine: Engine
    model: Path
    threads: int
    sizes: Sizes
    texts: Texts
    temperatures: Sequence[float]
    report: Report
    sections: Sequence[str]
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    pairs: dict[str, Any] = dataclasses.field(default_factory=dict)
    failed: bool = False
    known: list[tuple[list[int], list[int]]] = dataclasses.field(default_factory=list)
    draw: random.Random = dataclasses.field(default_factory=lambda: random.Random(17))
    seen: Deck[str] = dataclasses.field(init=False)
    unseen: Deck[str] = dataclasses.field(init=False)
    dialogues: Deck[tuple[str, ...]] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        hands = len(self.temperatures) * len(self.blocks)
        self.seen, self.unseen = Deck(self.texts.seen, hands), Deck(self.texts.unseen, hands)
        self.dialogues = Deck(self.texts.dialogues, len(self.temperatures))

    @property
    def blocks(self) -> tuple[int, ...]:
        """Requests at once."""
        return (1,) if self.sizes.together == 1 else (1, self.sizes.together)

    def options(self, temperature: float) -> dict[str, Any]:
        """Sampling options of one request; a seed if it needs one."""
        seed = {"seed": self.draw.getrandbits(32)} if temperature else {}
        return {"max_tokens": self.sizes.new_tokens, "temperature": temperature, **seed}

    def most(self, size: int) -> int:
        """Requests of a measurement at most."""
        return self.sizes.most if size == 1 else size * self.sizes.most_together

    def section(self, name: str) -> str:
        """As the table calls it."""
        return f"{self.engine.label}: {name}"


# Requests


def question(engine: KiteEngine, text: str, options: dict[str, Any]) -> Job:
    """A customer's question to the bank's assistant."""
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": text}]

    async def put(policy: ReusePolicy, **others: Any) -> list[Generation]:
        return [await engine.generate(messages=messages, reuse=policy, **{**options, **others})]

    return put


def dialogue(engine: KiteEngine, turns: Sequence[str], options: dict[str, Any]) -> Job:
    """The turns of a conversation."""

    async def put(policy: ReusePolicy, **others: Any) -> list[Generation]:
        conversation = engine.conversation(reuse=policy, **{**options, **others})
        return [await conversation.send(turn) for turn in turns]

    return put


def tokens(engine: KiteEngine, prompt: list[int], options: dict[str, Any]) -> Job:
    """A prompt of token ids, whose answer goes on to the full length."""

    async def put(policy: ReusePolicy, **others: Any) -> list[Generation]:
        return [await engine.generate(prompt, reuse=policy, ignore_eos=True, **{**options, **others})]

    return put


def grouped(jobs: Sequence[Job], size: int) -> list[Group]:
    """Jobs put `size` at a time; what is left over is left out, unless there is nothing else."""
    groups = [Group(jobs[at : at + size]) for at in range(0, len(jobs), size)]
    return [group for group in groups if len(group.jobs) == len(groups[0].jobs)]


# Sections


async def repeated(rig: Rig, engine: KiteEngine) -> None:
    """Questions asked again."""
    for temperature, size in in_turn(rig):
        texts = rig.seen.deal(rig.most(size))
        groups = grouped([question(engine, text, rig.options(temperature)) for text in texts], size)
        if temperature:  # what was asked before was answered greedily
            groups = [Group(group.jobs, before=group.jobs) for group in groups]
        note = ", same seed" if temperature else ""
        await compare(rig, engine, "repeated", temperature, groups, rig.engine.repeated, note)
        if temperature and size == 1:
            others = grouped([question(engine, text, rig.options(temperature)) for text in texts], size)
            await compare(rig, engine, "repeated", temperature, others, _NEVER_SLOWER, ", another seed")


async def unseen(rig: Rig, engine: KiteEngine) -> None:
    """Questions never asked before; and what proposing drafts for them takes."""
    for temperature, size in in_turn(rig):
        texts = rig.unseen.deal(rig.most(size))
        groups = grouped([question(engine, text, rig.options(temperature)) for text in texts], size)
        pairs = await compare(rig, engine, "unseen", temperature, groups, rig.engine.unseen)
        if size == 1 and not temperature:
            proposing(rig, "unseen", pairs)


async def dialogues(rig: Rig, engine: KiteEngine) -> None:
    """Two turns about anything."""
    for temperature in rig.temperatures:
        turns = rig.dialogues.deal(rig.sizes.most)
        # The second prompt hangs on the first answer, so prompts can't be computed beforehand.
        jobs = [dialogue(engine, each, rig.options(temperature)) for each in turns]
        groups = [Group([job], warm=False) for job in jobs]
        await compare(rig, engine, "dialogue", temperature, groups, _NEVER_SLOWER)


async def random_text(rig: Rig, engine: KiteEngine) -> None:
    """Nothing to guess; and what trying takes."""
    for temperature, size in in_turn(rig):
        prompts = [random_prompt(rig.draw) for _ in range(rig.most(size))]
        groups = grouped([tokens(engine, prompt, rig.options(temperature)) for prompt in prompts], size)
        pairs = await compare(rig, engine, "random", temperature, groups, _NEVER_SLOWER)
        if size == 1 and temperature == max(rig.temperatures):
            proposing(rig, "random", pairs)


async def completions(rig: Rig, engine: KiteEngine) -> None:
    """The same request again, computed and from what is stored."""
    stored = ReusePolicy(completions=True)
    computed: list[float] = []
    given: list[float] = []
    without_steps = []
    for text in rig.texts.seen[:2]:
        job = question(engine, text, rig.options(0.0))
        computed += [(await job(OFF))[0].timing.total_s for _ in range(2)]
        await job(stored)
        await engine.flush()
        before = engine.stats()["steps"]
        found = [(await job(stored))[0] for _ in range(3)]
        without_steps.append(engine.stats()["steps"] == before and all(each.reuse.completion for each in found))
        given += [each.timing.total_s for each in found]
    name = rig.section("stored answer")
    plain = rig.report.add(name, "latency of an answer, computed without drafts", computed)
    mine = rig.report.add(name, "latency of the same answer, stored", given)
    rig.report.judge(name, "stored to computed", mine / plain, 1.0)
    missed = float(len(without_steps) - sum(without_steps))
    rig.report.judge(name, "answers that took a model step all the same", missed, 0.0, "")


SECTIONS: dict[str, Callable[[Rig, KiteEngine], Awaitable[None]]] = {
    "repeated": repeated,
    "unseen": unseen,
    "dialogue": dialogues,
    "random": random_text,
    "completions": completions,
}


def in_turn(rig: Rig) -> list[tuple[float, int]]:
    """Each temperature with each number of requests at once."""
    return [(temperature, size) for temperature in rig.temperatures for size in rig.blocks]


async def compare(
    rig: Rig, engine: KiteEngine, name: str, temperature: float, groups: Sequence[Group], bound: float, note: str = ""
) -> Pairs:
    """Measures groups with both arms and adds the lines that say so."""
    size, sizes = len(groups[0].jobs), rig.sizes
    limit_s = sizes.limits_s[name if size == 1 else "together"]
    pairs = await measure(engine, groups, limit_s, sizes.least)
    at_once = "one at a time" if size == 1 else f"{size} at once"
    what, section = f"temperature {temperature:g}, {at_once}{note}", rig.section(name)
    rig.pairs[f"{name}, {what}"] = pairs.plain()
    for arm, samples in (("without drafts", pairs.off), ("with drafts", pairs.on)):
        note_of_arm = f"{tokens_per_step(samples):.2f} tokens a step, {len(samples)} groups"
        rig.report.add(section, f"{what}: {arm}", [speed(samples)], "tok/s", note_of_arm)
    sources = ", ".join(f"{source} {accepted}/{given}" for source, (given, accepted) in sorted(pairs.drafts.items()))
    told = f"{_bounds(pairs)}; accepted: {sources or 'none proposed'}; same text {pairs.same}/{pairs.answers}"
    target = bound if size == 1 else _NEVER_SLOWER
    rig.report.judge(section, f"{what}: with over without", pairs.ratio, target, at_least=True, note=told)
    return pairs


def _bounds(pairs: Pairs) -> str:
    low, high = pairs.interval()
    bounds = f"95 %: {low:.2f} to {high:.2f}, " if len(pairs.on) > 2 else ""
    return f"{bounds}by CPU time {pairs.cpu_ratio:.2f}"


def proposing(rig: Rig, name: str, pairs: Pairs) -> None:
    """Adds what proposing takes per token of these answers, with all seen questions known. No model takes part."""
    library, root = DraftLibrary(), b"benchmark"
    for number, (_, answer) in enumerate(rig.known):
        library.add(root, Asked((), number.to_bytes(8, "little")), answer)
        library.work(len(answer))
    samples = []
    for prompt, answer in pairs.texts:
        drafter = library.drafter(root, prompt, Asked((), b"new"))
        begun = time.thread_time()
        for token in answer:
            drafter.propose(rig.sizes.new_tokens)
            drafter.advance(token)
        samples.append((time.thread_time() - begun) / max(1, len(answer)) * 1e6)
    note = f"{len(rig.known)} answers known; decoding takes {1e6 / speed(pairs.off):.0f} us a token without drafts"
    rig.report.add(rig.section(name), "CPU time to propose, per token", samples, "us", note)


# The engine


async def run_engine(rig: Rig) -> None:
    """Opens the engine, has it answer what counts as seen, and runs the sections."""
    options: dict[str, Any] = {"backend": rig.engine.backend, "threads": rig.threads}
    async with KiteEngine.open(rig.model, reuse=ReusePolicy(numerics=rig.engine.numerics), **options) as engine:
        await get_ready(rig, engine)
        await history(rig, engine)
        for name in rig.sections:
            progress(f"{rig.engine.label}: {name}")
            try:
                await SECTIONS[name](rig, engine)
            except Exception as error:  # noqa: BLE001 - whatever goes wrong in one leaves the others alone
                traceback.print_exc()
                rig.report.missing(rig.section(name), "section failed", repr(error)[:120])
                rig.failed = True
        rig.facts["drafts"] = engine.stats()["drafts"]


async def get_ready(rig: Rig, engine: KiteEngine) -> None:
    """Waits for the compiled program, if there will be one, and touches all weights."""
    told = False
    while engine.stats().get("compiled") == "compiling":
        if not told:
            progress("compiling the decode step, if the cache does not have it (a minute or two on an idle machine)")
            told = True
        await asyncio.sleep(0.5)
    await engine.generate(random_prompt(rig.draw), max_tokens=_WARM_UP_STEPS, ignore_eos=True, reuse=OFF)
    stats = engine.stats()
    rig.facts |= {"model": stats["model"], "threads": rig.threads, "numerics": stats["numerics"]}
    if rig.engine.backend == "torch":
        rig.facts["compiled"] = stats["compiled"]


async def history(rig: Rig, engine: KiteEngine) -> None:
    """Answers the questions that count as seen, some at once, greedily and with drafts."""
    begun, total = time.perf_counter(), 0
    for at in range(0, len(rig.texts.seen), _HISTORY_AT_ONCE):
        texts = rig.texts.seen[at : at + _HISTORY_AT_ONCE]
        found = await asyncio.gather(*(question(engine, text, rig.options(0.0))(ON) for text in texts))
        rig.known += [(gen.prompt_token_ids, gen.token_ids) for (gen,) in found]
        total += sum(len(gen.token_ids) for (gen,) in found)
        progress(f"  {at + len(texts)} of {len(rig.texts.seen)} questions answered")
    await engine.flush()
    rate = total / (time.perf_counter() - begun)
    note = f"{len(rig.texts.seen)} questions, {_HISTORY_AT_ONCE} at once, {rig.engine.label}; prompts included"
    rig.report.add(rig.section("questions seen"), "answering them, with drafts", [rate], "tok/s", note)
