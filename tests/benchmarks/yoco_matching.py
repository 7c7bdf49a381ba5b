"""How well signatures and gates tell questions apart, and how fast: on labelled pairs and on intents; no model.

.venv/bin/python tests/benchmarks/yoco_matching.py --data DIR --json matching.json

DIR has `pairs/minimal_pairs_zh_en.jsonl` (kind, lang, a, b, label), `banking77/banking_data_{train,test}.csv` (text,
category) and `clinc150/data_full.json`; what is missing is a line of the table.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from lite_report import Report, _cpu_name, progress

from kitelib.yoco.canonical import LEVELS, signature, tables_digest
from kitelib.yoco.gates import GATES, differing_gates

Pair = dict[str, Any]
Match = Callable[[str], str]

MATCHERS: dict[str, Match] = {
    "exact text": lambda text: text,
    "canonical": lambda text: signature(text, "canonical"),
    "structural": lambda text: signature(text, "structural"),
}
PARTS = {"looked at": 0, "not looked at": 1}
"""Half of the pairs, by a digest of side a, was looked at while the tables were written; the other half never."""


def upper_bound(hits: int, trials: int, level: float = 0.95) -> float:
    """The one-sided Clopper-Pearson bound: the share that would give at most `hits` in only 1 - `level` of all samples.

    For no hits it is 1 - (1 - level)^(1 / trials), which the "rule of three" approximates as 3 / trials.
    """
    if hits >= trials:
        return 1.0
    low, high = hits / trials, 1.0
    for _ in range(60):
        share = (low + high) / 2
        if _at_most(hits, trials, share) > 1 - level:
            low = share
        else:
            high = share
    return high


def _at_most(hits: int, trials: int, share: float) -> float:
    """Probability of at most `hits` in `trials`."""
    if share <= 0 or share >= 1:
        return float(share <= 0)
    return math.fsum(
        math.exp(
            math.lgamma(trials + 1)
            - math.lgamma(count + 1)
            - math.lgamma(trials - count + 1)
            + count * math.log(share)
            + (trials - count) * math.log1p(-share)
        )
        for count in range(hits + 1)
    )


def part_of(pair: Pair) -> str:
    """Whether a pair was looked at."""
    number = hashlib.sha256(pair["a"].encode()).digest()[0] & 1
    return next(name for name, value in PARTS.items() if value == number)


def by_kind(rows: Iterable[Pair], label: int) -> dict[str, list[Pair]]:
    """The pairs of one label, by kind."""
    found: dict[str, list[Pair]] = defaultdict(list)
    for row in rows:
        if row["label"] == label:
            found[row["kind"]].append(row)
    return dict(sorted(found.items()))


def count(rows: Sequence[Pair], match: Match) -> int:
    """How many pairs a matcher calls the same."""
    return sum(match(row["a"]) == match(row["b"]) for row in rows)


def pairs(report: Report, rows: Sequence[Pair], show: bool) -> None:
    """False matches and recall on labelled pairs."""
    for name, match in MATCHERS.items():
        different = [row for row in rows if row["label"] == 0]
        wrong = [row for row in different if match(row["a"]) == match(row["b"])]
        bound = upper_bound(len(wrong), len(different))
        note = f"of {len(different)}; at most {100 * bound:.3f} % with 95 % confidence"
        report.judge("pairs: false matches", name, float(len(wrong)), 0, "pairs", note=note)
        for row in wrong if show else []:
            progress(f"    {row['a']} | {row['b']}")
    for part in PARTS:
        for kind, some in by_kind((row for row in rows if part_of(row) == part), 1).items():
            shares = {name: 100 * count(some, match) / len(some) for name, match in MATCHERS.items()}
            note = f"exact text {shares['exact text']:.1f} %, {len(some)} pairs"
            for level in LEVELS:
                report.add(f"pairs: recall, {part}", f"{kind}, {level}", [shares[level]], "%", note)


def gates(report: Report, rows: Sequence[Pair], show: bool) -> None:
    """How many different pairs some gate stops, and how many that are the same, by kind."""
    for label, what in ((0, "different pairs stopped"), (1, "same pairs stopped")):
        for part in PARTS:
            for kind, some in by_kind((row for row in rows if part_of(row) == part), label).items():
                found = [differing_gates(row["a"], row["b"]) for row in some]
                each = {gate: sum(gate in names for names in found) for gate in GATES}
                note = ", ".join(f"{gate} {number}" for gate, number in each.items() if number) or "no gate"
                share = 100 * sum(map(bool, found)) / len(some)
                report.add(f"gates: {what}, {part}", kind, [share], "%", f"of {len(some)}: {note}")
                for row, names in zip(some, found, strict=True) if show else []:
                    if bool(names) == bool(label):
                        progress(f"    {names} {row['a']} | {row['b']}")


def intents(report: Report, name: str, rows: Sequence[tuple[str, str]], show: bool) -> None:
    """Equal signatures across and within intents, over all pairs of questions of one set."""
    sizes: dict[str, int] = defaultdict(int)
    for _, intent in rows:
        sizes[intent] += 1
    everything = math.comb(len(rows), 2)
    across = everything - sum(math.comb(size, 2) for size in sizes.values())
    for matcher, match in MATCHERS.items():
        groups: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for text, intent in rows:
            groups[match(text)].append((text, intent))
        equal = false = 0
        for group in groups.values():
            for index, (text, intent) in enumerate(group):
                for other, other_intent in group[:index]:
                    equal += 1
                    if intent != other_intent:
                        false += 1
                        if show:
                            progress(f"    {matcher}: {text} ({intent}) | {other} ({other_intent})")
        bound = f"at most {1e6 * upper_bound(false, across):.2f} per million with 95 % confidence"
        note = f"of {equal} equal pairs; of {across} pairs across intents, {bound}"
        report.add(f"intents: {name}", f"{matcher}: equal across intents", [float(false)], "pairs", note)
        report.add(f"intents: {name}", f"{matcher}: equal within an intent", [float(equal - false)], "pairs")


def speed(report: Report, rows: Sequence[Pair], rounds: int) -> None:
    """Time of one signature, and of the gates on one pair: means over questions of each one's fastest round, since
    what else runs on the machine only ever adds."""
    for language in ("en", "zh"):
        some = [row for row in rows if row["lang"] == language][::9]
        length = sum(len(row["a"]) for row in some) / len(some)
        for level in LEVELS:
            report.add(
                "speed",
                f"signature, {level}, {language}",
                [fastest(lambda row, level=level: signature(row["a"], level), some, rounds)],
                "us",
                f"{length:.0f} characters on average",
            )
        gate = fastest(lambda row: differing_gates(row["a"], row["b"]), some, rounds)
        report.add("speed", f"gates of one pair, {language}", [gate], "us")


def fastest(work: Callable[[Pair], object], rows: Sequence[Pair], rounds: int) -> float:
    """Microseconds per row."""
    total = 0.0
    for row in rows:
        best = math.inf
        for _ in range(rounds):
            begun = time.perf_counter()
            work(row)
            best = min(best, time.perf_counter() - begun)
        total += best
    return total / len(rows) * 1e6


def intent_sets(data: Path, parts: Sequence[str]) -> dict[str, list[tuple[str, str]]]:
    """Name -> (text, intent) of each set and part that is there."""
    found: dict[str, list[tuple[str, str]]] = {}
    for part in parts:
        path = data / "banking77" / f"banking_data_{part}.csv"
        if path.exists():
            with path.open(encoding="utf-8", newline="") as file:
                found[f"BANKING77 {part}"] = [(row["text"], row["category"]) for row in csv.DictReader(file)]
    path = data / "clinc150" / "data_full.json"
    if path.exists():
        plain = json.loads(path.read_text("utf-8"))
        for part in parts:
            found[f"CLINC150 {part}"] = [(text, intent) for text, intent in plain[part]]
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the sets")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--parts", default="train,test", help="parts of the intent sets (default train,test)")
    parser.add_argument("--rounds", type=int, default=30, help="calls per question for the speed (default 30)")
    parser.add_argument("--show", action="store_true", help="print every false match and every wrong gate")
    options = parser.parse_args(arguments)

    report = Report()
    path = options.data / "pairs" / "minimal_pairs_zh_en.jsonl"
    if path.exists():
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        pairs(report, rows, options.show)
        gates(report, rows, options.show)
        speed(report, rows, options.rounds)
    else:
        report.missing("pairs", "labelled pairs", f"no {path}")
    sets = intent_sets(options.data, options.parts.split(","))
    for name, questions in sets.items():
        intents(report, name, questions, options.show)
    if not sets:
        report.missing("intents", "BANKING77, CLINC150", f"not in {options.data}")
    print(report.table())
    if options.json is not None:
        report.write(
            options.json,
            {
                "cpu": _cpu_name(),
                "python": platform.python_version(),
                "platform": platform.platform(),
                "kitelib": metadata.version("kitelib"),
                "tables": tables_digest().hex(),
                "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            },
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
