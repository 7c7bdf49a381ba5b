"""`kite explain`: where two prompts part, why, and what one can reuse of the other."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from typing import TYPE_CHECKING, Any, Final

from kitelib.cli.options import DEMO_MODEL, positive_count
from kitelib.cli.screen import LoadProgress, is_terminal
from kitelib.cli.table import counted
from kitelib.errors import InvalidRequestError

if TYPE_CHECKING:
    from kitelib.cli.prompts import Prompt
    from kitelib.cli.tokens import Tokens
    from kitelib.yoco.volatile import Volatile

__all__ = ["Difference", "Explanation", "Shared", "add_parser", "add_token_options", "explain", "run_explain"]

_DESCRIPTION = """\
Compare two prompts as the engine does: the first token in which they differ, what
in the text makes them differ there, and how much of B is reused once A was
computed.

A and B are texts, @file, or - for standard input. JSON with messages is a chat, as
in requests of OpenAI's API. Without --model, words stand for tokens and a chat is
"role: content" a line; with it, the model's own tokenizer and chat template are
used. No weights are loaded."""

_EXAMPLES = """\
examples:
  kite explain "It is 09:14:25. Hello" "It is 09:15:02. Hello"
  kite explain @monday.txt @tuesday.txt
  kite explain @first.json @second.json --model smollm2
  kite explain "How do I enable it?" "How do I disable it?" --json"""

_AROUND: Final = 32  # characters shown on either side of the difference
_WORD: Final = re.compile(r"\s*\S*")
_WORTH: Final = 4  # tokens more from moving parts: fewer come from how the moved text is written


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """The first difference, on one side.

    Attributes:
        token: text of the token there; None if the prompt has ended.
        before, here, after: the text around it: what both have, the differing part, what follows, with "..." where
            text was left out.
        volatile: the volatile part that stands there, if one does.
    """

    token: str | None
    before: str
    here: str
    after: str
    volatile: Volatile | None


@dataclasses.dataclass(frozen=True, slots=True)
class Shared:
    """What of B is there once A was computed, in tokens (words, without a model).

    Attributes:
        prefix: tokens that both begin with: reusable while A is still in the context.
        blocks: full blocks of these: reusable from the pool.
        block_tokens: tokens in those blocks.
    """

    prefix: int
    blocks: int
    block_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """Everything about two prompts.

    Attributes:
        unit: "tokens" or "words"; `model`: whose tokens, None for words; `block_size`: of them in a block.
        lengths: of A and B in that unit.
        token, character: index of the first that differs; None if the prompts are equal.
        a, b: the difference on both sides; None if the prompts are equal.
        signatures: level -> signatures of the two users' own parts.
        gates: what of these must not differ in two wordings of one question, but does.
        reuse: what B reuses of A; `reuse_after_moving`: with all volatile parts behind the rest; None if it is hardly
            more.
    """

    unit: str
    model: str | None
    block_size: int
    lengths: tuple[int, int]
    token: int | None
    character: int | None
    a: Difference | None
    b: Difference | None
    signatures: dict[str, tuple[str, str]]
    gates: tuple[str, ...]
    reuse: Shared
    reuse_after_moving: Shared | None


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand to the command line."""
    parser = commands.add_parser(
        "explain",
        help="why one prompt reuses nothing, or little, of another",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("a", metavar="A", help="the prompt that came first")
    parser.add_argument("b", metavar="B", help="the prompt that could reuse it")
    add_token_options(parser)
    parser.set_defaults(execute=run_explain)


def add_token_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say what prompts are counted in, and --json."""
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help=f"count in the tokens of this model: a .gguf file, a model folder, or the word {DEMO_MODEL!r}",
    )
    parser.add_argument(
        "--block-tokens",
        type=positive_count,
        metavar="N",
        help="tokens in one block (default: what the engine uses for the model, else 16)",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def run_explain(args: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code.

    Raises:
        KiteError: see `kitelib.cli.main` for what becomes of it.
    """
    from kitelib.cli.prompts import read_prompt
    from kitelib.cli.tokens import open_tokens

    if args.a == args.b == "-":
        raise InvalidRequestError("only one of A and B can be standard input; give the other as a text or as @file")
    prompts = read_prompt(args.a), read_prompt(args.b)
    progress = LoadProgress(sys.stderr, enabled=is_terminal(sys.stderr))
    with open_tokens(args.model, args.block_tokens, progress) as tokens:
        progress.clear()
        found = explain(*prompts, tokens)
    if args.json:
        print(json.dumps(dataclasses.asdict(found), ensure_ascii=False))
    else:
        print("\n".join(_report(found)))
    return 0


def explain(first: Prompt, second: Prompt, tokens: Tokens) -> Explanation:
    """Compares two prompts; what is counted, and how chats are rendered, is up to `tokens`.

    Raises:
        InvalidRequestError, UnsupportedOptionError: the model's chat template refuses a chat, or there is none.
    """
    from kitelib.yoco.canonical import normalise, signature
    from kitelib.yoco.gates import differing_gates
    from kitelib.yoco.volatile import find_volatile, move_to_end

    texts = [tokens.render(prompt) for prompt in (first, second)]
    chats = [prompt.text is None for prompt in (first, second)]
    (ids_a, text_of_a), (ids_b, text_of_b) = (
        tokens.encode(text, chat=chat) for text, chat in zip(texts, chats, strict=True)
    )
    parts = [find_volatile(text) for text in texts]
    shared = _shared(ids_a, ids_b, tokens.block_tokens)
    moved_a, moved_b = (
        tokens.encode(move_to_end(text, own), chat=chat)[0] for text, own, chat in zip(texts, parts, chats, strict=True)
    )
    after = _shared(moved_a, moved_b, tokens.block_tokens)
    equal = ids_a == ids_b
    at = common_length(*texts)
    questions = first.question, second.question
    return Explanation(
        unit=tokens.unit,
        model=tokens.model,
        block_size=tokens.block_tokens,
        lengths=(len(ids_a), len(ids_b)),
        token=None if equal else shared.prefix,
        character=None if equal else at,
        a=None if equal else _difference(texts[0], at, parts[0], len(ids_a) > shared.prefix, text_of_a, shared.prefix),
        b=None if equal else _difference(texts[1], at, parts[1], len(ids_b) > shared.prefix, text_of_b, shared.prefix),
        signatures={
            level: (signature(normalise(questions[0]), level), signature(normalise(questions[1]), level))
            for level in ("canonical", "structural")
        },
        gates=tuple(differing_gates(*questions)),
        reuse=shared,
        reuse_after_moving=after if not equal and after.prefix >= shared.prefix + _WORTH else None,
    )


def common_length(a: Any, b: Any) -> int:
    """How many of the first characters, or other items, are equal."""
    limit = min(len(a), len(b))
    low, high = 0, limit
    while low < high:  # slices compare much faster than items
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _shared(a: list[int], b: list[int], block_tokens: int) -> Shared:
    prefix = common_length(a, b)
    return Shared(prefix, prefix // block_tokens, prefix // block_tokens * block_tokens)


def _difference(text: str, at: int, parts: list[Volatile], goes_on: bool, token_text: Any, index: int) -> Difference:
    # The parts' own beginning may be common: 09:14 and 09:15 part within the time.
    volatile = next((part for part in parts if part.start <= at < part.end), None)
    if volatile is not None:
        start, end = volatile.start, volatile.end
    else:
        word = _WORD.match(text, at, at + _AROUND)
        start, end = at, word.end() if word else len(text)
    before, after = max(0, start - _AROUND), end + _AROUND
    return Difference(
        token=token_text(index) if goes_on else None,
        before=("..." if before else "") + text[before:start],
        here=text[start:end],
        after=text[end:after] + ("..." if after < len(text) else ""),
        volatile=volatile,
    )


# -- the report -----------------------------------------------------------------------------------------------------


def _report(found: Explanation) -> list[str]:
    unit = found.unit.removesuffix("s")
    first, second = (counted(length, unit) for length in found.lengths)
    name = f" of {found.model}" if found.model else ""
    lines = [f"A has {first}{name}, B has {second}; a block has {found.block_size}."]
    if found.a is None or found.b is None:
        lines.append("The prompts are equal: nothing of B is computed again.")
    else:
        lines += ["", *_difference_lines(found, found.a, found.b), "", *_cause_lines(found, found.a, found.b)]
    lines += ["", *_meaning_lines(found), "", *_reuse_lines(found)]
    return lines


def _difference_lines(found: Explanation, a: Difference, b: Difference) -> list[str]:
    unit = found.unit.removesuffix("s")
    lines = [f"First difference: {unit} {found.token:,}, character {found.character:,} (counted from 0)"]
    for name, side in (("A", a), ("B", b)):
        token = "the end" if side.token is None else repr(side.token)
        where = f"{_one_line(side.before)}[{_one_line(side.here)}]{_one_line(side.after)}"
        lines.append(f"  {name}  {unit} {token}  in  {where}")
    return lines


def _cause_lines(found: Explanation, a: Difference, b: Difference) -> list[str]:
    from kitelib.yoco.volatile import KINDS

    volatile = [(name, side.volatile) for name, side in (("A", a), ("B", b)) if side.volatile is not None]
    if not volatile:
        if found.reuse_after_moving is not None:
            return ["Cause: text of their own; volatile parts are further on."]
        return ["Cause: text of their own. No clock, id or counter stands there."]
    kinds = " or ".join(dict.fromkeys(KINDS[part.kind] for _, part in volatile))
    shown = ", ".join(f"{part.text!r} in {name}" for name, part in volatile)
    remedy = "move it behind the fixed part: to the end of the prompt, or into the last message."
    if any(part.kind == "template" for _, part in volatile):
        remedy = "fill it in; if what fills it changes with each call, move it to the end of the prompt."
    elif found.reuse_after_moving is None:
        return [f"Cause: {kinds}: {shown}. Hardly anything common stands behind it."]
    return [f"Cause: {kinds}: {shown}.", f"Remedy: {remedy}"]


def _meaning_lines(found: Explanation) -> list[str]:
    lines = ["The users' own parts:"]
    for level, (first, second) in found.signatures.items():
        if first == second:
            lines.append(f"  {level + ' signature':22}equal: {_cut(first)}")
        else:
            lines += [f"  {level + ' signature':22}A: {_cut(first)}", f"{'':24}B: {_cut(second)}"]
    return [*lines, f"  {'gates that differ':22}{', '.join(found.gates) or 'none'}"]


def _reuse_lines(found: Explanation) -> list[str]:
    total = found.lengths[1]

    def share(count: int) -> str:
        return f"{count / total:.0%}" if total else "-"

    blocks, unit = found.reuse.block_tokens, found.unit.removesuffix("s")
    lines = [
        f"Of B's {counted(total, unit)}, once A was computed:",
        f"  from the pool         {counted(found.reuse.blocks, 'full block')}, {counted(blocks, unit)} ({share(blocks)})",
        f"  from the context      {counted(found.reuse.prefix, unit)} ({share(found.reuse.prefix)}), while A is there",
    ]
    after = found.reuse_after_moving
    if after is not None:
        lines.append(
            f"  after moving          {counted(after.blocks, 'full block')}, {counted(after.block_tokens, unit)} "
            f"({share(after.block_tokens)}), with all volatile parts at the end"
        )
    return lines


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n").replace("\t", "\\t")


def _cut(text: str) -> str:
    line = _one_line(text)
    return line if len(line) <= 72 else f"{line[:69]}..."
