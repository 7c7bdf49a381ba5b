"""A cockpit assistant that runs offline and answers its first command as fast as its thousandth.

Run: python examples/vehicle/assistant.py                   asks for commands, one a line
     python examples/vehicle/assistant.py --measure         the time to the first token, with the bundle and without
     (sh examples/vehicle/build.sh makes the bundle first)
"""

import argparse
import asyncio
import statistics
import sys
from pathlib import Path

from cockpit import MAX_TOKENS, commands, messages

from kitelib import BundleError, ConfigError, Generation, KiteEngine, MissingExtraError, PoolConfig, ReusePolicy
from kitelib.cli.options import resolve_model
from kitelib.cli.table import format_table

BUILD = Path(__file__).parent / "build"
NEW = [
    "I am freezing.",
    "前面堵车了，换一条路。",
    "Call my sister and say that I will be late.",
    "给后排的孩子放一个故事。",
    "Is there a bakery on the way?",
    "黄色的发动机灯亮了，怎么办？",
]
"""Commands that nobody thought of when the bundle was built."""
NOT_LOADED = (BundleError, MissingExtraError, ConfigError, OSError)
"""No bundle or a bad one, no package to check its signature with, no key or a bad one."""


def open_engine(options: argparse.Namespace):
    return KiteEngine.open(
        resolve_model(options.model),
        # completions: a command that is in the bundle gets the answer that is there, without a model step. Answers don't
        # depend on chance here (temperature 0), and nothing that changes is in the prompt, so none is out of date.
        reuse=ReusePolicy(numerics=options.numerics, completions=True),
        n_ctx=1024,  # the prompt, a command and its answer
        max_sequences=2,  # driver and passenger
        threads=options.threads,
        pool=PoolConfig(memory_bytes=32 * 2**20),  # what was asked on this trip; no folder, so nothing is written
        cache_dir=options.cache,
    )


async def load(engine: KiteEngine, options: argparse.Namespace) -> dict:
    """Maps the bundle, if the fleet's key has signed it."""
    key = options.trusted_key.read_text(encoding="ascii").strip()
    return await engine.preload(options.bundle, require_signature=True, trusted_keys=[key])


async def ask(engine: KiteEngine, command: str, reuse: ReusePolicy | None = None) -> Generation:
    return await engine.chat(messages(command), max_tokens=MAX_TOKENS, reuse=reuse)


# Driving


async def drive(options: argparse.Namespace) -> None:
    async with open_engine(options) as engine:
        loaded = await load_if_good(engine, options)
        while line := await asyncio.to_thread(sys.stdin.readline):
            if version(options.bundle) != loaded:  # an update over the air
                loaded = await load_if_good(engine, options)
            if line.strip():
                answer = await ask(engine, line)
                print(f"{answer.text.strip()}\n[{told(answer)}]", flush=True)


async def load_if_good(engine: KiteEngine, options: argparse.Namespace) -> tuple[int, int] | None:
    """A car drives on whatever is wrong with a bundle: with the one before, or with none. Then the first answers come
    later, and may have other words where two are almost equally likely. Returns the version that was looked at."""
    found = version(options.bundle)
    try:
        loaded = await load(engine, options)
    except NOT_LOADED as error:
        print(f"[not loaded: {error}]", flush=True)
    else:
        megabytes = loaded["bytes"] / 1e6
        print(f"[{loaded['units']} units mapped, {megabytes:.1f} MB, signed by {loaded['signer'][:8]}]", flush=True)
    return found


def version(bundle: Path) -> tuple[int, int] | None:
    """Changes when an update puts a new bundle in place of the old one."""
    try:
        status = bundle.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def told(answer: Generation) -> str:
    known = "a known command, " if answer.reuse.completion else ""
    used = answer.usage
    return (
        f"{known}{used.cached_tokens} of {used.prompt_tokens} prompt tokens reused, "
        f"first token after {answer.timing.ttft_s * 1000:.1f} ms"
    )


# Measuring


async def measure(options: argparse.Namespace) -> str | None:
    """Each command is the first one after the start of an engine, and then asked again with nothing reused. Returns what
    is wrong, if nothing could be measured."""
    known = commands()[:: max(1, len(commands()) // options.measure)][: options.measure]
    rows, times = [], {"known": [], "new": []}
    for kind, command in [("known", each) for each in known] + [("new", each) for each in NEW[: options.measure]]:
        async with open_engine(options) as engine:
            try:
                await load(engine, options)
            except NOT_LOADED as error:
                return f"nothing was measured, since there is no bundle to measure with: {error}"
            before = engine.stats()["steps"]
            warm = await ask(engine, command)
            steps = engine.stats()["steps"] - before
            cold = await ask(engine, command, ReusePolicy(mode="off"))
        rows.append(row(kind, command, warm, cold, steps))
        times[kind].append((warm.timing.ttft_s, cold.timing.ttft_s))
        print(f"{kind}: {command}", file=sys.stderr)
    print(format_table(HEADER, rows, left=(0, 7)))
    for kind, pairs in times.items():
        warm, cold = (1000 * statistics.median(side) for side in zip(*pairs, strict=True))
        print(
            f"median of {kind} commands: {warm:.1f} ms with the bundle, {cold:.0f} ms without, {cold / warm:.0f} times"
        )
    return None


HEADER = ("", "TTFT, ms", "without", "cached", "prompt tokens", "model steps", "answer", "command")


def row(kind: str, command: str, warm: Generation, cold: Generation, steps: int) -> tuple[str, ...]:
    return (
        kind,
        f"{warm.timing.ttft_s * 1000:.1f}",
        f"{cold.timing.ttft_s * 1000:.0f}",
        str(warm.usage.cached_tokens),
        str(warm.usage.prompt_tokens),
        str(steps),
        "same" if warm.token_ids == cold.token_ids else "differs",
        command,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="smollm2", help="a .gguf file (default: the small model of the extra `demo`)"
    )
    parser.add_argument("--bundle", type=Path, default=BUILD / "cockpit.kite", help="the bundle (default: %(default)s)")
    parser.add_argument(
        "--trusted-key", type=Path, default=BUILD / "fleet.pub", help="file with the public key of the fleet"
    )
    parser.add_argument(
        "--numerics",
        choices=("standard", "bitwise"),
        default="standard",
        help="those of the bundle: standard fits any processor (default), bitwise only the one that it was built on",
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of a model step (default: 1)")
    parser.add_argument("--cache", type=Path, help="folder for the model's digest (default: the user's cache folder)")
    parser.add_argument(
        "--measure", type=int, nargs="?", const=4, metavar="N", help="measure N known and N new commands (default: 4)"
    )
    options = parser.parse_args()
    sys.exit(asyncio.run(drive(options) if options.measure is None else measure(options)))


if __name__ == "__main__":
    main()
