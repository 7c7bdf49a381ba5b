"""The benchmark of signatures and gates runs, counts what it is given, and its bounds are the known ones."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).parents[2]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TESTS / "benchmarks"))
    monkeypatch.delitem(sys.modules, "yoco_matching", raising=False)
    return importlib.import_module("yoco_matching")


def test_bounds_are_those_of_the_tables(benchmark: ModuleType) -> None:
    assert benchmark.upper_bound(0, 3100) == pytest.approx(1 - 0.05 ** (1 / 3100), rel=1e-9)
    # One-sided 95 % Clopper-Pearson bounds of 1 in 10 and 2 in 20, as printed in tables of binomial limits.
    assert benchmark.upper_bound(1, 10) == pytest.approx(0.3942, abs=1e-4)
    assert benchmark.upper_bound(2, 20) == pytest.approx(0.2826, abs=1e-4)
    assert benchmark.upper_bound(5, 5) == 1.0


def test_it_counts_what_it_is_given(benchmark: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "pairs").mkdir()
    shutil.copy(TESTS / "data" / "question_pairs.jsonl", tmp_path / "pairs" / "minimal_pairs_zh_en.jsonl")
    (tmp_path / "banking77").mkdir()
    rows = ["text,category", "How do I pay?,a", "how can i pay,a", "How to pay,b", "Where is it?,b", "where is it,b"]
    (tmp_path / "banking77" / "banking_data_test.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    output = tmp_path / "out.json"
    arguments = ["--data", str(tmp_path), "--parts", "test", "--rounds", "1", "--json", str(output)]
    assert benchmark.main(arguments) == 0
    figures = {(each["section"], each["what"]): each for each in json.loads(output.read_text("utf-8"))["figures"]}
    for matcher in ("exact text", "canonical", "structural"):
        false = figures["pairs: false matches", matcher]
        assert (false["value"], false["verdict"]) == (0, "met")
        assert "of 135" in false["note"]

    def intents(matcher: str) -> tuple[float, float]:
        section = "intents: BANKING77 test"
        across, within = f"{matcher}: equal across intents", f"{matcher}: equal within an intent"
        return figures[section, across]["value"], figures[section, within]["value"]

    assert intents("exact text") == (0, 0)
    assert intents("canonical") == (0, 1)
    assert intents("structural") == (2, 2)
