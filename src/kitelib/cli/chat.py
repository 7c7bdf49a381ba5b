"""`kite chat`: a conversation at the terminal.

The event loop, and with it the engine, lives in a second thread. The main thread reads the keyboard, so that line
editing works and Ctrl-C reaches exactly what the person is looking at: the line being typed, or the answer.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from anyio.from_thread import BlockingPortal, start_blocking_portal

from kitelib.cli.options import (
    add_engine_options,
    add_model_argument,
    add_sampling_options,
    engine_notes,
    open_engine,
    resolve_model,
    sampling_options,
    unusable_tiers,
)
from kitelib.cli.pool_options import pool_choice
from kitelib.cli.report import from_earlier
from kitelib.cli.screen import LoadProgress, dim, is_terminal
from kitelib.cli.table import format_seconds
from kitelib.config import SamplingParams
from kitelib.engine.results import Generation
from kitelib.errors import EngineClosedError, KiteError, PromptTooLongError

if TYPE_CHECKING:
    from kitelib import KiteEngine

__all__ = ["add_parser", "describe_turn", "run_chat"]

_PROMPT = "> "

_COMMANDS = """\
/reset   forget the conversation and start a new one
/stats   what the engine holds and has reused so far
/help    this list
/quit    leave (so does the end of input, Ctrl-D)
Ctrl-C stops an answer."""

_EXAMPLES = f"""\
examples:
  kite chat smollm2
  kite chat model.gguf --system "Answer in one sentence." --temperature 0.7
  kite chat model.gguf --disk ~/.cache/my-app     what one chat computed, the next one loads
  printf 'Hello\\nWhat did I just say?\\n' | kite chat smollm2

in the chat:
  {_COMMANDS.replace(chr(10), chr(10) + "  ")}

After each answer one line says how many tokens of the prompt did not have to be computed, the time to the first
token (TTFT), and the speed of the answer."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand to the command line."""
    parser = commands.add_parser(
        "chat",
        help="talk to a model",
        description="Talk to a model. Each turn computes only what is new.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message at the start of the conversation")
    add_sampling_options(parser, max_tokens=512)
    add_engine_options(parser)
    parser.set_defaults(execute=run_chat)


def run_chat(args: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code.

    Raises:
        KiteError: the model could not be opened. Errors of a single turn are printed and the chat goes on.
    """
    options = sampling_options(args)
    SamplingParams(**options)
    path = resolve_model(args.model)
    pool = pool_choice(args, default_disk=False)
    interactive = is_terminal(sys.stdin)
    progress = LoadProgress(sys.stderr, enabled=is_terminal(sys.stderr))
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(open_engine(args, path, progress, pool)) as engine,
    ):
        progress.clear()
        for tier, reason in portal.call(unusable_tiers, engine).items():
            print(f"kite: without the {tier} tier: {reason}", file=sys.stderr)
        if interactive:
            _enable_line_editing()
            for note in portal.call(engine_notes, engine):
                print(dim(f"note: {note}", sys.stdout))
            print(dim("/help lists the commands, Ctrl-D leaves.", sys.stdout))
        _converse(portal, engine, args.system, options, interactive)
    return 0


def _enable_line_editing() -> None:
    with contextlib.suppress(ImportError):  # not on Windows
        importlib.import_module("readline")  # being imported is all it takes: input() then has editing and history


def _converse(
    portal: BlockingPortal, engine: KiteEngine, system: str | None, options: dict[str, Any], interactive: bool
) -> None:
    conversation = engine.conversation(system=system)
    while (line := _read_line(interactive)) is not None:
        text = line.strip()
        if not text:
            continue
        if text == "/quit":
            return
        if text == "/reset":
            conversation = engine.conversation(system=system)
            print(dim("[a new conversation]", sys.stdout))
        elif text == "/stats":
            print(_format_stats(portal.call(engine.stats)))
        elif text == "/help":
            print(_COMMANDS)
        elif text.startswith("/"):
            print(f"{text.split()[0]} is not a command; /help lists them")
        else:
            _take_turn(portal, conversation, text, options)


def _read_line(interactive: bool) -> str | None:
    """The next line, or None at the end of the input; "" after Ctrl-C, which drops the line being typed."""
    if not interactive:
        line = sys.stdin.readline()
        if line.strip():
            # Without a terminal nobody sees what was typed; with it the transcript can be read.
            print(f"{_PROMPT}{line.rstrip()}")
        return line or None
    try:
        return input(_PROMPT)
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print(dim("  (/quit or Ctrl-D leaves)", sys.stdout))
        return ""


def _take_turn(portal: BlockingPortal, conversation: Any, text: str, options: dict[str, Any]) -> None:
    """Streams the answer to `text`. Ctrl-C stops the answer; a second one, before it has stopped, the program."""
    finished = threading.Event()
    future = portal.start_task_soon(_stream, conversation, text, options, finished)
    try:
        generation = future.result()
    except KeyboardInterrupt:
        future.cancel()
        finished.wait()
        print("\n" + dim("[stopped]", sys.stdout))
    except EngineClosedError:
        raise
    except KiteError as error:
        hint = "; /reset starts a new conversation" if isinstance(error, PromptTooLongError) else ""
        print(f"kite: {' '.join(str(error).split())}{hint}", file=sys.stderr)
    else:
        if generation is not None:
            print(dim(f"[{describe_turn(generation)}]", sys.stdout))


async def _stream(
    conversation: Any, text: str, options: dict[str, Any], finished: threading.Event
) -> Generation | None:
    generation = None
    try:
        async for chunk in conversation.stream(text, **options):
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
            generation = chunk.generation
        sys.stdout.write("\n")
        return generation
    finally:
        finished.set()


def describe_turn(generation: Generation) -> str:
    """Reuse, TTFT and decode speed of one answer, in one line."""
    usage, timing = generation.usage, generation.timing
    earlier = from_earlier(generation)
    parts = [
        f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached{f' ({earlier})' if earlier else ''}",
        f"TTFT {format_seconds(timing.ttft_s)}",
    ]
    decode_s = timing.total_s - timing.ttft_s
    # The first token belongs to the prefill; the others are what decoding produced in the remaining time.
    if usage.completion_tokens > 1 and decode_s > 0:
        parts.append(f"{(usage.completion_tokens - 1) / decode_s:.1f} tokens/s")
    return ", ".join(parts)


def _format_stats(stats: Mapping[str, Any], indent: str = "") -> str:
    lines = []
    for name, value in stats.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{name}:")
            lines.append(_format_stats(value, indent + "  "))
        else:
            lines.append(f"{indent}{name}: {value}")
    return "\n".join(lines)
