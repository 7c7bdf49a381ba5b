"""One Redis server as the store sees it: a few connections, pipelines of bounded size, a circuit breaker."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Final, NamedTuple

import anyio

from kitelib.abc import Clock
from kitelib.stores.breaker import Breaker
from kitelib.stores.redis.fault import Fault, WireError
from kitelib.stores.redis.url import Address
from kitelib.stores.redis.wire import Dialer, Wire, pack

__all__ = ["AHEAD_BYTES", "PIPELINE_BYTES", "Command", "Node", "Reply"]

PIPELINE_BYTES: Final = 8 * 2**20
"""Most bytes of values that one pipeline carries, as far as they are known before."""
AHEAD_BYTES: Final = 2**20
"""Values that may be on their way from one server at once, bytes; at least two values are."""
_PIPELINE_COMMANDS: Final = 1024
_PROBE_LOOK_S: Final = 0.05
_MAX_OPEN_S: Final = 5.0  # probes run in the background and cost no request anything, so they may be frequent

Reply = Any
"""bytes, int, str, None, a list of these, or a `Fault`."""
Spawn = Callable[[str, Callable[[], Coroutine[Any, Any, None]]], None]


class Command(NamedTuple):
    """One command to send.

    Attributes:
        key: the key that chooses the node.
        pieces: the command in the Redis protocol.
        num_bytes: bytes of the value it carries there or back, a guess for reads.
        bulk: whether its reply may be large, and is no list.
    """

    key: str
    pieces: tuple[bytes, ...]
    num_bytes: int = 0
    bulk: bool = False


class Node:
    """One server.

    Args:
        address: where it is.
        dialer: opens connections.
        max_connections: most connections at once; a call waits for one as long as opening one may take.
        clock: time source of the breaker.
        spawn: starts a background task.
        preamble: commands sent first on every connection, whose replies don't matter.

    Attributes:
        name: for messages.
        breaker: open while the server fails.
    """

    def __init__(
        self,
        address: Address,
        dialer: Dialer,
        max_connections: int,
        clock: Clock | None,
        spawn: Spawn,
        preamble: Sequence[bytes] = (),
    ) -> None:
        self.address = address
        host, port = address
        self.name = f"{host}:{port}" if port else host
        self.breaker = Breaker(max_open_s=_MAX_OPEN_S, clock=clock)
        self._dialer = dialer
        self._slots = anyio.Semaphore(max_connections, fast_acquire=True)
        self._spawn = spawn
        self._preamble = tuple(preamble)
        self._idle: list[Wire] = []
        self._probing = False
        self._closed = False

    async def call(self, commands: Sequence[Command], asking: bool = False) -> list[Reply]:
        """A reply to each command, in order; a `Fault` for what failed. Never raises, but for cancellation.

        Args:
            commands: what to send; split into pipelines of bounded size.
            asking: send ASKING before each (a slot that is being moved here).
        """
        replies: list[Reply] = []
        try:
            self._check_open()
            async with self._slot():
                self._check_open()  # it may have opened while this call waited for a connection
                with self.breaker.watch():
                    await self._run(commands, asking, replies)
        except WireError as error:
            if self.breaker.state != "closed":
                self._probe_later()
            fault = Fault(str(error), "DOWN")
            replies.extend([fault] * (len(commands) - len(replies)))
        return replies

    def close(self) -> None:
        """Closes idle connections now and busy ones after their call. Idempotent."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    def _check_open(self) -> None:
        if self.breaker.state != "closed":
            raise WireError(f"{self.name} failed several times in a row and is not asked now")

    @contextlib.asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        with anyio.move_on_after(self._dialer.connect_timeout) as waiting:
            await self._slots.acquire()
        if waiting.cancelled_caught:
            raise WireError(f"all connections to {self.name} are busy")
        try:
            yield
        finally:
            self._slots.release()

    async def _run(self, commands: Sequence[Command], asking: bool, replies: list[Reply]) -> None:
        while True:
            wire = self._take_idle()
            fresh = wire is None or not wire.used
            if wire is None:
                wire = await self._open()
            done = len(replies)
            try:
                for part in _pipelines(commands[done:]):
                    await self._pipeline(wire, part, asking, replies)
                return
            except WireError:
                if len(replies) > done and isinstance(replies[-1], Fault) and replies[-1].code == "BIG":
                    if len(replies) == len(commands):
                        return
                    continue  # it was closed to be rid of a value that is too long; the others are welcome
                # The server may have closed an idle connection (it restarted); once is enough to find out.
                if fresh or len(replies) > done or wire.timed_out:
                    raise
            finally:
                self._give_back(wire)

    async def _pipeline(self, wire: Wire, part: Sequence[Command], asking: bool, replies: list[Reply]) -> None:
        pieces = [piece for command in part for piece in command.pieces]
        if asking:
            pieces = [piece for command in part for piece in (pack("ASKING"), *command.pieces)]
            doubled: list[Reply] = []
            ahead = 2 * len(part) if all(command.bulk for command in part) else 0
            try:
                await wire.exchange(pieces, 2 * len(part), doubled, ahead=ahead)
            finally:
                replies.extend(doubled[1::2])
        elif all(command.bulk for command in part):
            ahead = max(2, AHEAD_BYTES // max(command.num_bytes for command in part))
            await wire.exchange(pieces, len(part), replies, ahead=ahead)
        else:
            if all(len(command.pieces) == 1 for command in part):
                pieces = [b"".join(pieces)]
            await wire.exchange(pieces, len(part), replies)

    def _take_idle(self) -> Wire | None:
        while self._idle:
            wire = self._idle.pop()
            if not wire.closed:
                return wire
        return None

    def _give_back(self, wire: Wire) -> None:
        if self._closed:
            wire.close()
        elif not wire.closed:
            self._idle.append(wire)

    async def _open(self) -> Wire:
        wire = await self._dialer.open(self.address, self.name)
        if self._preamble:
            await wire.exchange(self._preamble, len(self._preamble), [])
            wire.used = False
        return wire

    def _probe_later(self) -> None:
        if not self._probing and not self._closed:
            self._probing = True
            self._spawn(f"redis-probe {self.name}", self._probe)

    async def _probe(self) -> None:
        # The probe of the half-open state is a PING of its own, so that no request waits for a sick server.
        try:
            while not self._closed and self.breaker.state != "closed":
                await anyio.sleep(_PROBE_LOOK_S)
                if not self.breaker.allows():
                    continue
                with contextlib.suppress(WireError), self.breaker.watch():
                    await self._run([Command("", (pack("PING"),))], False, [])
        finally:
            self._probing = False


def _pipelines(commands: Sequence[Command]) -> list[Sequence[Command]]:
    """Consecutive parts, each of bounded bytes and length."""
    parts: list[Sequence[Command]] = []
    start = num_bytes = 0
    for index, command in enumerate(commands):
        full = num_bytes + command.num_bytes > PIPELINE_BYTES or index - start >= _PIPELINE_COMMANDS
        if index > start and full:
            parts.append(commands[start:index])
            start, num_bytes = index, 0
        num_bytes += command.num_bytes
    parts.append(commands[start:])
    return parts
