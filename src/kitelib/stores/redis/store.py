"""The Redis tier: one server, Sentinel, or Redis Cluster, over redis-py and hiredis."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Final

import anyio

from kitelib.abc import Clock, StoredItem, StoreStats
from kitelib.errors import ConfigError, StoreError
from kitelib.stores.redis.fault import Fault
from kitelib.stores.redis.hits import RedisLedger
from kitelib.stores.redis.nodes import PIPELINE_BYTES, Command, Node, Reply
from kitelib.stores.redis.scan import Listing, Sizes
from kitelib.stores.redis.topology import Topology
from kitelib.stores.redis.url import parse_redis_url
from kitelib.stores.redis.wire import Dialer, pack, pack_set, require_redis
from kitelib.upcycle.unit import MAX_DATA_BYTES

__all__ = ["DEFAULT_TTL_S", "RedisStore"]

DEFAULT_TTL_S: Final = 8 * 24 * 3600.0
"""Seconds a value lives where no `ttl_s` is given: no key is ever without an end."""
# A unit's head and token ids take less than the last MiB; Redis itself takes 512 MiB (proto-max-bulk-len).
_MAX_VALUE_BYTES: Final = min(MAX_DATA_BYTES + 2**20, 512 * 2**20)
_LOOKED_UP_AT_ONCE: Final = 512
_FIRST_GUESS_BYTES: Final = 2**20
_ROUNDS: Final = 5  # a slot on its way may give MOVED, then ASK, each more than once
_OLD_PICTURE: Final = frozenset({"DOWN", "MOVED", "CLUSTERDOWN", "READONLY", "LOADING", "MASTERDOWN"})
_EPOCH_NAME: Final = re.compile(r"[0-9a-z_.-]{1,64}")
_EPOCH_TEXT: Final = re.compile(rb"[0-9]{1,19}")
# Decimal texts are compared as such, since Lua's numbers are exact up to 2**53 only.
_RAISE_EPOCH: Final = """
local now, new = redis.call('GET', KEYS[1]) or '0', ARGV[1]
if #now < #new or (#now == #new and now < new) then
  redis.call('SET', KEYS[1], new)
  return new
