"""One connection to a Redis server: pipelines with timeouts, safe to cancel.

redis-py opens the connection (TCP, TLS, unix socket, login, database). Then this protocol takes the transport over and
reads into one buffer, which saves the copies and the flow control of `asyncio.StreamReader`. hiredis parses replies;
those of bulk reads are cut out of the buffer where they lie.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any, Final

import anyio
import anyio.to_thread

from kitelib.errors import MissingExtraError
from kitelib.stores.redis.bulk import BulkReader
from kitelib.stores.redis.fault import Fault, WireError
from kitelib.stores.redis.url import Address

__all__ = ["Dialer", "Wire", "pack", "pack_set", "require_redis"]

_RECEIVE_BYTES: Final = 256 * 2**10  # one turn of the event loop reads and parses at most this much
_SEND_BYTES: Final = 256 * 2**10
_KEPT_PARSE_BYTES: Final = 4 * 2**20  # hiredis keeps a buffer up to this size for the next value
_MARK: Final = b"+kite\r\n"
_LEAST_BYTES: Final = 64 * 2**10  # per `socket_timeout`, on average: less is no service


def require_redis() -> None:
    """Imports redis-py and hiredis.

    Raises:
        MissingExtraError: they are not installed.
    """
    for package in ("redis.asyncio.connection", "hiredis"):
        try:
            importlib.import_module(package)
        except ImportError:
            raise MissingExtraError(package.partition(".")[0], "redis", "the Redis tier") from None


def pack(*words: str | bytes | int) -> bytes:
    """One command in the Redis protocol."""
    hiredis = importlib.import_module("hiredis")
    packed: bytes = hiredis.pack_command(words)
    return packed


def pack_set(key: str, value: bytes, ttl_ms: int) -> tuple[bytes, bytes, bytes]:
    """``SET key value PX ttl_ms`` in three pieces, so that the value is not copied."""
    name, ttl = key.encode(), b"%d" % ttl_ms
    head = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(value))
    return head, value, b"\r\n$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(ttl), ttl)


class Wire(asyncio.BufferedProtocol):
    """An open connection. One `exchange` at a time.

    An exchange that is cancelled or fails closes the connection, so a reply that is still under way can never be taken
    for the reply to a later command.

    Attributes:
        used: whether an exchange was made before; the server may have closed it since.
        closed: whether it can't be used any more.
        timed_out: whether that is because the server was silent.
    """

    def __init__(self, connection: Any, name: str, timeout: float, max_value_bytes: int) -> None:
        self._connection = connection  # owns the stream writer, whose finalizer would close the transport
        self._transport: asyncio.Transport = connection._writer.transport
        self._name = name
        self._timeout = timeout
        self._max_value_bytes = max_value_bytes
        self._loop = asyncio.get_running_loop()
        hiredis = importlib.import_module("hiredis")
        self._nothing = object()
        self._reader = hiredis.Reader(replyError=Fault, protocolError=WireError, notEnoughData=self._nothing)
        self._reader.setmaxbuf(_KEPT_PARSE_BYTES)
        self._buffer = bytearray(_RECEIVE_BYTES)
        self._view = memoryview(self._buffer)
        self._bulk: BulkReader | None = None
        self._ahead = 0
        self._unsent: collections.deque[bytes] = collections.deque()
        self._replies: list[Any] = []
        self._expected = 0
        self._unparsed = self._moved = 0  # bytes: since the last whole reply, and sent and received in this exchange
        self._active_at = self._began_at = 0.0
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._error: WireError | None = None
        self.used = False
        self.closed = False
        self.timed_out = False
        self._transport.set_protocol(self)

    async def exchange(self, pieces: Sequence[bytes], num_replies: int, replies: list[Any], *, ahead: int = 0) -> None:
        """Sends commands and appends `num_replies` replies: bytes, int, str, None, list or `Fault`.

        With `ahead`, the replies may be large but are no lists, each piece is one command, and at most so many commands
        are sent before their replies are there: a server copies all it was asked for before it sends any of it.

        Raises:
            WireError: it broke or was silent for too long; the replies that came whole are in `replies`.
        """
        if self.closed:
            raise self._error or WireError(f"the connection to {self._name} is closed")
        self._replies, self._expected = replies, len(replies) + num_replies
        self._moved = self._unparsed = 0
        self._active_at = self._began_at = self._loop.time()
        if ahead and self._bulk is None:
            self._bulk = BulkReader(self._max_value_bytes)
        self._ahead = ahead
        self._timer = self._loop.call_later(self._timeout, self._watch)
        try:
            if ahead:
                self._unsent.extend(pieces)
                self._send_ahead()
            else:
                await self._send(pieces)
            while len(replies) < self._expected and self._error is None:
                await self._wait()
            if len(replies) < self._expected and self._error is not None:
                raise self._error
        except BaseException:
            self.close()
            raise
        finally:
            self._timer.cancel()
            self._replies, self._expected = [], 0
            self._ahead, self.used = 0, True
            self._unsent.clear()
            if not self._clean():
                self.close()

    def _clean(self) -> bool:
        """Whether no part of a further reply came, which would be taken for the next one."""
        if self.closed or (self._bulk is not None and not self._bulk.finish()):
            return False
        self._reader.feed(_MARK)  # hiredis doesn't tell whether it is inside a reply
        try:
            return bool(self._reader.gets() == _MARK[1:-2])
        except WireError:
            return False

    def _send_ahead(self) -> None:
        due = self._ahead - (self._expected - len(self._replies) - len(self._unsent))
        if due > 0 and self._unsent and not self._transport.is_closing():
            self._transport.write(b"".join(self._unsent.popleft() for _ in range(min(due, len(self._unsent)))))

    async def _send(self, pieces: Sequence[bytes]) -> None:
        for piece in pieces:
            view = memoryview(piece)
            for start in range(0, len(view), _SEND_BYTES):
                if self._transport.is_closing():
                    return  # `connection_lost` is about to say why
                part = view[start : start + _SEND_BYTES]
                self._transport.write(part)
                while self._paused and self._error is None:
                    await self._wait()
                if self._error is not None:
                    return
                if len(part) == _SEND_BYTES:  # small writes go out at once and need no turn of the loop
                    self._progress(len(part))
                    await asyncio.sleep(0)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _progress(self, num_bytes: int) -> None:
        self._moved += num_bytes
        self._active_at = self._loop.time()

    def _watch(self) -> None:
        now = self._loop.time()
        silent_at = self._active_at + self._timeout
        too_slow_at = self._began_at + self._timeout * (2 + self._moved // _LEAST_BYTES)
        if now >= min(silent_at, too_slow_at):
            self.timed_out = True
            what = "was silent for" if now >= silent_at else "is too slow: it had much"
            self._fail(WireError(f"{self._name} {what} longer than socket_timeout ({self._timeout:g} s)"))
        else:
            self._timer = self._loop.call_at(min(silent_at, too_slow_at), self._watch)

    def _fail(self, error: WireError) -> None:
        if self._error is None:
            self._error = error
        self.close()
        self._wake()

    def close(self) -> None:
        """Closes at once, without waiting. Idempotent."""
        if not self.closed:
            self.closed = True
            self._transport.abort()
            self._connection._writer = self._connection._reader = None  # so redis-py sees no open connection

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        """Where the next bytes go."""
        return self._bulk.room(_RECEIVE_BYTES) if self._ahead and self._bulk is not None else self._view

    def buffer_updated(self, nbytes: int) -> None:
        """Parses what came."""
        self._progress(nbytes)
        if self._expected == 0:
            self._fail(WireError(f"{self._name} sent something that nobody asked for"))
            return
        try:
            if self._ahead and self._bulk is not None:
                self._bulk.received(nbytes, self._replies)
                self._send_ahead()
            else:
                self._feed(nbytes)
        except WireError as error:
            self._fail(WireError(f"{self._name} gave a bad answer: {str(error)[:100]}"))
        else:
            if len(self._replies) > self._expected:
                del self._replies[self._expected :]
                self._fail(WireError(f"{self._name} sent a reply that nobody asked for"))
            elif len(self._replies) == self._expected:
                self._wake()

    def _feed(self, nbytes: int) -> None:
        self._unparsed += nbytes
        self._reader.feed(self._buffer, 0, nbytes)
        while (reply := self._reader.gets()) is not self._nothing:
            self._unparsed = 0
            self._replies.append(reply)
        if self._unparsed > self._max_value_bytes:
            raise WireError(f"a reply has more than {self._max_value_bytes} bytes")

    def eof_received(self) -> bool:
        """The server closed its side."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._fail(WireError(f"{self._name} closed the connection" + (f": {exc}" if exc else "")))

    def pause_writing(self) -> None:
        """The send buffer is full."""
        self._paused = True

    def resume_writing(self) -> None:
        """The send buffer has room again."""
        self._paused = False
        self._progress(_SEND_BYTES)
        self._wake()


