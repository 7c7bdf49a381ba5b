"""Each way in which caches of other engines are known to have failed is shown not to happen here, by a test that names it.

A test names a report at the beginning of a sentence in its docstring or in a comment inside it: ``B21: ...`` or
``B18, B20: ...``. The numbers are those of the table below.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

TESTS: Final = Path(__file__).parents[1]

REPORTS: Final = {
    1: "after an upgrade stored blocks had another layout, were copied all the same, and answers were wrong",
    2: "a session that came back from disk got the content of another request",
    3: "values from a shared store were unpickled, so whoever could write there could run code",
    4: "a key was visible although its value had not been written, or not wholly",
    5: "many blocks or many requests at once: copying and computing raced, and tokens of other prompts appeared",
    6: "no hits between processes, because keys came from Python's randomised hash",
    7: "a load that failed was counted as done, and what was in the buffer was used",
    8: "a value for a whole block was stored under the key of a part of it",
    9: "after eviction the index still named blocks whose memory held something else by then",
    10: "two places disagreed by one about how many tokens are computed, so a full hit began with a wrong token",
    11: "a prompt that was cached as a whole crashed or lost a block, because nothing was kept for its last position",
    12: "aborted requests leaked blocks or locks, or crashed the engine, while a load was under way",
    13: "quantised KV was used with other scales, or let errors grow",
    14: "greedy answers differed between cold and warm, since kernels sum in another order for other shapes",
    15: "parts of one block were stored apart, and one of them was evicted between the look-up and the read",
    16: "an adapter that was loaded again under the same name kept serving what the old one had computed",
    17: "two adapters of one name shared KV",
    18: "after new weights the outer tiers still gave out what the old ones had computed",
    19: "two models of one name shared stored blocks",
    20: "resetting the cache reported success while one of the tiers still served it",
    21: "the disk cache was neither used nor deleted after a restart",
    22: "a salt that spelled an adapter's name shared that adapter's KV",
    23: "the outer tier's keys left out adapter, image or salt",
    24: "keys were short or not cryptographic, so collisions could be made that poison the cache",
    25: "the time to the first token told one tenant what others had asked",
    26: "the size counter only grew, so that everything was dropped in silence; or the bound was exceeded by far",
    27: "memory grew without end while a slow store was written to or read from",
    28: "a Redis tier with two keys per block, one EXISTS at a time, shifted results, no time to live, no timeouts",
    29: "loading from a slow store took longer than computing, and requests waited for it all the same",
    30: "one exception ended the thread that writes or prefetches for ever",
    31: "when the store died, half-filled buffers were used; or wrong answers followed after it had healed",
    33: "S3 failed with compatible servers, had TLS switched off, or lost its credentials",
    34: "reading from disk hung or took very long where a special path of the hardware was assumed",
    35: "the memory bound left parts out, and the process was killed",
    36: "the event loop was blocked by tokenizing, by steps, or by delivering each token",
    37: "the whole state was saved after every answer, all keys were scanned, and reading removed the entry",
    38: "the disk cache crashed on its first round trip",
    40: "a phone had no library to build with, or one of another release; the default context killed it",
    41: "models with a sliding window computed the whole prompt again on each turn",
    42: "restoring a saved state reported success and gave no reuse, because a part of the state was missing",
    43: "the chat template rewrote what had been said, so that each turn missed",
    44: "caches of prompts could not be shipped and loaded",
    47: "negated and opposite questions were taken for the same, and all questions for one entry",
    49: "losing a node of the store crashed the process, or made clients expire",
}
"""In our own words, what happened elsewhere."""

ELSEWHERE: Final = {32, 39, 45, 46, 48}
"""About parts that are not here yet: connectors to other engines, HTTP, metrics, many GPUs."""

_NAMED: Final = re.compile(r"\bB\d+(?:,\s+B\d+)*:")


def named_in(text: str) -> set[int]:
    """The numbers that a text names."""
    return {int(number) for names in _NAMED.findall(text) for number in re.findall(r"\d+", names)}


def texts_of(source: str) -> Iterator[tuple[str, str]]:
    """Each test function of a file, with its docstring and the comments inside it."""
    comments = {
        token.start[0]: token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
            inside = [text for line, text in comments.items() if node.lineno <= line <= (node.end_lineno or line)]
            yield node.name, "\n".join([ast.get_docstring(node) or "", *inside])


@pytest.fixture(scope="module")
def shown() -> dict[int, list[str]]:
    """Number of a report -> the tests that name it."""
    found: dict[int, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        if path != Path(__file__):
            for name, text in texts_of(path.read_text("utf-8")):
                for number in named_in(text):
                    found[number].append(f"{path.relative_to(TESTS)}::{name}")
    return found


@pytest.mark.parametrize("number", REPORTS)
def test_a_test_names_the_report(shown: dict[int, list[str]], number: int) -> None:
    assert shown[number], f"no test names B{number}: {REPORTS[number]}"


def test_no_test_names_a_report_that_does_not_exist(shown: dict[int, list[str]]) -> None:
    unknown = {number: tests for number, tests in shown.items() if number not in REPORTS and number not in ELSEWHERE}
    assert unknown == {}


def test_the_table_has_every_number_once() -> None:
    assert sorted({*REPORTS, *ELSEWHERE}) == list(range(1, 50))
    assert not ELSEWHERE & set(REPORTS)


def test_names_are_read_from_docstrings_and_comments_of_tests_only() -> None:
    source = '"""B1: a module."""\n\ndef helper():\n    """B2: no test."""\n\ndef test_it():\n    """B3, B4: a test; B5: and more."""\n    # B6: a comment\n    return "B7: text"\n'
    ((name, text),) = texts_of(source)
    assert name == "test_it"
    assert named_in(text) == {3, 4, 5, 6}
    assert named_in("B8 without a colon, GB10: glued, B11,\n    B12: over two lines") == {11, 12}
