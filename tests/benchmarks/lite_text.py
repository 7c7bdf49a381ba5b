"""Prompts for the benchmark: plain English that never repeats, cut to an exact number of tokens.

Real sentences matter: random token ids give flat logits and unusual KV values, and a text that repeats itself
would let a prefix cache hit where it should miss.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

__all__ = ["PromptSource"]


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(" ".join(part.split()) for part in text.split(";"))


_PEOPLE = _phrases("""
    clerk; customer; auditor; trainee; branch manager; treasurer; carpenter; nurse; landlord; student;
    pensioner; shop owner; widow; courier; translator; gardener; engineer; farmer
""")
_NAMES = _phrases("""
    Amina; Bruno; Chiara; Dmitri; Elif; Farid; Greta; Hugo; Ines; Jonas; Keiko; Lamar; Mirela; Nadia; Oskar;
    Priya; Quentin; Rosa; Stefan; Tomoko; Ulrich; Valeria; Wanda
""")
_PLACES = _phrases("""
    Harrow; Leiden; Porto; Tartu; Graz; Cork; Aarhus; Verona; Basel; Ghent; Turku; Bergen; Lublin; Split;
    Nantes; Malaga; Uppsala; Brno; Dundee; Riga
""")
_THINGS = _phrases("""
    savings account; mortgage; debit card; standing order; overdraft; safe deposit box; wire transfer; student
    loan; travel insurance; cheque book; joint account; security token; currency order; car loan; pension plan;
    dividend; refund; direct debit; credit limit; bank guarantee
""")
_ACTIONS = _phrases("""
    asks for a copy of; wants to cancel; has to confirm; cannot find; renews; disputes a fee on; moves money
    into; signs the papers for; forgot the password of; reads the conditions of; compares two offers for;
    reports a fault with; closes; opens; explains the rules of
""")
_WHEN = _phrases("""
    before noon; on the last day of the month; after the holiday; twice a year; at the counter; over the
    telephone; in the mobile app; within fourteen days; by registered letter; during the audit; while it rains
    outside; in the second week of spring; just before closing time; without an appointment
""")
_REASONS = _phrases("""
    because the old address is no longer valid; since the amount is larger than agreed; although nobody else was
    told; so that the family can move house; because two signatures are missing; as the interest changed in
    autumn; since the passport expires soon; because the shop was closed; unless the supervisor objects; so that
    the books balance; because the ticket was never used
""")
_RULES = (
    "Answer in two sentences at most.",
    "Never guess an amount.",
    "Quote the paragraph you rely on.",
    "Say plainly when you do not know.",
    "Use the customer's own words.",
    "Give the fee before the explanation.",
    "Do not promise a date.",
    "Offer a call back when the matter is urgent.",
    "Keep names out of the summary.",
)
_QUESTIONS = (
    "What should {name} from {place} do when the {person} {action} the {thing} {when}?",
    "Can {name} still change the {thing} in {place} {when}, {reason}?",
    "Which form does the {person} named {name} need for a {thing} in {place} {when}?",
    "How much does {name} pay in {place} if the {thing} is returned {when}, {reason}?",
    "Who decides in {place} whether {name} the {person} may keep the {thing} {when}?",
)


class PromptSource:
    """Draws prompts that were not drawn before.

    Args:
        tokenize: text to token ids.
        seed: the same seed gives the same prompts in the same order.
    """

    def __init__(self, tokenize: Callable[[str], list[int]], seed: int = 20) -> None:
        self._tokenize = tokenize
        self._random = random.Random(seed)
        self._num_drawn = 0
        self._openers = self._distinct_openers()

    def prompt(self, num_tokens: int) -> list[int]:
        """A new text of exactly `num_tokens` tokens that differs from all others within its first few tokens."""
        self._num_drawn += 1
        draw = self._random
        text = f"{self._number_in_words()}, {draw.choice(_NAMES)} writes from {draw.choice(_PLACES)}:"
        return self._fill(text, self._sentence, num_tokens)

    def question(self, num_tokens: int) -> list[int]:
        """A new question of exactly `num_tokens` tokens that can follow any prompt.

        Its first token differs from those of the questions before it, so that nothing of it can be reused.
        """
        self._num_drawn += 1
        opener = self._openers[self._num_drawn % len(self._openers)]
        return self._fill(f" {opener}, case {self._num_drawn}:", self._question, num_tokens)

    def _distinct_openers(self) -> list[str]:
        """Words whose first tokens all differ; more than a run asks questions about one prefix."""
        phrases = (*_PEOPLE, *_NAMES, *_PLACES, *_THINGS, *_ACTIONS, *_WHEN, *_REASONS)
        words = sorted({word for phrase in phrases for word in phrase.split()})
        return list({self._tokenize(f" {word},")[0]: word for word in words}.values())

    def _fill(self, text: str, more: Callable[[], str], num_tokens: int) -> list[int]:
        # A sentence has at least four tokens, so this ends; cutting ids (not text) makes the length exact.
        while len(ids := self._tokenize(text)) < num_tokens:
            text += " " + more()
        return ids[:num_tokens]

    def _number_in_words(self) -> str:
        digits = ("Zero", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine")
        return " ".join(digits[int(digit)] for digit in reversed(str(self._num_drawn)))

    def _words(self) -> dict[str, str]:
        draw = self._random.choice
        return {
            "name": draw(_NAMES),
            "place": draw(_PLACES),
            "person": draw(_PEOPLE),
            "thing": draw(_THINGS),
            "action": draw(_ACTIONS),
            "when": draw(_WHEN),
            "reason": draw(_REASONS),
        }

    def _question(self) -> str:
        return self._random.choice(_QUESTIONS).format(**self._words())

    def _sentence(self) -> str:
        words, shape = self._words(), self._random.randrange(6)
        forms: Sequence[str] = (
            "The {person} {action} the {thing} {when}, {reason}.",
            "In {place} the {person} {action} a {thing} {when}.",
            "{name} {action} the {thing}, {reason}.",
            "When {name} visits {place}, the {person} {action} every {thing} {when}.",
            "Every {thing} in {place} costs {amount} euros a year, {reason}.",
        )
        if shape == len(forms):
            return self._random.choice(_RULES)
        return forms[shape].format(**words, amount=self._random.randrange(3, 900))
