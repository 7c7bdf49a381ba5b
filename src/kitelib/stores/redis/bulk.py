"""Values out of a pipeline of GETs, with one copy: from the receive buffer into the value.

hiredis copies every byte once more, which costs about a seventh of the read bandwidth for values of some 100 KB, and
can't refuse a value before it came in. It reads all other replies.
"""

from __future__ import annotations

from typing import Any, Final

from kitelib.runtime.allocator import keep_freed_memory
from kitelib.stores.redis.fault import Fault, WireError

__all__ = ["BulkReader"]

_FIRST_BYTES: Final = 2**20
_KEPT_BYTES: Final = 4 * 2**20
_LEAST_ROOM: Final = 2**16
_LONGEST_LINE: Final = 2**16  # an error; a length has at most 20 digits


class BulkReader:
    """Reads flat replies: strings, null, integers, status and errors (RESP2), not arrays.

    Args:
        max_value_bytes: a longer value is refused before it comes in.
    """

    def __init__(self, max_value_bytes: int) -> None:
        self._max_value_bytes = max_value_bytes
        keep_freed_memory()
        self._buffer = bytearray(_FIRST_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # received and not given out yet
        self._needed = 0  # bytes of the reply at `start`, as far as known

    def room(self, most: int) -> memoryview:
        """Where the next bytes go; at most so many."""
        size, held = len(self._buffer), self._end - self._start
        if size - self._end < _LEAST_ROOM or self._start + self._needed > size:
            if held + _LEAST_ROOM > size:  # doubled as bytes come, not as large as the sender says
                buffer = bytearray(2 * size)
                buffer[:held] = self._view[self._start : self._end]
                self._buffer, self._view = buffer, memoryview(buffer)
            elif self._start:
                self._view[:held] = self._view[self._start : self._end]
            self._start, self._end = 0, held
        return self._view[self._end : self._end + most]

    def received(self, num_bytes: int, replies: list[Any]) -> None:
        """Appends the replies that are whole now: bytes, None, int, str or `Fault`.

        Raises:
            WireError: not the protocol, or a value that is too long, for which a `Fault` "BIG" was appended.
        """
        self._end += num_bytes
        while self._end - self._start >= max(self._needed, 3):
            line_end = self._buffer.find(b"\r\n", self._start, min(self._end, self._start + _LONGEST_LINE))
            if line_end < 0:
                if self._end - self._start >= _LONGEST_LINE:
                    raise WireError("a line of a reply doesn't end")
                break
            kind, line = self._buffer[self._start], bytes(self._view[self._start + 1 : line_end])
            after = line_end + 2
            if kind == b"$"[0] and line != b"-1":
                length = self._length(line, replies)
                self._needed = after + length + 2 - self._start
                if self._end - self._start < self._needed:
                    break
                if self._buffer[after + length : after + length + 2] != b"\r\n":
                    raise WireError("a value is not as long as its reply says")
                replies.append(bytes(self._view[after : after + length]))
                after += length + 2
            else:
                replies.append(_simple(kind, line))
            self._start, self._needed = after, 0
        if self._start == self._end:
            self._start = self._end = 0

    def _length(self, line: bytes, replies: list[Any]) -> int:
        if not line.isdigit() or len(line) > 18:
            raise WireError("the length of a value is no number")
        if int(line) > self._max_value_bytes:
            message = f"a value has {int(line)} bytes; at most {self._max_value_bytes} are taken"
            replies.append(Fault(message, "BIG"))
            raise WireError(message)
        return int(line)

    def finish(self) -> bool:
        """Whether nothing is left over; gives the memory of a large value back."""
        clean = self._start == self._end
        if len(self._buffer) > _KEPT_BYTES:
            self._buffer = bytearray(_FIRST_BYTES)
            self._view = memoryview(self._buffer)
        return clean


def _simple(kind: int, line: bytes) -> Any:
    if kind == b"$"[0]:
        return None
    if kind == b"-"[0]:
        return Fault(line.decode("utf-8", "replace"))
    if kind == b"+"[0]:
        return line.decode("utf-8", "replace")
    if kind == b":"[0] and line.removeprefix(b"-").isdigit():
        return int(line)
    raise WireError("a reply is of an unexpected kind")
