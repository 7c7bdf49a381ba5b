"""Which Redis server has which key: one server, what the sentinels say, or the slots of a cluster."""

from __future__ import annotations

import asyncio
import binascii
import dataclasses
import random
import time
from collections.abc import Sequence
from typing import Any, Final, Literal

import anyio

from kitelib.abc import Clock
from kitelib.errors import StoreError
from kitelib.runtime.supervisor import Supervisor
from kitelib.stores.breaker import Breaker
from kitelib.stores.redis.fault import Fault
from kitelib.stores.redis.nodes import Command, Node
from kitelib.stores.redis.url import Address, RedisTarget
from kitelib.stores.redis.wire import Dialer, pack

__all__ = ["Topology", "hash_slot"]

_Mode = Literal["plain", "replica", "quiet"]
_NUM_SLOTS: Final = 16384
_ASKED_AT_ONCE: Final = 3
_REFRESH_EVERY_S: Final = 0.25  # at most, while something is wrong
_MAX_AGE_S: Final = 10.0  # of a picture that nothing contradicts


@dataclasses.dataclass(frozen=True, slots=True)
class _Shard:
    primary: Address
    replicas: tuple[Address, ...] = ()


def hash_slot(key: str) -> int:
    """The slot of a key: CRC-16/XMODEM of its hash tag, modulo 16384 (Redis Cluster specification, "Hash tags")."""
    begin = key.find("{") + 1
    end = key.find("}", begin) if begin else -1
    tag = key[begin:end] if begin and end > begin else key
    return binascii.crc_hqx(tag.encode(), 0) % _NUM_SLOTS


