"""Pytest plugin: Redis servers for the whole test session, emptied and healed for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.redis_servers import RedisCluster, RedisSentinels, RedisServer, make_certificates

__all__ = ["redis_cluster", "redis_sentinels", "redis_server", "redis_tls_server"]


@pytest.fixture(scope="session")
def _redis_server_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    folder = tmp_path_factory.mktemp("redis")
    server = RedisServer(folder / "server", f"unixsocket {folder}/redis.sock").start()
    yield server
    server.stop()


@pytest.fixture
def redis_server(_redis_server_process: RedisServer) -> RedisServer:
    """One empty server; it also listens at ``redis.sock`` in the parent of its folder."""
    _redis_server_process.call("FLUSHALL")
    return _redis_server_process


@pytest.fixture(scope="session")
def redis_tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server with TLS only, and the ACL user ``kite`` with password ``s3cret/@:``; the default user is off."""
    folder = tmp_path_factory.mktemp("redis-tls")
    users = ("user kite on >s3cret/@: ~kite* +@all", "user default on >admin ~* +@all")
    server = RedisServer(folder / "server", *users, tls=make_certificates(folder / "tls"), password="admin").start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def _redis_cluster_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    cluster = RedisCluster(tmp_path_factory.mktemp("redis-cluster"))
    try:
        yield cluster.start()
    finally:
        cluster.stop()


@pytest.fixture
def redis_cluster(_redis_cluster_processes: RedisCluster) -> RedisCluster:
    """Three primaries and three replicas, whole and empty; a test may break it as it likes."""
    _redis_cluster_processes.heal()
    _redis_cluster_processes.flush()
    return _redis_cluster_processes


@pytest.fixture
def redis_sentinels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisSentinels]:
    """A primary, a replica and three sentinels, of this test alone."""
    sentinels = RedisSentinels(tmp_path_factory.mktemp("redis-sentinel"))
    try:
        yield sentinels.start()
    finally:
        sentinels.stop()
