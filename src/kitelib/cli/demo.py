"""`kite demo`: twelve bank customers, with and without reuse, on a model small enough for any machine."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

import anyio

from kitelib.cli.bank import QUESTIONS, SYSTEM_PROMPT
from kitelib.cli.options import (
    DEMO_MODEL,
    add_engine_options,
    engine_notes,
    open_engine,
    resolve_model,
    unusable_tiers,
)
from kitelib.cli.pool_options import pool_choice
from kitelib.cli.report import Row, comparison, from_earlier, totals
from kitelib.cli.screen import LoadProgress, WrappedWriter, answer_board, is_terminal
from kitelib.cli.table import format_seconds
from kitelib.config import KiteConfig, PoolConfig, SamplingParams
from kitelib.config_sections import default_disk_folder
from kitelib.engine.results import Generation
from kitelib.errors import BackendError

__all__ = ["add_parser", "run_demo"]

_TOGETHER = range(1, 9)
"""Indexes of the questions asked at the same moment; the first is asked alone before them, the rest after."""

_QUICK = (0, 4, 11)
"""Indexes measured without reuse by --quick: the first, one of the concurrent ones, the repeated one."""

_EXAMPLES = """\
examples:
  kite demo             about two minutes on one core, most of it for the comparison without reuse
  kite demo             again: the first customer too starts from what the run before left on the disk
  kite demo --quick     measures the side without reuse on three requests only
  kite demo --disk none keeps nothing on the disk
  kite demo --model model.gguf --threads 4"""

_INTRODUCTION = """\
A bank's assistant puts the same instructions, about 600 tokens, in front of
every customer's question. Without reuse the model reads them again for each
customer. Here they are read once. The model is tiny so that this runs anywhere,
and is often wrong: watch the times, not the answers."""

_WHAT_NEXT = """\
Next:
  kite chat smollm2                   talk to it, and see what each turn reuses
  kite run smollm2 "Name three birds."
  examples/                           the same from Python
  docs/concepts.md                    what is reused, and when it gives the same bits"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand to the command line."""
    parser = commands.add_parser(
        "demo",
        help="watch twelve customers being answered, with and without reuse",
        description=_INTRODUCTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", default=DEMO_MODEL, metavar="MODEL", help=f"path of another .gguf file (default: {DEMO_MODEL})"
    )
    parser.add_argument("--quick", action="store_true", help="measure the side without reuse on three requests only")
    parser.add_argument("--max-tokens", type=int, default=48, metavar="N", help="length of an answer (default 48)")
    add_engine_options(parser, disk_default="the user's cache folder, if no tier is named")
    parser.set_defaults(execute=run_demo)


