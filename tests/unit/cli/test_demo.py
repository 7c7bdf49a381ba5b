"""The demo's story and its report."""

from __future__ import annotations

import re

from kitelib.backends.llama_cpp.model import GGUFModel
from kitelib.cli import demo
from kitelib.cli import main as cli
from kitelib.cli.bank import QUESTIONS, SYSTEM_PROMPT
from kitelib.cli.demo import _QUICK, _TOGETHER
from kitelib.cli.report import Row, comparison, from_earlier, totals


def test_the_system_prompt_is_about_600_tokens(smollm2_path):
    model = GGUFModel.load(smollm2_path, vocab_only=True)
    try:
        assert 550 <= len(model.tokenize(SYSTEM_PROMPT, add_special=False)) <= 700
    finally:
        model.close()


def test_twelve_questions_and_only_the_last_repeats_the_first():
    assert len(QUESTIONS) == 12
    assert QUESTIONS[-1] == QUESTIONS[0]
    assert len(set(QUESTIONS)) == 11


def test_the_first_is_asked_alone_and_eight_together():
    assert len(_TOGETHER) == 8
    assert 0 not in _TOGETHER
    assert len(QUESTIONS) - 1 not in _TOGETHER


def test_quick_measures_one_request_of_each_kind():
    assert _QUICK[0] == 0
    assert _QUICK[1] in _TOGETHER
    assert _QUICK[2] == len(QUESTIONS) - 1


def test_the_table_has_a_line_per_request_and_fits_a_terminal(finished):
    rows = [
        Row(1, "How long is this question, which goes on and on?", finished(ttft_s=5.0), finished(ttft_s=5.0)),
        Row(2, "Second?", finished(cached=640, ttft_s=0.05, tiers={"context": 640}), finished(ttft_s=5.0)),
        Row(3, "Third?", finished(cached=640, ttft_s=0.05, tiers={"disk": 40, "context": 600, "memory": 0}), None),
    ]
    lines = comparison(rows).splitlines()
    assert all(len(line) <= 100 for line in lines)
    assert [line.split()[0] for line in lines[2:5]] == ["1", "2", "3"]
    assert lines[2].split()[-6:] == ["-", "5.00", "s", "5.00", "s", "1.0x"]
    assert lines[3].split()[-7:] == ["640", "context", "50", "ms", "5.00", "s", "100x"]
    assert lines[4].split()[-5:] == ["context+disk", "50", "ms", "-", "-"]


def test_totals_count_what_was_saved(finished):
    rows = [
        Row(1, "First?", finished(prompt=600, ttft_s=5.0), finished(ttft_s=5.0)),
        Row(2, "Second?", finished(prompt=400, cached=400, ttft_s=0.05, zero_prefill=True), finished(ttft_s=5.05)),
        Row(3, "Third?", finished(prompt=1000, cached=600, ttft_s=0.05), None),
    ]
    text = totals(rows)
    assert "3 requests, 2,000 prompt tokens, 1,000 (50%)" in text
    assert "no model step at all: 1." in text
    assert "over the 2 requests measured both ways: 5.05 s instead of 10.1 s (2.0x)" in text
    assert "with and without reuse: 2 of 2 (exactness: bitwise)" in text


def test_what_outlived_its_process_is_told_apart(finished):
    warm = finished(cached=640, tiers={"context": 100, "memory": 40, "disk": 480, "redis": 20, "s3": 0})
    assert from_earlier(warm) == "480 from disk, 20 from redis"
    assert from_earlier(finished(cached=640, tiers={"context": 640})) == ""
    rows = [Row(1, "First?", warm, None), Row(2, "Second?", finished(cached=640, tiers={"context": 640}), None)]
    assert "They came from: context 740, disk 480, memory 40, redis 20." in totals(rows)


def test_totals_admit_an_answer_that_differs(finished):
    rows = [
        Row(1, "First?", finished(tokens=(1, 2)), finished(tokens=(1, 2))),
        Row(2, "Second?", finished(tokens=(1, 2)), finished(tokens=(1, 3))),
    ]
    assert "with and without reuse: 1 of 2" in totals(rows)


def test_totals_without_a_comparison_claim_nothing(finished):
    text = totals([Row(1, "First?", finished(), None)])
    assert "without reuse" not in text


def rows_of(text, count):
    return [line.split() for line in text.partition("factor\n")[2].splitlines()[1 : 1 + count]]


def test_the_demo_from_beginning_to_end(kite):
    done = kite("demo", "--quick", "--threads", "1", "--max-tokens", "2", "--disk", "none")
    assert (done.returncode, done.stderr) == (0, "")
    assert [int(row[0]) for row in rows_of(done.stdout, 12)] == list(range(1, 13))
    for question in QUESTIONS:
        assert f" {question}\n" in done.stdout
    assert "no model step before it" in done.stdout
    assert "no model step at all: 1." in done.stdout
    assert "3 of 3 (exactness: bitwise)" in done.stdout
    assert "Next:" in done.stdout
    assert "kept in" not in done.stdout.lower()


def test_a_second_demo_starts_from_the_disk_and_says_so(monkeypatch, capsys, tmp_path):
    """B21: what one run left on the disk, the next one starts from; the story is right in both."""
    monkeypatch.delenv("KITE_REDIS_URL", raising=False)
    monkeypatch.setattr(demo, "SYSTEM_PROMPT", "You are a bank. " + "Cash is free at our own machines. " * 12)
    monkeypatch.setattr(demo, "QUESTIONS", ("When do you open?", "Is cash free?", "When do you open?"))
    monkeypatch.setattr(demo, "_TOGETHER", range(1, 2))
    monkeypatch.setattr(demo, "_QUICK", (0,))
    folder = tmp_path / "pool"
    outs = []
    for _ in range(2):
        assert cli.main(["demo", "--quick", "--threads", "1", "--max-tokens", "2", "--disk", str(folder)]) == 0
        outs.append(capsys.readouterr().out)
    for out in outs:
        assert f"What is computed is kept in {folder}\n" in out
        assert re.search(f"kite pool stats --disk {folder} +what is in it", out)
        assert "1 of 1 (exactness: bitwise)" in out
    first, second = outs
    assert "from disk" not in first
    assert rows_of(first, 3)[0][-6:-5] == ["-"]
    line = second.partition("When do you open?")[2].partition("[")[2].partition("]")[0]
    assert "from disk)" in line
    assert "[an earlier run left that;" in second
    assert "disk" in rows_of(second, 3)[0]
    assert "disk " in second.partition("They came from: ")[2].splitlines()[0]
