"""The benchmark of drafts (`make bench-yoco`): what it measures, and a short run of it on each backend."""

from __future__ import annotations

import csv
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.backends import BackendKit

_ROOT = Path(__file__).resolve().parents[3]
_BENCHMARKS = _ROOT / "tests" / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(_BENCHMARKS))


def _run(kit: BackendKit, report: Path, *options: str) -> dict[str, Any]:
    model = "--gguf" if kit.name == "llama_cpp" else "--torch-model"
    command = [str(_BENCHMARKS / "yoco.py"), "--quick", "--threads", "1", "--engines", kit.name]
    done = subprocess.run(
        [sys.executable, *command, model, str(kit.text()), "--json", str(report), *options],
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "targets met" in done.stdout
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def _pairs(found: dict[str, Any]) -> dict[str, Any]:
    (engine,) = found["host"]["engines"].values()
    pairs: dict[str, Any] = engine["pairs"]
    return pairs


def test_repeated_questions_and_stored_answers(kit: BackendKit, tmp_path: Path) -> None:
    """Greedy drafts from the same prompt are all accepted, and a stored answer takes no step."""
    found = _run(
        kit, tmp_path / "yoco.json", "--only", "repeated,completions", "--temperatures", "0", "--together", "1"
    )
    (pairs,) = _pairs(found).values()
    proposed, accepted = pairs["drafts"]["same prompt"]
    assert proposed == accepted > 0
    assert pairs["same"] == pairs["answers"] == 2
    assert sum(each["steps"] for each in pairs["on"]) < sum(each["steps"] for each in pairs["off"])
    figures = {figure["what"]: figure for figure in found["figures"]}
    assert figures["temperature 0, one at a time: with over without"]["value"] > 0
    assert figures["answers that took a model step all the same"]["value"] == 0


@pytest.mark.parametrize(
    "kit", ["torch"], indirect=True
)  # the sections are the same on both, and SmolLM2 takes minutes
def test_every_section_at_both_temperatures(kit: BackendKit, tmp_path: Path) -> None:
    found = _run(kit, tmp_path / "yoco.json", "--together", "2")
    pairs = _pairs(found)
    expected = [
        f"{name}, temperature {temperature}, {at_once}"
        for name in ("repeated", "unseen", "random")
        for temperature in ("0", "0.8")
        for at_once in ("one at a time", "2 at once")
    ]
    expected = [f"{each}, same seed" if each.startswith("repeated, temperature 0.8") else each for each in expected]
    expected += [f"dialogue, temperature {temperature}, one at a time" for temperature in ("0", "0.8")]
    assert sorted(pairs) == sorted([*expected, "repeated, temperature 0.8, one at a time, another seed"])
    for name, each in pairs.items():
        assert each["same"] == each["answers"] > 0, name
        assert all(sample["tokens"] > 0 and sample["seconds"] > 0 for sample in [*each["on"], *each["off"]]), name
    assert {figure["verdict"] for figure in found["figures"]} <= {"met", "missed", "info"}


def test_the_ratio_is_of_all_groups_together() -> None:
    from yoco_pairs import Pairs, Sample

    def sample(tokens: int, seconds: float) -> Sample:
        return Sample(tokens, seconds, tokens + 1, tokens, seconds)

    pairs = Pairs(on=[sample(10, 1.0), sample(30, 1.0)], off=[sample(10, 2.0), sample(30, 2.0)])
    assert pairs.ratio == pytest.approx(2.0)
    assert pairs.cpu_ratio == pytest.approx(2.0)
    assert pairs.interval() == pytest.approx((2.0, 2.0))
    uneven = Pairs(on=[sample(10, 1.0), sample(10, 4.0)], off=[sample(10, 2.0), sample(10, 2.0)])
    assert uneven.ratio == pytest.approx(0.8)  # 4 s against 5 s, not the mean of 2 and 0.5
    assert uneven.interval() == pytest.approx((0.5, 2.0))


def test_no_unseen_question_is_among_the_seen(tmp_path: Path) -> None:
    from yoco_texts import load_texts

    def write(part: str, questions: list[str]) -> None:
        with (tmp_path / "banking77" / f"banking_data_{part}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([["text", "category"], *([question, "any"] for question in questions)])

    for folder in ("banking77", "fastchat"):
        (tmp_path / folder).mkdir()
    write("train", ["Where is my card?", "Why, exactly, a fee?"])
    write("test", ["where is  my CARD?", "Can I top up\nby cheque?"])
    rows = [{"turns": ["Name a river.", "And another."]}, {"turns": ["a" * 500, "b"]}]
    (tmp_path / "fastchat" / "any_mt_bench_question.jsonl").write_text("\n".join(map(json.dumps, rows)))
    texts = load_texts(tmp_path, 200)
    assert sorted(texts.seen) == ["Where is my card?", "Why, exactly, a fee?"]
    assert texts.unseen == ["Can I top up by cheque?"]
    assert texts.dialogues == [("Name a river.", "And another.")]


def test_the_extracts_are_divided_and_dealt_once() -> None:
    from yoco_texts import Deck, load_texts

    texts = load_texts(None, 200)
    assert len(texts.seen) == 43
    assert len(texts.unseen) == 29
    assert not set(texts.seen) & set(texts.unseen)
    assert len(texts.dialogues) == 16
    assert load_texts(None, 200).seen == texts.seen
    deck = Deck(texts.unseen, 4)
    hands = [deck.deal(most) for most in (24, 24, 3, 24)]
    assert [len(hand) for hand in hands] == [7, 7, 3, 7]
    assert len({question for hand in hands for question in hand}) == 24


def test_random_prompts_differ() -> None:
    from yoco_texts import random_prompt

    draw = random.Random(1)
    first, second = random_prompt(draw), random_prompt(draw, 8)
    assert len(first) == 32
    assert len(second) == 8
    assert first[:8] != second