end
return now
"""


class RedisStore:
    """A `SharedStore` and `HitLedger` in Redis.

    Keys are spread by their hash tag; a call sends one pipeline per server, to all servers at once. Each value is one
    key, written with its time to live in one SET. A server that is dead, hanging or refusing costs its own keys only:
    they are misses and count in `StoreStats.errors`. After three failures in a row a server is not asked any more until
    a PING in the background succeeds. A cancelled call closes the connections that it was using, so no later call can
    get its replies.

    Epochs have no time to live, and their keys (``kite-epoch:{name}``) are outside ``kite:``. Redis replicates after it
    answered, so a failover can lose the last `raise_epoch`. The highest value that this object saw is remembered:
    `get_epoch` never goes below it, and writes it again where Redis has less. `raise_epoch` is idempotent. With a
    ``maxmemory`` bound use a ``volatile-...`` policy, which evicts values and spares epochs.

    Args:
        url: see `kitelib.stores.redis.url.parse_redis_url`.
        ttl_s: seconds a value lives; None means `DEFAULT_TTL_S`.
        connect_timeout: seconds that opening a connection may take, with TLS and login.
        socket_timeout: seconds that a server may stay silent within a call.
        replica_reads: whether `get_many`, `leading_run` and `get_heads` may ask replicas. A replica that lags is a
            miss. Epochs always come from the primary.
        clock: time source of the breakers and of `list_items`.
        connections: most connections per server. Each holds about 1.3 MiB of buffers and may have 1 MiB of values, or
            two larger ones, on its way here, or 8 MiB on its way there.

    Raises:
        ConfigError: the URL or an option is wrong.
        MissingExtraError: redis-py or hiredis is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        ttl_s: float | None = None,
        connect_timeout: float = 0.5,
        socket_timeout: float = 0.3,
        replica_reads: bool = False,
        clock: Clock | None = None,
        connections: int = 4,
    ) -> None:
        for name, seconds in (
            ("ttl_s", ttl_s),
            ("connect_timeout", connect_timeout),
            ("socket_timeout", socket_timeout),
        ):
            if seconds is not None and not 0.001 <= seconds < 1e9:
                raise ConfigError(f"{name} is {seconds}; give seconds from 0.001 to 1e9")
        if connections < 1:
            raise ConfigError(f"connections is {connections}; give at least 1")
        target = parse_redis_url(url)
        require_redis()
        self._name = str(target)
        self._ttl_ms = round(1000 * (DEFAULT_TTL_S if ttl_s is None else ttl_s))
        self._replica_reads = replica_reads
        self._time = time.time if clock is None else clock.time

        def dialer(username: str | None, password: str | None, db: int) -> Dialer:
            return Dialer(username, password, db, target.tls, connect_timeout, socket_timeout, _MAX_VALUE_BYTES)

        self._dialer = dialer(target.username, target.password, target.db)
        self._topology = Topology(
            target,
            self._dialer,
            dialer(target.sentinel_username, target.sentinel_password, 0),
            connections,
            replica_reads,
            clock,
        )
        self._listing = Listing()
        self._sizes = Sizes()
        self._guess_bytes = _FIRST_GUESS_BYTES  # size of the values read lately
        self._epochs: dict[str, int] = {}
        self._ledger = RedisLedger(self._ask)
        self._hits = self._misses = self._dropped = self._errors = 0

    def __repr__(self) -> str:
        return f"<RedisStore {self._name}>"

    def limit_values(self, max_bytes: int) -> None:
        """A longer value is refused before it comes in: see `Tier.limit_values`. Holds for new connections."""
        self._dialer.max_value_bytes = min(max_bytes, _MAX_VALUE_BYTES)

    async def warm(self) -> None:
        await self._topology.ensure()
        nodes = self._topology.primaries()
        replies = await self._each_node(nodes, lambda _: [Command("", (pack("PING"),))])
        faults = [reply for (reply,) in replies if isinstance(reply, Fault)]
        self._check(faults, len(nodes), "warm")

    async def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        unique = dict.fromkeys(keys)
        commands = [Command(key, (pack("GET", key),), self._guess_bytes, bulk=True) for key in unique]
        found = dict(zip(unique, await self._read(commands, "get_many"), strict=True))
        sizes = [len(value) for value in found.values() if isinstance(value, bytes)]
        if sizes:  # at least half of the last guess, so that a few small values don't swell the next pipelines
            self._guess_bytes = max(*sizes, self._guess_bytes // 2, 1)
        values = [self._value(found[key]) for key in keys]
        self._hits += len(values) - values.count(None)
        self._misses += sum(found[key] is None for key in keys)
        return values

    async def put_many(self, items: Sequence[tuple[str, bytes]]) -> None:
        fitting = {key: value for key, value in items if len(value) <= _MAX_VALUE_BYTES}
        self._dropped += len(dict(items)) - len(fitting)
        commands = [
            Command(key, pack_set(key, bytes(value), self._ttl_ms), len(value)) for key, value in fitting.items()
        ]
        faults: list[Fault] = []
        for part in _within(commands, PIPELINE_BYTES):
            replies = await self._route(part) if part else []
            faults += [reply for reply in replies if isinstance(reply, Fault)]
        self._dropped += len(faults)
        self._check(faults, len(commands), "put_many")

    async def leading_run(self, keys: Sequence[str]) -> int:
        for start in range(0, len(keys), _LOOKED_UP_AT_ONCE):
            part = keys[start : start + _LOOKED_UP_AT_ONCE]
            replies = await self._read([Command(key, (_exists(key),)) for key in part], "leading_run")
            for count, reply in enumerate(replies):
                if reply != 1:
                    return start + count
        return len(keys)

    async def delete_many(self, keys: Sequence[str]) -> int:
        commands = [Command(key, (pack("UNLINK", key),)) for key in dict.fromkeys(keys)]
        replies = await self._ask(commands, "delete_many")
        return sum(reply for reply in replies if isinstance(reply, int))

    async def get_heads(self, keys: Sequence[str], num_bytes: int) -> list[bytes | None]:
        commands = [
            command
            for key in keys
            for command in (
                Command(key, (pack("GETRANGE", key, 0, num_bytes - 1),), num_bytes),
                Command(key, (_exists(key),)),  # GETRANGE can't tell an empty value from none
            )
        ]
        replies = await self._route(commands, replica=self._replica_reads) if commands else []
        pairs = list(zip(replies[::2], replies[1::2], strict=True))
        failed = [next((each for each in pair if isinstance(each, Fault)), None) for pair in pairs]
        self._check([fault for fault in failed if fault is not None], len(pairs), "get_heads")
        return [head if isinstance(head, bytes) and there == 1 else None for head, there in pairs]

    async def list_items(self) -> AsyncIterator[list[StoredItem]]:
        await self._topology.ensure()
        nodes = self._topology.primaries()
        faults: list[Fault] = []
        for node in nodes:
            async for page in self._listing.pages(self._topology.quiet(node), self._time):
                if isinstance(page, Fault):
                    faults.append(page)
                elif page:
                    yield page
        self._check(faults, len(nodes), "list_items")

    async def get_epoch(self, name: str) -> int:
        key = _epoch_key(name)
        epoch = self._epoch(await self._one(Command(key, (pack("GET", key),)), "get_epoch"), name)
        known = self._epochs.get(name, 0)
        return await self.raise_epoch(name, known) if epoch < known else self._remember(name, epoch)

    async def raise_epoch(self, name: str, epoch: int) -> int:
        key = _epoch_key(name)
        if not 0 <= epoch < 2**63:
            raise StoreError(f"the epoch of {name!r} can't be {epoch}; give 0 to 2**63 - 1")
        wanted = max(epoch, self._epochs.get(name, 0))
        if wanted == 0:
            return await self.get_epoch(name)
        command = Command(key, (pack("EVAL", _RAISE_EPOCH, 1, key, str(wanted)),))
        return self._remember(name, self._epoch(await self._one(command, "raise_epoch"), name))

    async def add_hits(self, model: str, day: int, hits: Mapping[str, int], roots: Mapping[str, str]) -> None:
        await self._ledger.add_hits(model, day, hits, roots)

    async def read_hits(self, model: str, days: Sequence[int], limit: int) -> tuple[dict[str, int], dict[str, str]]:
        return await self._ledger.read_hits(model, days, limit)

    async def hit_models(self) -> list[str]:
        return await self._ledger.hit_models()

    async def stats(self) -> StoreStats:
        """Counters, and what the servers that answer hold now.

        Up to 4096 keys in the databases, items and bytes are exact: every key is looked at. Above, they are estimated
        from DBSIZE and about a thousand keys per server, at most every ten seconds. Bytes are those that Redis reports
        per key (MEMORY USAGE), with its own overhead. Keys of others in the same database don't count.
        """
        items = num_bytes = 0
        try:
            await self._topology.ensure()
        except StoreError:
            self._errors += 1
        else:
            items, num_bytes, failures = await self._sizes.measure(self._topology.primaries(), self._each_node)
            self._errors += failures
        return StoreStats(
            items=items,
            bytes=num_bytes,
            hits=self._hits,
            misses=self._misses,
            evictions=0,  # Redis evicts and expires by itself and doesn't tell whose keys
            dropped=self._dropped,
            errors=self._errors,
        )

    async def aclose(self) -> None:
        await self._topology.aclose()

    async def _read(self, commands: Sequence[Command], operation: str) -> list[Reply]:
        return await self._ask(commands, operation, replica=self._replica_reads)

    async def _ask(self, commands: Sequence[Command], operation: str, *, replica: bool = False) -> list[Reply]:
        """The replies; what failed is counted, and if all did it raises StoreError."""
        replies = await self._route(commands, replica=replica) if commands else []
        self._check([reply for reply in replies if isinstance(reply, Fault)], len(commands), operation)
        return replies

    async def _one(self, command: Command, operation: str) -> Reply:
        (reply,) = await self._ask([command], operation)
        return reply

    async def _route(self, commands: Sequence[Command], *, replica: bool = False) -> list[Reply]:
        """Sends each command to the server of its key and follows redirects; a `Fault` stands for what failed."""
        await self._topology.ensure()
        topology = self._topology
        replies: list[Reply] = [None] * len(commands)
        pending: dict[int, tuple[Node | None, bool]] = {
            index: (topology.node_for(command.key, replica=replica), False) for index, command in enumerate(commands)
        }
        for _ in range(_ROUNDS):
            groups: dict[tuple[Node, bool], list[int]] = {}
            for index, (node, asking) in pending.items():
                if node is None:
                    replies[index] = Fault("no server has the slot of this key", "CLUSTERDOWN")
                else:
                    groups.setdefault((node, asking), []).append(index)
            await self._each_group(groups, commands, replies)
            pending = {}
            for (node, _), indexes in groups.items():
                for index in indexes:
                    reply = replies[index]
                    if isinstance(reply, Fault):
                        other = self._elsewhere(node, commands[index].key, reply, replica)
                        if other is not None:
                            pending[index] = other
            if not pending:
                break
        if any(isinstance(reply, Fault) and reply.code in _OLD_PICTURE for reply in replies):
            topology.doubt()
        return replies

    def _elsewhere(self, asked: Node, key: str, fault: Fault, replica: bool) -> tuple[Node, bool] | None:
        """Where else to try after a failure, and whether with ASKING; None if nowhere."""
        if fault.code in ("MOVED", "ASK"):
            node = self._topology.moved(asked, str(fault), lasting=fault.code == "MOVED")
            return None if node is None else (node, fault.code == "ASK")
        if replica and fault.code in _OLD_PICTURE:  # a replica failed: the primary knows
            primary = self._topology.node_for(key)
            if primary is not None and primary.address != asked.address:
                return primary, False
        return None

    async def _each_group(
        self, groups: dict[tuple[Node, bool], list[int]], commands: Sequence[Command], replies: list[Reply]
    ) -> None:
        async def run(node: Node, asking: bool, indexes: list[int]) -> None:
            found = await node.call([commands[index] for index in indexes], asking)
            for index, reply in zip(indexes, found, strict=True):
                replies[index] = reply

        if len(groups) == 1:
            (((node, asking), indexes),) = groups.items()
            await run(node, asking, indexes)
            return
        async with anyio.create_task_group() as group:
            for (node, asking), indexes in groups.items():
                group.start_soon(run, node, asking, indexes)

    async def _each_node(self, nodes: Sequence[Node], make: Callable[[Node], list[Command]]) -> list[list[Reply]]:
        """The replies of each server to its own commands."""
        replies: dict[int, list[Reply]] = {}

        async def run(index: int, node: Node) -> None:
            replies[index] = await node.call(make(node))

        async with anyio.create_task_group() as group:
            for index, node in enumerate(nodes):
                group.start_soon(run, index, node)
        return [replies[index] for index in range(len(nodes))]

    def _check(self, faults: Sequence[Fault], tried: int, operation: str) -> None:
        """Counts failures; raises if nothing succeeded."""
        self._errors += len(faults)
        if faults and len(faults) == tried:
            hint = ""
            if faults[0].code == "MOVED":
                hint = "; it is a node of a cluster: use a redis+cluster:// URL"
            raise StoreError(f"{operation} at {self._name} failed: {str(faults[0])[:300]}{hint}")

    @staticmethod
    def _value(reply: Reply) -> bytes | None:
        return reply if isinstance(reply, bytes) else None

    @staticmethod
    def _epoch(reply: Any, name: str) -> int:
        if reply is None:
            return 0
        if not isinstance(reply, bytes) or not _EPOCH_TEXT.fullmatch(reply):
            raise StoreError(f"the epoch {name!r} in Redis is no whole number; delete the key {_epoch_key(name)!r}")
        return min(int(reply), 2**63 - 1)

    def _remember(self, name: str, epoch: int) -> int:
        self._epochs[name] = max(epoch, self._epochs.get(name, 0))
        return self._epochs[name]


def _exists(key: str) -> bytes:
    return b"*2\r\n$6\r\nEXISTS\r\n$%d\r\n%b\r\n" % (len(key), key.encode()) if key.isascii() else pack("EXISTS", key)


def _epoch_key(name: str) -> str:
    if not _EPOCH_NAME.fullmatch(name):
        raise StoreError(f"an epoch can't be named {name[:80]!r}; use 1 to 64 of the characters [0-9a-z_.-]")
    return f"kite-epoch:{{{name}}}"


def _within(commands: Sequence[Command], num_bytes: int) -> list[list[Command]]:
    """Consecutive parts of at most so many bytes of values, or of one command."""
    parts: list[list[Command]] = [[]]
    left = num_bytes
    for command in commands:
        if parts[-1] and command.num_bytes > left:
            parts.append([])
            left = num_bytes
        parts[-1].append(command)
        left -= command.num_bytes
    return parts
