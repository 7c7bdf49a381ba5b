"""Real Redis servers on free loopback ports: one server, primary and replica with sentinels, a cluster of six.

Each object stops exactly the processes that it started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import redis

__all__ = ["RedisCluster", "RedisSentinels", "RedisServer", "free_port", "listening", "make_certificates", "wait_until"]

_HOST = "127.0.0.1"
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="redis-control")


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return probe.getsockname()[1]


def wait_until(condition: Callable[[], object], what: str, seconds: float = 20.0) -> None:
    """Returns when the condition holds; servers that don't answer count as not yet.

    Raises:
        TimeoutError: it never did.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(redis.RedisError, OSError):
            if condition():
                return
        time.sleep(0.02)
    raise TimeoutError(f"waited {seconds} s for this: {what}")


class RedisServer:
    """One redis-server process.

    Args:
        folder: where it runs; made if missing.
        options: settings, each as in redis.conf.
        port: port; a free one by default.
        tls: folder of `make_certificates`; then it listens with TLS only.
        password: of the default user, for `call`.
        sentinel: run as a sentinel, with `options` in its configuration file.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        port: int | None = None,
        tls: Path | None = None,
        password: str | None = None,
        sentinel: bool = False,
    ) -> None:
        self.folder = folder
        self.port = port or free_port()
        self.tls = tls
        self.password = password
        self._sentinel = sentinel
        self._options = options
        self._client: redis.Redis | None = None
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        """Host and port."""
        return f"{_HOST}:{self.port}"

    @property
    def url(self) -> str:
        """URL without a login."""
        return f"{'rediss' if self.tls else 'redis'}://{self.name}"

    def start(self) -> RedisServer:
        """Starts the process; waits until it answers, if only to ask for a password or to say that it is loading."""
        self.folder.mkdir(parents=True, exist_ok=True)
        listen = [f"port {self.port}"]
        if self.tls:
            listen = ["port 0", f"tls-port {self.port}", "tls-auth-clients no", f"tls-cert-file {self.tls}/server.crt"]
            listen += [f"tls-key-file {self.tls}/server.key", f"tls-ca-cert-file {self.tls}/ca.crt"]
        lines = [f"bind {_HOST}", f"dir {self.folder}", "daemonize no", "loglevel notice", f"logfile {self.folder}/log"]
        if not self._sentinel:
            lines += ['save ""', "appendonly no", "enable-protected-configs yes", "repl-diskless-sync-delay 0"]
        config = self.folder / "redis.conf"
        if not (self._sentinel and config.exists()):  # a sentinel keeps what it knows in its configuration
            config.write_text("\n".join([*listen, *lines, *self._options, ""]))
        command = ["redis-server", str(config), *(["--sentinel"] if self._sentinel else [])]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        wait_until(self._answers, f"redis-server on port {self.port} to answer")
        return self

    def _answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise RuntimeError(f"redis-server ended: {(self.folder / 'log').read_text()[-2000:]}")
        try:
            return bool(self.call("PING"))
        except redis.BusyLoadingError:
            return True

    def call(self, *words: Any) -> Any:
        """One command as the default user; its plain RESP2 reply."""
        if self._client is None:
            tls = {"ssl": True, "ssl_ca_certs": f"{self.tls}/ca.crt"} if self.tls else {}
            self._client = redis.Redis(
                host=_HOST,
                port=self.port,
                password=self.password,
                socket_timeout=5,
                decode_responses=False,
                protocol=2,
                retry=None,
                **tls,  # type: ignore[arg-type]
            )
            self._client.response_callbacks.clear()  # plain replies, whatever the command
        client = self._client
        # In a thread: a test may call this from within the store's code, where blocking calls are failures.
        return _THREAD.submit(client.execute_command, *words).result()

    def pause(self) -> None:
        """Stops the process where it is: its port accepts, nothing answers."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets a paused process go on. Does nothing to one that runs or has ended."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends the process at once. Idempotent."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    stop = kill

    def restart(self) -> None:
        """Starts it again on the same port, in the same folder, after killing it if it runs."""
        self.kill()
        self.start()

    def __repr__(self) -> str:
        return f"<RedisServer {self.name}>"


