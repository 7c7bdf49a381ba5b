"""`kite run`: one prompt, one streamed answer."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

import anyio

from kitelib.cli.options import (
    add_engine_options,
    add_model_argument,
    add_sampling_options,
    open_engine,
    resolve_model,
    sampling_options,
    unusable_tiers,
)
from kitelib.cli.pool_options import pool_choice
from kitelib.cli.screen import LoadProgress, is_terminal
from kitelib.config import KiteConfig, PoolConfig, SamplingParams
from kitelib.engine.results import Generation
from kitelib.errors import BackendError, ConfigError, EmptyPromptError, UnsupportedOptionError

__all__ = ["add_parser", "generation_stats", "run_prompt"]

_EXAMPLES = """\
examples:
  kite run smollm2 "Name three birds."
  kite run model.gguf "Write a haiku." --temperature 0.8 --seed 7
  kite run model.gguf "Is this spam?" --system "Answer yes or no." --max-tokens 3
  kite run model.gguf --raw "Once upon a time"
  kite run smollm2 "Name three birds." --disk ~/.cache/my-app     a second run starts from what this one left
  cat letter.txt | kite run model.gguf - --json-stats > answer.txt

The answer goes to standard output, everything else to standard error."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand to the command line."""
    parser = commands.add_parser(
        "run",
        help="answer one prompt",
        description="Answer one prompt and stream the answer.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_argument(parser)
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt; - reads it from standard input")
    parser.add_argument("--system", metavar="TEXT", help="system message in front of the prompt")
    parser.add_argument("--raw", action="store_true", help="continue PROMPT as plain text, without a chat template")
    parser.add_argument(
        "--json-stats", action="store_true", help="print one line of JSON on standard error: tokens, reuse, times"
    )
    parser.add_argument("--quiet", action="store_true", help="do not show progress while loading")
    add_sampling_options(parser, max_tokens=256)
    add_engine_options(parser)
    parser.set_defaults(execute=run_prompt)


def run_prompt(args: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code.

    Raises:
        KiteError: see `kitelib.cli.main` for what becomes of it.
    """
    # Everything that can be refused is refused before the model is loaded, which may take long.
    options = sampling_options(args)
    SamplingParams(**options)
    if args.raw and args.system:
        raise ConfigError("--raw and --system exclude each other; put the instructions into the prompt")
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt.strip():
        raise EmptyPromptError("the prompt is empty; give some text")
    pool = pool_choice(args, default_disk=False)
    generation = anyio.run(_answer, args, resolve_model(args.model), pool, prompt, options)
    if args.json_stats:
        print(json.dumps(generation_stats(generation)), file=sys.stderr)
    return 0


async def _answer(
    args: argparse.Namespace, path: str, pool: KiteConfig | PoolConfig, prompt: str, options: dict[str, Any]
) -> Generation:
    progress = LoadProgress(sys.stderr, enabled=is_terminal(sys.stderr) and not args.quiet)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    messages.append({"role": "user", "content": prompt})
    text, chat = (prompt, None) if args.raw else (None, messages)
    generation: Generation | None = None
    async with open_engine(args, path, progress, pool) as engine:
        progress.clear()
        if not args.json_stats:  # of which nothing but the JSON is expected there
            for tier, reason in (await unusable_tiers(engine)).items():
                print(f"kite: without the {tier} tier: {reason}", file=sys.stderr)
        try:
            async for chunk in engine.stream(text, messages=chat, **options):
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
                generation = chunk.generation
        except UnsupportedOptionError as error:
            if args.raw:
                raise
            raise ConfigError(f"{error}; --raw continues the prompt as plain text instead") from error
        sys.stdout.write("\n")
    if generation is None:
        raise BackendError("the stream ended without a result")
    return generation


def generation_stats(generation: Generation) -> dict[str, Any]:
    """The figures of one answer as plain data, without its text."""
    return {
        "finish_reason": generation.finish_reason,
        "usage": dataclasses.asdict(generation.usage),
        "reuse": dataclasses.asdict(generation.reuse),
        "timing": dataclasses.asdict(generation.timing),
    }
