"""Which active branch is about to compute which block: who needs one of them waits instead of computing it again."""

from __future__ import annotations

from kitelib.engine.request import Branch
from kitelib.fingerprint import Fingerprint

__all__ = ["SingleFlight"]


class SingleFlight:
    """The full blocks that active branches still have to compute. Model's thread only."""

    def __init__(self, block_tokens: int) -> None:
        self._size = block_tokens
        self._computing: dict[Fingerprint, Branch] = {}

    def __len__(self) -> int:
        """Blocks that somebody is about to compute."""
        return len(self._computing)

    def begin(self, branch: Branch) -> None:
        """The branch is active: what it has not computed yet, it will, unless another already does."""
        if branch.run.shared:
            for fingerprint in branch.run.chain.fingerprints[branch.run.computed // self._size :]:
                self._computing.setdefault(fingerprint, branch)

    def is_behind(self, branch: Branch, block: int) -> bool:
        """Whether another branch is about to compute the next block this one needs."""
        fingerprints = branch.run.chain.fingerprints
        if not branch.run.shared or block >= len(fingerprints):
            return False
        other = self._computing.get(fingerprints[block])
        return other is not None and other is not branch

    def computed(self, branch: Branch, count: int) -> None:
        """The branch has got `count` more tokens, computed or restored."""
        stop = branch.run.computed
        self._forget(branch, branch.run.chain.fingerprints[(stop - count) // self._size : stop // self._size])

    def end(self, branch: Branch) -> None:
        """The branch is not active any more."""
        self._forget(branch, branch.run.chain.fingerprints)

    def _forget(self, branch: Branch, fingerprints: list[Fingerprint]) -> None:
        for fingerprint in fingerprints:
            if self._computing.get(fingerprint) is branch:
                del self._computing[fingerprint]
