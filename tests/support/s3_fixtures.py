"""Pytest plugin: one S3 server for the session, and proxies before it that go wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.s3_server import S3Proxy, S3Server, start_s3_server

__all__ = ["s3_proxy", "s3_server"]


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """moto's server with an empty bucket; use `S3Server.new_url` for a place of its own."""
    with start_s3_server() as server:
        yield server


@pytest.fixture
def s3_proxy(s3_server: S3Server) -> Iterator[Callable[..., S3Proxy]]:
    """``s3_proxy()`` gives a running proxy before the server; ``s3_proxy((certificate, key))`` one that speaks TLS."""
    with contextlib.ExitStack() as stack:

        def start(certificate: tuple[Path, Path] | None = None) -> S3Proxy:
            return stack.enter_context(S3Proxy(s3_server, certificate).running())

        yield start