class RedisSentinels:
    """A primary, a replica, and three sentinels that watch them as service ``kite``."""

    def __init__(self, folder: Path) -> None:
        self.servers = [RedisServer(folder / name) for name in ("primary", "replica")]
        self.sentinels = [
            RedisServer(
                folder / f"sentinel{index}",
                f"sentinel monitor kite {_HOST} {self.servers[0].port} 2",
                "sentinel down-after-milliseconds kite 500",
                "sentinel failover-timeout kite 2000",
                sentinel=True,
            )
            for index in range(3)
        ]

    @property
    def url(self) -> str:
        """URL of the service."""
        return f"redis+sentinel://{','.join(each.name for each in self.sentinels)}/kite/0"

    def start(self) -> RedisSentinels:
        """Starts all; waits until the sentinels know each other and the replica is in step."""
        primary, replica = (server.start() for server in self.servers)
        replica.call("REPLICAOF", _HOST, primary.port)
        wait_until(lambda: _replication(replica).get("master_link_status") == "up", "the replica to be in step")
        for sentinel in self.sentinels:
            sentinel.start()
        for sentinel in self.sentinels:
            wait_until(lambda each=sentinel: self._knows_all(each), "the sentinels to know each other")
        return self

    @staticmethod
    def _knows_all(sentinel: RedisServer) -> bool:
        facts = sentinel.call("SENTINEL", "MASTER", "kite")
        text = {_text(name): _text(value) for name, value in zip(facts[::2], facts[1::2], strict=True)}
        return text["num-other-sentinels"] == "2" and text["num-slaves"] == "1"

    def primary(self) -> RedisServer:
        """The server that the sentinels call the primary."""
        _, port = self.sentinels[0].call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "kite")
        return next(server for server in self.servers if server.port == int(port))

    def stop(self) -> None:
        """Ends all."""
        for server in (*self.sentinels, *self.servers):
            server.resume()
            server.kill()