def run_demo(args: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code.

    Raises:
        KiteError: see `kitelib.cli.main` for what becomes of it.
    """
    SamplingParams(max_tokens=args.max_tokens)
    anyio.run(_demo, args, resolve_model(args.model), pool_choice(args, default_disk=True))
    return 0


async def _demo(args: argparse.Namespace, path: str, pool: KiteConfig | PoolConfig) -> None:
    folder = (pool.to_pool_config() if isinstance(pool, KiteConfig) else pool).disk
    print(_INTRODUCTION)
    if folder is not None:
        print(f"\nWhat is computed is kept in {folder}")
    print("\nLoading the model", flush=True)
    progress = LoadProgress(sys.stdout)
    async with open_engine(args, path, progress, pool) as engine:
        progress.clear()
        for note in engine_notes(engine):
            print(f"  note: {note}")
        unusable = await unusable_tiers(engine)
        for tier, reason in unusable.items():
            print(f"  note: without the {tier} tier: {reason}")
        answers = await _ask_everyone(engine, args.max_tokens)
        fresh = await _measure_without_reuse(engine, args.max_tokens, _QUICK if args.quick else range(len(QUESTIONS)))
    rows = [
        Row(number=index + 1, question=question, generation=answer, fresh=fresh.get(index))
        for index, (question, answer) in enumerate(zip(QUESTIONS, answers, strict=True))
    ]
    print()
    print(comparison(rows))
    print()
    print(totals(rows))
    print()
    print(_WHAT_NEXT if folder is None or "disk" in unusable else _WHAT_NEXT + _disk_next(folder))


def _disk_next(folder: str) -> str:
    """What a person may want to know about the folder that the demo leaves behind."""
    option = "" if folder == default_disk_folder() else f" --disk {shlex.quote(folder)}"
    commands = {
        f"kite demo{option}": "again: its first customer starts from there",
        f"kite pool stats{option}": "what is in it",
        f"kite pool evict --all{option}": "delete it",
    }
    width = max(map(len, commands))
    lines = [f"  {command:<{width}}   {what}" for command, what in commands.items()]
    return "\n".join(["", "", f"Kept in {folder}:", *lines])


async def _ask_everyone(engine: Any, max_tokens: int) -> list[Generation]:
    """Answers in the order of the questions."""
    print("\n1. The first customer. Unless an earlier run left something, all is read, which takes some seconds.\n")
    answers = [await _ask_alone(engine, 0, max_tokens)]
    if from_earlier(answers[0]):
        print("      [an earlier run left that; with --disk none the first customer starts from nothing]")

    print("\n2. Eight customers at the same moment. They share what the first one left behind.\n")
    answers += await _ask_together(engine, _TOGETHER, max_tokens)

    print("\n3. Three more, one by one. The last asks what the first one asked, word for word.\n")
    for index in range(_TOGETHER.stop, len(QUESTIONS)):
        answers.append(await _ask_alone(engine, index, max_tokens))
    return answers


def _messages(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]


def _label(index: int) -> str:
    return f"  #{index + 1:<2}"


async def _answer(engine: Any, index: int, max_tokens: int, show: Callable[[str], None]) -> Generation:
    """Streams the answer to one question; `show` gets each new piece of text."""
    generation: Generation | None = None
    async for chunk in engine.stream(messages=_messages(QUESTIONS[index]), max_tokens=max_tokens):
        show(chunk.text)
        generation = chunk.generation
    if generation is None:
        raise BackendError("the stream ended without a result")
    return generation


async def _ask_alone(engine: Any, index: int, max_tokens: int) -> Generation:
    label = _label(index)
    indent = " " * (len(label) + 1)
    print(f"{label} {QUESTIONS[index]}", flush=True)
    writer = WrappedWriter(sys.stdout, indent)
    generation = await _answer(engine, index, max_tokens, writer.write)
    writer.close()
    print(f"{indent}{_describe(generation)}", flush=True)
    return generation


def _describe(generation: Generation) -> str:
    usage = generation.usage
    how = ", no model step before it" if generation.reuse.zero_prefill else ""
    earlier = from_earlier(generation)
    return (
        f"[{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached{f' ({earlier})' if earlier else ''}, "
        f"first token after {format_seconds(generation.timing.ttft_s)}{how}]"
    )


async def _ask_together(engine: Any, indexes: Sequence[int], max_tokens: int) -> list[Generation]:
    answers: dict[int, Generation] = {}
    with answer_board([_label(index) for index in indexes], [QUESTIONS[index] for index in indexes]) as board:

        async def ask(place: int, index: int) -> None:
            text = ""

            def show(piece: str) -> None:
                nonlocal text
                text += piece
                board.update(place, text)

            answers[index] = await _answer(engine, index, max_tokens, show)
            board.done(place, text)

        async with anyio.create_task_group() as tasks:
            for place, index in enumerate(indexes):
                tasks.start_soon(ask, place, index)
    slowest = max(answers[index].timing.ttft_s for index in indexes)
    print(f"      [every customer had a first token after at most {format_seconds(slowest)}]", flush=True)
    return [answers[index] for index in indexes]


async def _measure_without_reuse(engine: Any, max_tokens: int, indexes: Sequence[int]) -> dict[int, Generation]:
    """The same requests with reuse switched off, one at a time; index -> answer."""
    terminal = is_terminal(sys.stdout)
    which = f"all {len(QUESTIONS)}" if len(indexes) == len(QUESTIONS) else f"{len(indexes)} of the {len(QUESTIONS)}"
    print(f"\n4. For comparison, {which} requests again with reuse switched off: really run,")
    print("   one at a time. Each reads everything from the start, so this takes a while.\n", flush=True)
    no_reuse = dataclasses.replace(engine.reuse, mode="off")
    fresh: dict[int, Generation] = {}
    for count, index in enumerate(indexes, start=1):
        if terminal:
            print(f"\r\x1b[2K  request #{index + 1} ({count} of {len(indexes)}) ...", end="", flush=True)
        fresh[index] = await engine.generate(
            messages=_messages(QUESTIONS[index]), max_tokens=max_tokens, reuse=no_reuse
        )
        ttft = format_seconds(fresh[index].timing.ttft_s)
        start = "\r\x1b[2K" if terminal else ""
        print(f"{start}  request #{index + 1:<2} ({count} of {len(indexes)}): first token after {ttft}", flush=True)
    return fresh
