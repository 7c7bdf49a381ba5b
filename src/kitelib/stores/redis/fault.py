"""What can go wrong between the store and one Redis server."""

from __future__ import annotations

__all__ = ["Fault", "WireError"]


class Fault(Exception):  # noqa: N818 - stands in for a reply, and is never raised
    """In place of a reply: why there is none.

    Attributes:
        code: first word of a Redis error ("MOVED", "OOM", ...); "DOWN" if the server didn't answer.
    """

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = message.partition(" ")[0] if code is None else code


class WireError(Exception):
    """The connection could not be opened, broke, or timed out; it is closed."""