class RedisCluster:
    """Three primaries and three replicas."""

    def __init__(self, folder: Path, *options: str, node_timeout_ms: int = 700) -> None:
        settings = (
            "cluster-enabled yes",
            f"cluster-node-timeout {node_timeout_ms}",
            "cluster-require-full-coverage no",
            "cluster-replica-validity-factor 0",
            "cluster-migration-barrier 5",
            "repl-ping-replica-period 1",  # CLUSTER SLOTS leaves replicas out until something was replicated
            *options,
        )
        self.nodes = [RedisServer(folder / f"node{i}", *settings, f"cluster-port {free_port()}") for i in range(6)]

    @property
    def url(self) -> str:
        """URL with two of the nodes."""
        return f"redis+cluster://{self.nodes[0].name},{self.nodes[1].name}"

    def start(self) -> RedisCluster:
        """Starts all; waits until every node sees a whole cluster with replicas in step."""
        for node in self.nodes:
            node.start()
        ranges = ((0, 5460), (5461, 10922), (10923, 16383))
        for epoch, node in enumerate(self.nodes, 1):
            node.call("CLUSTER", "SET-CONFIG-EPOCH", epoch)
        for node in self.nodes[1:]:
            bus = int(node.call("CONFIG", "GET", "cluster-port")[1])
            self.nodes[0].call("CLUSTER", "MEET", _HOST, node.port, bus)
        for node, (first, last) in zip(self.nodes[:3], ranges, strict=True):
            node.call("CLUSTER", "ADDSLOTSRANGE", first, last)
        ids = [_text(node.call("CLUSTER", "MYID")) for node in self.nodes]
        for index, node in enumerate(self.nodes[3:]):
            wait_until(lambda i=index, n=node: n.call("CLUSTER", "REPLICATE", ids[i]), "a node to know its primary")
        self.wait_whole()
        return self

    def wait_whole(self, seconds: float = 30.0) -> None:
        """Waits until all six run, agree, all slots have a primary, and replicas are in step."""

        def whole() -> bool:
            for node in self.nodes:
                if node.process is None or b"cluster_state:ok" not in node.call("CLUSTER", "INFO"):
                    return False
            pictures = {self._slots(node) for node in self.nodes}
            primaries = self.primaries()
            members = {port for picture in pictures for row in picture for port in row[2:]}
            return (
                len(pictures) == 1
                and len(members) == 6
                and len(primaries) == 3
                and all(
                    node in primaries or _replication(node).get("master_link_status") == "up" for node in self.nodes
                )
            )

        wait_until(whole, "the cluster to be whole", seconds)

    @staticmethod
    def _slots(node: RedisServer) -> tuple[Any, ...]:
        """Slot ranges with their primary and replicas, as one node sees them."""
        rows = node.call("CLUSTER", "SLOTS")
        return tuple(sorted((row[0], row[1], row[2][1], *sorted(each[1] for each in row[3:])) for row in rows))

    def primaries(self) -> list[RedisServer]:
        """The running nodes that call themselves primary and own slots."""
        return [node for node in self.nodes if node.process and self._role(node) == "master"]

    def replicas(self) -> list[RedisServer]:
        """The running nodes that call themselves replica."""
        return [node for node in self.nodes if node.process and self._role(node) == "slave"]

    @staticmethod
    def _role(node: RedisServer) -> str:
        try:
            return _replication(node).get("role", "")
        except (redis.RedisError, OSError):
            return ""

    def owner(self, key: str) -> RedisServer:
        """The primary that has the key's slot, as a running node tells."""
        asked = next(node for node in self.nodes if node.process and self._role(node))
        slot = int(asked.call("CLUSTER", "KEYSLOT", key))
        for node in self.primaries():
            if any(first <= slot <= last for first, last in _own_ranges(node)):
                return node
        raise LookupError(f"no running node has slot {slot}")

    def replica_of(self, primary: RedisServer) -> RedisServer:
        """A replica of that primary."""
        return next(node for node in self.replicas() if _replication(node)["master_port"] == str(primary.port))

    def kill_primary(self, key: str | None = None) -> RedisServer:
        """Kills the primary that has the key, or the first; gives it, for `restart`."""
        node = self.owner(key) if key is not None else self.primaries()[0]
        node.kill()
        return node

    def pause(self, node: RedisServer) -> None:
        """SIGSTOP."""
        node.pause()

    def resume(self, node: RedisServer) -> None:
        """SIGCONT."""
        node.resume()

    def restart(self, node: RedisServer) -> None:
        """Starts a killed node again; it comes back empty and takes its place from the others."""
        node.restart()

    def heal(self) -> None:
        """Resumes and restarts whatever is not running, then waits until the cluster is whole."""
        for node in self.nodes:
            node.resume()
            if node.process is None:
                node.start()
        self.wait_whole()

    def flush(self) -> None:
        """Empties all primaries that answer."""
        for node in self.primaries():
            with contextlib.suppress(redis.RedisError, OSError):
                node.call("FLUSHALL")

    @contextlib.contextmanager
    def moving_slot(self, key: str, *, move_keys: bool = True) -> Iterator[tuple[RedisServer, RedisServer]]:
        """Inside, the key's slot is on its way from one primary to another (source, target): its keys have gone, and
        the source answers ASK for them. At the end the target owns it, and the source answers MOVED."""
        source = self.owner(key)
        target = next(node for node in self.primaries() if node is not source)
        slot = int(source.call("CLUSTER", "KEYSLOT", key))
        ids = {node: _text(node.call("CLUSTER", "MYID")) for node in (source, target)}
        target.call("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
        source.call("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        while move_keys and (keys := source.call("CLUSTER", "GETKEYSINSLOT", slot, 100)):
            source.call("MIGRATE", _HOST, target.port, "", 0, 5000, "KEYS", *keys)
        try:
            yield source, target
        finally:
            while keys := source.call("CLUSTER", "GETKEYSINSLOT", slot, 100):
                source.call("MIGRATE", _HOST, target.port, "", 0, 5000, "KEYS", *keys)
            for node in (target, source, *(each for each in self.primaries() if each not in (source, target))):
                node.call("CLUSTER", "SETSLOT", slot, "NODE", ids[target])

    def move_slot(self, key: str) -> None:
        """Moves the slot of a key, with its keys, to another primary."""
        with self.moving_slot(key):
            pass

    @contextlib.contextmanager
    def lagging(self) -> Iterator[None]:
        """Inside, nothing is replicated: replicas answer with what they had before."""
        replicas = self.replicas()
        for node in replicas:
            node.call("CONFIG", "SET", "masterauth", "refused: the primary has no password")
            node.call("CLIENT", "KILL", "TYPE", "master")
        wait_until(
            lambda: all(_replication(node)["master_link_status"] == "down" for node in replicas), "no replication"
        )
        try:
            yield
        finally:
            for node in replicas:
                node.call("CONFIG", "SET", "masterauth", "")

    def stop(self) -> None:
        """Ends all."""
        for node in self.nodes:
            node.resume()
            node.kill()


@contextlib.asynccontextmanager
async def listening(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """URL of a server that answers as the test says, which no real server would."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await answer(reader, writer)
        writer.transport.abort()

    server = await asyncio.start_server(serve, _HOST, 0)
    try:
        yield f"redis://{_HOST}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.01)  # closed transports let go of their sockets


def make_certificates(folder: Path) -> Path:
    """A certificate authority (ca.crt) and a certificate for 127.0.0.1 and localhost (server.crt, server.key)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "san").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    for arguments in (
        ["req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=kite test"],
        ["req", *curve[:-2], "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=localhost"],
        [
            "x509",
            "-req",
            "-in",
            "server.csr",
            "-CA",
            "ca.crt",
            "-CAkey",
            "ca.key",
            "-CAcreateserial",
            "-out",
            "server.crt",
            "-days",
            "2",
            "-extfile",
            "san",
        ],
    ):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, env=dict(os.environ))
    return folder


def _replication(node: RedisServer) -> dict[str, str]:
    lines = _text(node.call("INFO", "replication")).splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _own_ranges(node: RedisServer) -> list[tuple[int, int]]:
    rows = _text(node.call("CLUSTER", "NODES")).splitlines()
    mine = next(row for row in rows if "myself" in row.split()[2])
    ranges = [word.partition("-") for word in mine.split()[8:] if not word.startswith("[")]
    return [(int(first), int(last or first)) for first, _, last in ranges]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