@dataclasses.dataclass(slots=True)
class Dialer:
    """Opens connections of one login.

    Attributes:
        username: ACL user.
        password: its password.
        db: database number.
        tls: keyword arguments of redis-py's TLS connection, or None.
        connect_timeout: seconds for opening, with TLS and login.
        socket_timeout: seconds of silence within an exchange.
        max_value_bytes: a longer reply closes the connection.
    """

    username: str | None
    password: str | None = dataclasses.field(repr=False)
    db: int
    tls: Any
    connect_timeout: float
    socket_timeout: float
    max_value_bytes: int
    _tls_context: Any = dataclasses.field(default=None, init=False, repr=False)
    _nameless: Any = dataclasses.field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        # redis-py would look its own version up on the disk for every connection, to tell the server.
        try:
            importlib.import_module("redis.driver_info")
            self._nameless = {"driver_info": None}
        except ImportError:  # before redis-py 7
            self._nameless = {"lib_name": None, "lib_version": None}

    async def open(self, address: Address, name: str) -> Wire:
        """A new connection, logged in.

        Raises:
            WireError: that failed.
        """
        connection = self._connection(address)
        try:
            with anyio.fail_after(self.connect_timeout):
                if self.tls is not None:
                    await self._share_tls_context(connection)
                await connection.connect()
            return Wire(connection, name, self.socket_timeout, self.max_value_bytes)
        except TimeoutError as error:
            _drop(connection)
            raise WireError(
                f"connecting to {name} took longer than connect_timeout ({self.connect_timeout:g} s)"
            ) from error
        except Exception as error:  # noqa: BLE001 - redis-py lets errors of TLS, of the resolver and its own pass
            _drop(connection)
            raise WireError(f"can't connect to {name}: {self._without_secrets(str(error))[:200]}") from None
        except BaseException:
            _drop(connection)
            raise

    def _without_secrets(self, message: str) -> str:
        """Servers and proxies that know no AUTH repeat its arguments in their error."""
        tls_password = (self.tls or {}).get("ssl_password")
        for secret in (self.password, tls_password):
            message = message.replace(secret, "***") if secret else message
        return message

    def _connection(self, address: Address) -> Any:
        module = importlib.import_module("redis.asyncio.connection")
        common = {
            "username": self.username,
            "password": self.password,
            "db": self.db,
            "socket_timeout": self.connect_timeout,
            "socket_connect_timeout": self.connect_timeout,
            "protocol": 2,
            **self._nameless,
        }
        host, port = address
        if port == 0:
            return module.UnixDomainSocketConnection(path=host, **common)
        if self.tls is None:
            return module.Connection(host=host, port=port, **common)
        return module.SSLConnection(host=host, port=port, **common, **self.tls)

    async def _share_tls_context(self, connection: Any) -> None:
        if self._tls_context is None:  # reads the files of trusted certificates
            holder = connection.ssl_context
            await anyio.to_thread.run_sync(holder.get)
            self._tls_context = holder
        connection.ssl_context = self._tls_context


def _drop(connection: Any) -> None:
    writer = getattr(connection, "_writer", None)
    if writer is not None:
        writer.transport.abort()
        connection._writer = connection._reader = None
