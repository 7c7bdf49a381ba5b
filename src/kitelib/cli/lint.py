"""`kite lint`: what in a log of prompts breaks reuse, and what moving it would gain."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kitelib.cli.explain import add_token_options
from kitelib.cli.options import positive_count
from kitelib.cli.screen import LoadProgress
from kitelib.cli.table import counted, format_table
from kitelib.errors import InvalidRequestError, KiteError

if TYPE_CHECKING:
    from kitelib.cli.lint_groups import Group, Groups, Totals
    from kitelib.cli.tokens import Tokens

__all__ = ["Damage", "Finding", "add_parser", "run_lint"]

_FOUND: Final = 1
_SHOWN_LINES: Final = 5
_GAIN: Final = 0.01  # of a group's tokens: less is not worth a finding

_DESCRIPTION = """\
Find what in recorded prompts breaks reuse: clocks, random ids, counters and unfilled
template expressions in front of text that many prompts share.

FILE has one prompt a line, as JSON: a string, {"prompt": ...}, {"messages": [...]},
or either of these inside {"body": ...}; - is standard input. Prompts that have most
of their text in common, or a long beginning, are one template. Each line is read,
counted and forgotten, and 128 groups of prompts are kept to compare it with, so
files may be large: the time grows with the size of the file.

"reusable now" is the share of tokens (words, without --model) that a prefix cache
without bounds would have had, in whole blocks and in the order of the file. "after
moving" is the same with the volatile parts of each prompt moved to its end, for
templates that gain by it. A clock or id that was the same in all prompts of a
template costs nothing yet: it is remarked, and nothing is found.

