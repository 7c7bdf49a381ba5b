"""What the benchmark of drafts asks: bank questions and two-turn dialogues, from the full sets or from small extracts."""

from __future__ import annotations

import csv
import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Generic, TypeVar

__all__ = ["Deck", "Texts", "load_texts", "random_prompt"]

T = TypeVar("T")
_EXTRACTS = Path(__file__).resolve().parents[1] / "data"
_SEEN_OF_EXTRACT = 0.6
_LONGEST_TURN = 400  # characters; a long text to read says nothing about drafts and takes its time


@dataclasses.dataclass(frozen=True, slots=True)
class Texts:
    """Questions and dialogues.

    Attributes:
        seen: bank questions that are answered before anything is measured.
        unseen: others, none of which is among `seen`, apart from case and white space.
        dialogues: the user's turns of each.
        source: where they are from, in one sentence.
    """

    seen: Sequence[str]
    unseen: Sequence[str]
    dialogues: Sequence[tuple[str, ...]]
    source: str


def load_texts(folder: Path | None, num_seen: int, seed: int = 5) -> Texts:
    """Shuffled texts.

    Args:
        folder: holds ``banking77/banking_data_train.csv`` (the seen questions), ``banking77/banking_data_test.csv`` (the
            unseen ones) and ``fastchat/*mt_bench_question.jsonl``; None takes the extracts in tests/data, which hold 72
            questions and 16 dialogues.
        num_seen: most questions to be seen.
        seed: the same seed gives the same texts in the same order.
    """
    draw = random.Random(seed)
    if folder is None:
        questions = (_EXTRACTS / "banking77_extract.txt").read_text("utf-8").splitlines()
        draw.shuffle(questions)
        count = min(num_seen, int(_SEEN_OF_EXTRACT * len(questions)))
        seen, unseen = questions[:count], questions[count:]
        dialogues = _dialogues(_EXTRACTS / "mt_bench_extract.jsonl")
        source = "extracts in tests/data: BANKING77 (CC-BY-4.0), MT-bench (Apache-2.0); give --data for the full sets"
    else:
        train, test = (_questions(folder / "banking77" / f"banking_data_{part}.csv") for part in ("train", "test"))
        (file,) = (folder / "fastchat").glob("*mt_bench_question.jsonl")
        seen, unseen, dialogues = draw.sample(train, min(num_seen, len(train))), test, _dialogues(file)
        draw.shuffle(unseen)
        source = "BANKING77: seen questions of the training set, unseen ones of the test set; MT-bench"
    known = {_plain(question) for question in seen}
    draw.shuffle(dialogues)
    return Texts(seen, [each for each in unseen if _plain(each) not in known], dialogues, source)


def random_prompt(draw: random.Random, num_tokens: int = 32) -> list[int]:
    """Random ids of ordinary tokens of SmolLM2's vocabulary."""
    return [draw.randrange(3000, 40000) for _ in range(num_tokens)]


class Deck(Generic[T]):
    """Deals items, none of them twice.

    Args:
        items: what there is.
        hands: how often will be dealt; nobody gets more than an equal share.
    """

    def __init__(self, items: Sequence[T], hands: int) -> None:
        self._items = list(items)
        self._share = len(items) // max(1, hands)

    def deal(self, most: int) -> list[T]:
        """The next items, at most so many."""
        count = min(most, self._share)
        dealt, self._items = self._items[:count], self._items[count:]
        return dealt


def _questions(file: Path) -> list[str]:
    with file.open(encoding="utf-8", newline="") as lines:
        return [" ".join(row["text"].split()) for row in csv.DictReader(lines)]


def _dialogues(file: Path) -> list[tuple[str, ...]]:
    turns = [tuple(json.loads(line)["turns"]) for line in file.read_text("utf-8").splitlines()]
    return [each for each in turns if max(map(len, each)) <= _LONGEST_TURN]


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
