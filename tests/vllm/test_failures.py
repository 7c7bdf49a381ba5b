"""Whatever the tiers do, requests finish, with the same answers."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.engines import Engine, open_engine, prompt, transfer_config
from tests.vllm.models import BLOCK

PROMPTS = [prompt(21, 10 * BLOCK + 5), prompt(22, 8 * BLOCK)]
TOKENS = 16


@pytest.fixture(scope="module")
def plain(reference: Engine) -> list[list[int]]:
    """The answers without the connector."""
    return reference.generate(prompts=PROMPTS, max_tokens=TOKENS)["tokens"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _redis(folder: Path) -> Iterator[int]:
    port = _free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < until, "redis-server does not answer"
                time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait()


class _Proxy(socketserver.ThreadingTCPServer):
    """Hands bytes to a server and back, until as many came back as `budget` says: then the server is gone."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = port
        self.budget: int | None = None
        self.dead = False
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def spend(self, count: int) -> int:
        """How many of `count` bytes may still pass."""
        if self.budget is None:
            return count
        passed = min(count, self.budget)
        self.budget -= passed
        self.dead |= not self.budget
        return passed


class _Handler(socketserver.BaseRequestHandler):
    server: _Proxy

    def handle(self) -> None:
        if self.server.dead:
            return
        with socket.create_connection(("127.0.0.1", self.server.target)) as behind:
            thread = threading.Thread(target=self._forward, args=(behind,), daemon=True)
            thread.start()
            with contextlib.suppress(OSError):
                while data := behind.recv(65536):
                    self.request.sendall(data[: self.server.spend(len(data))])
                    if self.server.dead:
                        break
            for each in (self.request, behind):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            thread.join()

    def _forward(self, behind: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := self.request.recv(65536):
                behind.sendall(data)


def test_a_redis_that_dies_in_the_middle_of_a_load(model: Path, tmp_path: Path, plain: list[list[int]]) -> None:
    with _redis(tmp_path) as port, _Proxy(port) as proxy:
        pool = {"redis": f"redis://127.0.0.1:{proxy.server_address[1]}/0", "memory_bytes": 0, "socket_timeout": 5.0}
        with open_engine(model, tmp_path / "log", transfer_config(pool)) as engine:
            assert engine.generate(prompts=PROMPTS, max_tokens=TOKENS)["tokens"] == plain
            engine.settle()
            engine.reset()
            whole = engine.generate(prompts=PROMPTS, max_tokens=TOKENS)
            assert whole["tokens"] == plain
            assert whole["cached"] == [10 * BLOCK, 7 * BLOCK]
            loaded = engine.stats()["counters"]["loaded_blocks"]
            engine.reset()
            proxy.budget = 3_000_000  # some of the 17 blocks of 384 KiB come through
            assert engine.generate(prompts=PROMPTS, max_tokens=TOKENS)["tokens"] == plain
            counters = engine.stats()["counters"]
            assert proxy.dead
            assert counters["failed_blocks"] > 0
            assert counters["failed_blocks"] + counters["loaded_blocks"] - loaded == 17
            engine.reset()
            assert engine.generate(prompts=PROMPTS, max_tokens=TOKENS)["tokens"] == plain, "with the server gone"


def test_damaged_units_are_computed_again(model: Path, disk: Path, tmp_path: Path, plain: list[list[int]]) -> None:
    transfer = transfer_config({"disk": str(disk), "memory_bytes": 0})
    with open_engine(model, tmp_path / "first", transfer) as engine:
        engine.generate(prompts=PROMPTS, max_tokens=TOKENS)
    files = sorted((each for each in disk.rglob("*") if each.is_file()), key=lambda each: each.stat().st_size)
    units = [each for each in files if each.stat().st_size > 2**18]
    assert len(units) >= 17
    for each in units[::3]:
        data = bytearray(each.read_bytes())
        data[len(data) // 2] ^= 1
        each.write_bytes(data)
    with open_engine(model, tmp_path / "second", transfer) as engine:
        assert engine.generate(prompts=PROMPTS, max_tokens=TOKENS)["tokens"] == plain
        assert engine.stats()["counters"]["failed_blocks"] > 0
        engine.settle()
        engine.reset()
        again = engine.generate(prompts=PROMPTS, max_tokens=TOKENS)
    assert again["tokens"] == plain
    assert again["cached"] == [10 * BLOCK, 7 * BLOCK], "what was damaged was stored again"


def test_tiers_that_are_not_there_cost_nothing_but_time(model: Path, tmp_path: Path, plain: list[list[int]]) -> None:
    pool = {"redis": f"redis://127.0.0.1:{_free_port()}/0", "memory_bytes": 0}
    with open_engine(model, tmp_path / "log", transfer_config(pool)) as engine:
        for _ in range(2):
            assert engine.generate(prompts=PROMPTS, max_tokens=TOKENS)["tokens"] == plain
            engine.reset()
        assert engine.generate(prompts=PROMPTS, max_tokens=TOKENS)["cached"] == [0, 0]