class Topology:
    """Knows the servers and asks again when an answer shows that the picture is old.

    A request only waits for the first picture. Later ones are fetched in the background: at once after a redirect or a
    failure, but at most every quarter of a second, and every ten seconds in any case.

    Args:
        target: what the URL says.
        dialer: opens connections to the servers with keys.
        sentinel_dialer: opens connections to sentinels.
        max_connections: most connections per server.
        replicas: whether replicas are of interest.
        clock: time source of the breakers.
    """

    def __init__(
        self,
        target: RedisTarget,
        dialer: Dialer,
        sentinel_dialer: Dialer,
        max_connections: int,
        replicas: bool,
        clock: Clock | None,
    ) -> None:
        self._target = target
        self._dialer = dialer
        self._sentinel_dialer = sentinel_dialer
        self._max_connections = max_connections
        self._replicas = replicas
        self._clock = clock
        self._breaker = Breaker(max_failures=1, open_s=_REFRESH_EVERY_S, max_open_s=2.0, clock=clock)
        self._nodes: dict[tuple[Address, _Mode], Node] = {}
        self._sentinels: dict[Address, Node] = {}
        self._slots: list[_Shard | None] = []
        self._asked_at = -_MAX_AGE_S
        self._refresh: asyncio.Task[Fault | None] | None = None
        self._fault = Fault("no server answered", "DOWN")  # of the last refresh that failed
        self._supervisor: Supervisor | None = None
        self._turn = 0
        self._closed = False

    async def ensure(self) -> None:
        """Waits for the first picture; starts the next if this one is old.

        Raises:
            StoreError: there is none to be had, or the store is closed.
        """
        if self._closed:
            raise StoreError(f"the store at {self._target} is closed")
        if self._supervisor is None:
            self._supervisor = Supervisor()
            self._supervisor.start()
            if self._target.kind == "standalone":
                self._slots = [_Shard(self._target.addresses[0])]
        if self._slots:
            if time.monotonic() - self._asked_at > _MAX_AGE_S:
                self.doubt()
            return
        if self._refresh is None or self._refresh.done():
            if not self._breaker.allows():
                raise StoreError(
                    f"Redis at {self._target} can't be reached and is not asked now, after this: {self._fault}"
                )
            self._begin_refresh()
        assert self._refresh is not None
        fault = await asyncio.shield(self._refresh)
        if fault is not None:
            raise StoreError(f"Redis at {self._target} can't be reached: {fault}")

    def doubt(self) -> None:
        """Something contradicts the picture: fetches another in the background, unless one was fetched just now."""
        running = self._refresh is not None and not self._refresh.done()
        due = time.monotonic() - self._asked_at >= _REFRESH_EVERY_S
        if self._target.kind != "standalone" and not running and due and not self._closed:
            self._begin_refresh()

    def node_for(self, key: str, *, replica: bool = False) -> Node | None:
        """The server to ask for a key; None if no server has its slot.

        Args:
            key: the key.
            replica: a replica will do; they take turns with each other, and the primary steps in where all are down.
        """
        shard = self._slots[hash_slot(key) if self._target.kind == "cluster" else 0]
        if shard is None:
            return None
        if replica and shard.replicas:
            self._turn += 1
            for offset in range(len(shard.replicas)):
                node = self._node(shard.replicas[(self._turn + offset) % len(shard.replicas)], "replica")
                if node.breaker.state == "closed":
                    return node
        return self._node(shard.primary)

    def moved(self, asked: Node, text: str, *, lasting: bool) -> Node | None:
        """Follows ``MOVED slot host:port`` (lasting) or ``ASK ...``: the server to ask instead; None if unreadable."""
        words = text.split(" ")
        if len(words) != 3 or not words[1].isdigit() or self._target.kind != "cluster":
            return None
        host, _, port = words[2].rpartition(":")
        slot = int(words[1])
        if not port.isdigit() or slot >= _NUM_SLOTS:
            return None
        address = (host or asked.address[0], int(port))
        if lasting:
            self._slots[slot] = _Shard(address)
            self.doubt()
        return self._node(address)

    def primaries(self) -> list[Node]:
        """All servers that own keys."""
        return [self._node(address) for address in sorted({shard.primary for shard in self._shards()})]

    def quiet(self, node: Node) -> Node:
        """The same server over a connection whose reads don't count as uses, where it can do that (Redis 7.2)."""
        return self._node(node.address, "quiet")

    async def aclose(self) -> None:
        """Closes all connections and ends background work. Idempotent."""
        self._closed = True
        if self._refresh is not None:
            self._refresh.cancel()
            await asyncio.wait([self._refresh])
        if self._supervisor is not None:
            await self._supervisor.aclose()
        for node in (*self._nodes.values(), *self._sentinels.values()):
            node.close()

    def _node(self, address: Address, mode: _Mode = "plain") -> Node:
        node = self._nodes.get((address, mode))
        if node is None:
            # Outside a cluster a replica answers READONLY with an error, and reads without being told.
            preamble = {"plain": [], "replica": [pack("READONLY")], "quiet": [pack("CLIENT", "NO-TOUCH", "ON")]}[mode]
            node = self._new_node(address, self._dialer, preamble)
            self._nodes[address, mode] = node
        return node

    def _new_node(self, address: Address, dialer: Dialer, preamble: Sequence[bytes] = ()) -> Node:
        assert self._supervisor is not None
        return Node(address, dialer, self._max_connections, self._clock, self._supervisor.spawn, preamble)

    def _begin_refresh(self) -> None:
        self._asked_at = time.monotonic()
        self._refresh = asyncio.get_running_loop().create_task(self._look(), name="kite-redis-topology")

    async def _look(self) -> Fault | None:
        """Asks a few servers at once and takes the first usable picture; what is wrong, or None."""
        asked = self._whom_to_ask()
        found: list[list[_Shard | None]] = []
        faults: list[Fault] = []

        async def ask(node: Node) -> None:
            picture = await (self._ask_sentinel(node) if self._target.kind == "sentinel" else self._ask_cluster(node))
            if isinstance(picture, Fault):
                faults.append(picture)
            else:
                found.append(picture)
                group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            for node in asked:
                group.start_soon(ask, node)
        if not found:
            self._breaker.fail()
            self._fault = faults[0] if faults else Fault("no server answered", "DOWN")
            return self._fault
        self._breaker.succeed()
        self._slots = found[0]
        self._forget_others()
        return None

    def _whom_to_ask(self) -> list[Node]:
        if self._target.kind == "sentinel":
            for address in self._target.addresses:
                self._sentinels.setdefault(address, self._new_node(address, self._sentinel_dialer))
            nodes = list(self._sentinels.values())
        else:
            known = [node for (_, mode), node in self._nodes.items() if mode == "plain"]
            nodes = list({node.address: node for node in (*map(self._node, self._target.addresses), *known)}.values())
        random.shuffle(nodes)
        nodes.sort(key=lambda node: node.breaker.state != "closed")
        return nodes[:_ASKED_AT_ONCE]

    async def _ask_cluster(self, node: Node) -> list[_Shard | None] | Fault:
        (reply,) = await node.call([Command("", (pack("CLUSTER", "SLOTS"),))])
        if isinstance(reply, Fault):
            return reply
        slots: list[_Shard | None] = [None] * _NUM_SLOTS
        try:
            for first, last, *owners in reply:
                addresses = [(_text(owner[0]) or node.address[0], int(owner[1])) for owner in owners]
                shard = _Shard(addresses[0], tuple(addresses[1:]) if self._replicas else ())
                slots[first : last + 1] = [shard] * (last + 1 - first)
        except (TypeError, ValueError, IndexError):
            return Fault(f"{node.name} gave an answer to CLUSTER SLOTS that can't be read", "DOWN")
        if len(slots) != _NUM_SLOTS or not any(slots):
            return Fault(f"{node.name} knows of no server with slots", "DOWN")
        return slots

    async def _ask_sentinel(self, node: Node) -> list[_Shard | None] | Fault:
        service = self._target.service
        commands = [Command("", (pack("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service),))]
        if self._replicas:
            commands.append(Command("", (pack("SENTINEL", "REPLICAS", service),)))
        primary, *rest = await node.call(commands)
        if isinstance(primary, Fault):
            return primary
        if not isinstance(primary, list) or len(primary) != 2:
            return Fault(f"the sentinel {node.name} knows no service {service!r}", "DOWN")
        try:
            replicas: list[Address] = []
            for fields in rest[0] if rest and isinstance(rest[0], list) else ():
                each = {_text(name): _text(value) for name, value in zip(fields[::2], fields[1::2], strict=False)}
                if "down" not in each.get("flags", "down") and each.get("master-link-status") == "ok":
                    replicas.append((each["ip"], int(each["port"])))
            return [_Shard((_text(primary[0]), int(primary[1])), tuple(replicas))]
        except (TypeError, ValueError, KeyError):
            return Fault(f"the sentinel {node.name} gave an answer that can't be read", "DOWN")

    def _shards(self) -> list[_Shard]:
        # By identity: hashing 16384 entries would hold the event loop up.
        return [shard for shard in {id(shard): shard for shard in self._slots}.values() if shard is not None]

    def _forget_others(self) -> None:
        """Closes the connections to servers that are no longer part of it."""
        shards = self._shards()
        wanted = {shard.primary for shard in shards}.union(
            *(shard.replicas for shard in shards), self._target.addresses
        )
        for name in [name for name in self._nodes if name[0] not in wanted]:
            self._nodes.pop(name).close()


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")