Exit codes: 0 nothing found, 1 something found, 2 the file or an option is wrong."""

_EXAMPLES = """\
examples:
  kite lint requests.jsonl
  kite lint requests.jsonl --model smollm2
  kite lint batch.jsonl --top 3 --json
  zcat log.jsonl.gz | kite lint -"""


@dataclasses.dataclass(frozen=True, slots=True)
class Damage:
    """Lines that hold no prompt.

    Attributes:
        count: how many.
        first: line number and reason of the first five.
    """

    count: int
    first: tuple[tuple[int, str], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One thing to change.

    Attributes:
        template: number of the template from 1; None for a prompt like no other.
        line: line of the first prompt that has it.
        kind: as in `kitelib.yoco.volatile.KINDS`.
        character: where it is in that prompt, from 0.
        text: what stands there in that prompt.
        chars_behind: characters of common text behind it.
    """

    template: int | None
    line: int
    kind: str
    character: int
    text: str
    chars_behind: int


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand to the command line."""
    parser = commands.add_parser(
        "lint",
        help="what in recorded prompts breaks reuse",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="JSON lines, one prompt a line; - for standard input")
    parser.add_argument(
        "--top", type=positive_count, default=10, metavar="N", help="show the N largest templates (default 10)"
    )
    add_token_options(parser)
    parser.set_defaults(execute=run_lint)


def run_lint(args: argparse.Namespace) -> int:
    """Runs the subcommand; returns the exit code.

    Raises:
        KiteError: see `kitelib.cli.main` for what becomes of it.
    """
    from kitelib.cli.tokens import open_tokens

    path = Path(args.file).expanduser()
    if args.file != "-" and (path.is_dir() or not path.exists()):  # said before a model is loaded; a pipe is fine
        what = "is a folder" if path.is_dir() else "does not exist"
        raise InvalidRequestError(f"{args.file!r} {what}; give a file of JSON lines, one prompt a line")
    progress = LoadProgress(sys.stderr)
    with open_tokens(args.model, args.block_tokens, progress) as tokens:
        groups, damage = _read(args.file, tokens, progress)
        progress.clear()
        found = groups.found()
    findings = list(_findings(found, groups, tokens.block_tokens))
    if args.json:
        print(json.dumps(_data(args, tokens, groups, found, findings, damage), ensure_ascii=False))
    else:
        print("\n".join(_report(args, tokens, groups, found, findings, damage)))
    return _FOUND if findings else 0


def _read(path: str, tokens: Tokens, progress: LoadProgress) -> tuple[Groups, Damage]:
    from kitelib.cli.lint_groups import Groups
    from kitelib.cli.prompts import BadLine, read_lines

    groups = Groups(tokens)
    count, first = 0, list[tuple[int, str]]()
    name = "standard input" if path == "-" else Path(path).name
    for line, part in read_lines(path):
        reason = line.reason if isinstance(line, BadLine) else None
        if not isinstance(line, BadLine):
            try:
                groups.add(line.number, tokens.render(line.prompt), chat=line.prompt.text is None)
            except InvalidRequestError as error:  # the model's template or tokenizer refuses this prompt
                reason = str(error)
        if reason is not None:
            count += 1
            if len(first) < _SHOWN_LINES:
                first.append((line.number, reason))
        if (groups.total.prompts + count) % 64 == 0:
            progress(f"Reading {name}", part)
    if not groups.total.prompts:
        raise _no_prompts(path, count, first)
    return groups, Damage(count, tuple(first))


def _no_prompts(path: str, count: int, first: Sequence[tuple[int, str]]) -> KiteError:
    what = "standard input" if path == "-" else f"the file {path!r}"
    remedy = 'give JSON lines such as {"prompt": "Hello"} or {"messages": [{"role": "user", "content": "Hello"}]}'
    if not count:
        return InvalidRequestError(f"{what} is empty; {remedy}")
    number, reason = first[0]
    return InvalidRequestError(f"{what} holds no prompt in {counted(count, 'line')}; line {number} {reason}; {remedy}")


def _findings(found: Sequence[Group], groups: Groups, block_tokens: int) -> Iterator[Finding]:
    for number, group in enumerate(found, start=1):
        template, totals = group.template, group.totals
        gap = template.first_volatile
        if gap is not None and totals.after_moving - totals.reusable >= max(block_tokens, _GAIN * totals.tokens):
            yield Finding(number, group.line, gap.kinds[0], gap.start, gap.examples[0], gap.fixed_after)
        for part in group.expressions:
            yield Finding(number, group.line, part.kind, part.start, part.text, 0)
    for line, part in groups.expressions:
        yield Finding(None, line, part.kind, part.start, part.text, 0)


# -- the report -----------------------------------------------------------------------------------------------------


def _report(
    args: argparse.Namespace,
    tokens: Tokens,
    groups: Groups,
    found: Sequence[Group],
    findings: Sequence[Finding],
    damage: Damage,
) -> list[str]:
    total, name = groups.total, f" of {tokens.model}" if tokens.model else ""
    size = counted(total.tokens, tokens.unit.removesuffix("s"))
    first = (
        f"{counted(total.prompts, 'prompt')} with {size}{name}, in blocks of {tokens.block_tokens}: "
        f"{counted(len(found), 'template')}, and {counted(groups.others.prompts, 'prompt')} like no other"
    )
    lines = [first]
    if damage.count:
        lines.append(f"{counted(damage.count, 'line')} could not be read:")
        lines += [f"  line {number} {reason}" for number, reason in damage.first]
        lines += ["  ..."] if damage.count > len(damage.first) else []
    lines += ["", _table(args.top, tokens, groups, found), ""]
    if len(found) > args.top:
        lines.append(f"{counted(len(found) - args.top, 'smaller template')} not shown; see --top.")
    if groups.cache.forgot or groups.moved_cache.forgot:
        lines.append("There were more blocks than are remembered; blocks not seen for long count as new.")
    lines += [_sentence(finding, found) for finding in findings[:_SENTENCES]]
    if len(findings) > _SENTENCES:
        lines.append(f"... and {len(findings) - _SENTENCES:,} more; see --json.")
    lines += _data_first(found[: args.top])
    constant = list(_constant(found[: args.top]))
    lines += constant
    if not findings:
        what = "that changed from prompt to prompt" if constant else "volatile"
        lines.append(f"Nothing {what} stands in front of text that prompts share.")
    return lines


_SENTENCES: Final = 20


def _table(top: int, tokens: Tokens, groups: Groups, found: Sequence[Group]) -> str:
    header = (
        "template",
        "prompts",
        f"{tokens.unit} each",
        "common chars",
        "reusable now",
        "after moving",
        "first volatile",
    )
    rows = []
    for number, group in enumerate(found[:top], start=1):
        template = group.template
        gap = template.first_volatile
        where = f"{gap.kinds[0]} at character {gap.start:,}" if gap else "-"
        rows.append((f"{number} (line {group.line})", *_cells(group.totals, f"{template.fixed_chars:,}"), where))
    if groups.others.prompts:
        rows.append(("no other", *_cells(groups.others, "-"), "-"))
    rows.append(("all", *_cells(groups.total, "-"), ""))
    return format_table(header, rows, left=(0, 6))


def _cells(totals: Totals, common: str) -> tuple[str, ...]:
    each = f"{totals.tokens / totals.prompts:,.0f}" if totals.prompts else "-"
    return (f"{totals.prompts:,}", each, common, _share(totals.reusable, totals), _share(totals.after_moving, totals))


def _share(count: int, totals: Totals) -> str:
    return f"{count / totals.tokens:.1%}" if totals.tokens else "-"


def _sentence(finding: Finding, found: Sequence[Group]) -> str:
    from kitelib.yoco.volatile import KINDS

    what = KINDS[finding.kind]  # type: ignore[index]
    where = f"line {finding.line}, character {finding.character:,}: {_shown(finding.text)!r} is {what}"
    if finding.template is not None:
        where = f"template {finding.template}, {where}"
    if not finding.chars_behind:
        return f"{where}. Fill it in, or move it to the end of the prompt if it changes with each call."
    totals = found[(finding.template or 1) - 1].totals
    return (
        f"{where}, in front of {finding.chars_behind:,} characters that its {totals.prompts:,} prompts share. Moved to "
        f"the end of the prompt, {_share(totals.after_moving, totals)} is reusable instead of "
        f"{_share(totals.reusable, totals)}."
    )


def _shown(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _constant(found: Sequence[Group]) -> Iterator[str]:
    """Remarks on the first volatile part of each template that did not change: no findings, since it costs nothing."""
    from kitelib.yoco.volatile import KINDS

    for number, group in enumerate(found, start=1):
        for part in group.template.constants[:1]:
            yield (
                f"template {number}, line {group.line}, character {part.start:,}: {_shown(part.text)!r} is "
                f"{KINDS[part.kind]}, but the same in all {group.template.num_prompts:,} prompts that were compared. If it "
                "changes later, everything behind it is new."
            )


def _data_first(found: Sequence[Group]) -> Iterator[str]:
    """Remarks on data in front of common text: nothing that a form shows to be volatile, so no findings."""
    for number, group in enumerate(found, start=1):
        template = group.template
        gap = next((gap for gap in template.gaps if not gap.volatile), None)
        if gap is not None and gap.fixed_after > template.fixed_chars / 2:
            example = repr(gap.examples[0]) if gap.examples and len(gap.examples[0]) <= 40 else "text of its own"
            yield (
                f"template {number}, line {group.line}, character {gap.start:,}: {example} stands in front of "
                f"{gap.fixed_after:,} of the {template.fixed_chars:,} characters that its prompts share; what is common "
                "should come first."
            )


def _data(
    args: argparse.Namespace,
    tokens: Tokens,
    groups: Groups,
    found: Sequence[Group],
    findings: Sequence[Finding],
    damage: Damage,
) -> dict[str, Any]:
    return {
        "unit": tokens.unit,
        "model": tokens.model,
        "block_tokens": tokens.block_tokens,
        "total": dataclasses.asdict(groups.total),
        "no_other": dataclasses.asdict(groups.others),
        "templates": [
            {
                "template": number,
                "line": group.line,
                **dataclasses.asdict(group.totals),
                "common_chars": group.template.fixed_chars,
                "gaps": [dataclasses.asdict(gap) for gap in group.template.gaps],
                "constants": [dataclasses.asdict(part) for part in group.template.constants],
            }
            for number, group in enumerate(found[: args.top], start=1)
        ],
        "templates_in_all": len(found),
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "damaged_lines": dataclasses.asdict(damage),
        "blocks_forgotten": groups.cache.forgot or groups.moved_cache.forgot,
    }
