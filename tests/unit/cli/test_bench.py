"""`kite bench replay`: the figures against slow, obvious models, and what becomes of wrong files."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitelib.cli.main import main
from kitelib.cli.replay import (
    Trace,
    hits_of_belady,
    hits_of_infinite,
    hits_of_lru,
    read_trace,
    stand_ins,
)
from kitelib.cli.replay import (
    hits_of_store as hits_of_items,
)
from kitelib.errors import InvalidRequestError, MissingExtraError

EXTRACT = Path(__file__).parents[2] / "data" / "mooncake" / "conversation_400.jsonl"


def hits_of_store(trace: Trace, capacity: int, ttl_s: float | None = None) -> int:
    return hits_of_items(trace, stand_ins(trace), capacity, ttl_s=ttl_s)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return read_trace(EXTRACT, 512)


def written(path: Path, prompts: list[list[int]], *, every_ms: int = 1000) -> Path:
    lines = [
        json.dumps({"timestamp": every_ms * index, "input_length": 4 * len(ids), "output_length": 1, "hash_ids": ids})
        for index, ids in enumerate(prompts)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_extract_is_what_it_was(trace):
    assert (len(trace.requests), trace.num_blocks, trace.num_distinct) == (400, 11349, 9821)
    assert hits_of_infinite(trace) == 1528


def test_with_room_for_all_everything_hits_what_can(trace):
    for hits in (hits_of_store, hits_of_lru, hits_of_belady):
        assert hits(trace, trace.num_distinct) == hits_of_infinite(trace)


@pytest.mark.parametrize("capacity", [98, 982, 2455, 4910])
def test_between_lru_and_the_optimum(trace, capacity):
    """Eviction better than LRU: with real prompts, at every size, and never better than knowing the future."""
    assert hits_of_lru(trace, capacity) <= hits_of_store(trace, capacity) <= hits_of_belady(trace, capacity)
    assert hits_of_belady(trace, capacity) <= hits_of_infinite(trace)


def test_what_comes_back_is_kept_although_a_flood_passes_before(tmp_path):
    """Twenty conversations come back every 40 s; between two turns 500 blocks pass, but only 200 fit."""
    prompts = []
    for turn in range(200):
        first = 5 * (turn % 20)
        prompts.append(list(range(first, first + 5)))
        prompts.append(list(range(1000 + 20 * turn, 1020 + 20 * turn)))
    trace = read_trace(written(tmp_path / "t.jsonl", prompts), 4)
    assert hits_of_lru(trace, 200) == 0
    assert hits_of_belady(trace, 200) == 900
    assert hits_of_store(trace, 200) > 0.5 * 900


def test_time_to_live_is_that_of_the_trace(trace):
    everything = trace.num_distinct
    at_once = hits_of_store(trace, everything, ttl_s=0.001)
    assert at_once < hits_of_store(trace, everything, ttl_s=60) < hits_of_store(trace, everything)


def best_possible(prompts: list[tuple[int, ...]], capacity: int) -> int:
    """The most hits of leading runs that any sequence of choices of what to hold can give; by trying all."""
    states = {frozenset[int](): 0}
    for prompt in prompts:
        reached: dict[frozenset[int], int] = {}
        for held, hits in states.items():
            run = len(list(itertools.takewhile(held.__contains__, prompt)))
            pool = held | set(prompt)
            for size in range(min(capacity, len(pool)) + 1):
                for kept in itertools.combinations(sorted(pool), size):
                    state = frozenset(kept)
                    reached[state] = max(reached.get(state, 0), hits + run)
        states = reached
    return max(states.values())


# Prompts over a small tree: block 0 starts all, 1 and 2 go on from it, and so on.
PATHS = [(0,), (0, 1), (0, 2), (0, 1, 3), (0, 1, 4), (0, 2, 5), (6,), (6, 7)]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from(PATHS), min_size=1, max_size=7), st.integers(1, 3))
def test_belady_is_the_optimum_also_for_leading_runs(tmp_path_factory, prompts, capacity):
    path = written(tmp_path_factory.mktemp("traces") / "t.jsonl", [list(prompt) for prompt in prompts])
    trace = read_trace(path, 4)
    assert hits_of_belady(trace, capacity) == best_possible(prompts, capacity)
    assert hits_of_store(trace, capacity) <= hits_of_belady(trace, capacity)
    assert hits_of_lru(trace, capacity) <= hits_of_belady(trace, capacity)


def test_a_miss_ends_the_run(tmp_path):
    # Two blocks fit. The second prompt pushes block 10 out, so that 11 and 12 don't count although they may be there.
    trace = read_trace(written(tmp_path / "t.jsonl", [[10, 11, 12], [20], [10, 11, 12]]), 4)
    assert hits_of_lru(trace, 3) == 0
    assert hits_of_belady(trace, 3) == 3


def test_the_command_prints_draws_and_writes(capsys, tmp_path):
    png, out = tmp_path / "hits.png", tmp_path / "hits.json"
    options = ["--capacity", "10%,2000", "--requests", "300", "--png", str(png), "--json", str(out)]
    code = main(["bench", "replay", str(EXTRACT), *options])
    printed = capsys.readouterr()
    assert code == 0
    assert "300 requests" in printed.out
    for title in ("KITE", "LRU", "Belady", "infinite", "unbroken"):
        assert title in printed.out
    assert "Belady ..." in printed.err  # progress, a line per stage where nobody watches
    assert png.read_bytes().startswith(b"\x89PNG")
    report = json.loads(out.read_text())
    trace = read_trace(EXTRACT, 512, max_requests=300)
    assert report["blocks"] == trace.num_blocks
    assert [row["capacity"] for row in report["results"]] == [trace.num_distinct // 10, 2000]
    assert report["results"][1]["lru"] == hits_of_lru(trace, 2000)
    assert report["results"][1]["kite"] == hits_of_store(trace, 2000)


GOOD = '{"timestamp": 5, "input_length": 8, "output_length": 1, "hash_ids": [0, 1]}'


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("\udcff", "UTF-8"),
        ("[1]", "list"),
        ("[" * 100_000, "recursion"),
        ('{"timestamp": "now", "input_length": 4, "hash_ids": [0]}', "timestamp is 'now'"),
        ('{"timestamp": NaN, "input_length": 4, "hash_ids": [0]}', "timestamp is nan"),
        ('{"timestamp": 6, "hash_ids": [0]}', "input_length is None"),
        ('{"timestamp": 6, "input_length": 4, "hash_ids": ["0"]}', "whole numbers"),
        ('{"timestamp": 6, "input_length": 8, "hash_ids": [0, 0]}', "twice"),
        ('{"timestamp": 6, "input_length": 9, "hash_ids": [0, 1]}', "--block-tokens"),
        ('{"timestamp": 6, "input_length": 4, "hash_ids": [1]}', "after another block"),
        ('{"timestamp": 1, "input_length": 4, "hash_ids": [0]}', "earlier"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, words):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(f"{GOOD}\n\n{line}\n".encode(errors="surrogateescape"))
    with pytest.raises(InvalidRequestError) as caught:
        read_trace(path, 4)
    assert "line 3 of" in str(caught.value)
    assert words in str(caught.value)


def test_files_that_are_no_traces(tmp_path, capsys):
    (tmp_path / "empty").write_text("\n")
    assert main(["bench", "replay", str(tmp_path / "empty")]) == 2
    assert main(["bench", "replay", str(tmp_path / "nothing")]) == 2
    assert main(["bench", "replay", str(tmp_path)]) == 2
    errors = capsys.readouterr().err
    assert "holds no block" in errors
    assert "No such file" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    "option",
    [
        "--capacity=0%",
        "--capacity=101%",
        "--capacity=5,,6",
        "--ttl=0",
        "--ttl=nan",
        "--requests=0",
        "--block-tokens=-1",
    ],
)
def test_wrong_options_are_refused(option, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "replay", str(EXTRACT), option])
    assert option.partition("=")[0] in capsys.readouterr().err


def test_a_missing_plot_library_is_named_before_the_work(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code = main(["bench", "replay", str(EXTRACT), "--png", str(tmp_path / "x.png")])
    printed = capsys.readouterr()
    assert code == 2
    assert "kitelib[plot]" in printed.err
    assert not printed.out
    assert issubclass(MissingExtraError, ImportError)


@pytest.mark.parametrize("arguments", [["bench"], ["bench", "replay"]])
def test_help_has_examples(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert "kite bench replay" in shown.partition("examples:")[2]
