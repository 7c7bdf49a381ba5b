"""Speculative drafts from answers seen before: what they propose, and how much of it is worth verifying.

A draft never changes an answer: the model verifies each token, and what it would not have said is dropped.
"""

from kitelib.yoco.drafts.cost import StepCost, allot
from kitelib.yoco.drafts.drafter import Drafter
from kitelib.yoco.drafts.governor import Governor
from kitelib.yoco.drafts.library import Asked, DraftLibrary
from kitelib.yoco.drafts.proposal import Proposal
from kitelib.yoco.drafts.suffix_automaton import SuffixAutomaton

__all__ = ["Asked", "DraftLibrary", "Drafter", "Governor", "Proposal", "StepCost", "SuffixAutomaton", "allot"]
