"""A real S3 over HTTP on loopback: moto's server in a process of its own, and a proxy before it that goes wrong."""

from __future__ import annotations

import collections
import contextlib
import datetime
import http.client
import http.server
import ipaddress
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Request", "S3Proxy", "S3Server", "self_signed_certificate", "start_s3_server"]

_START_S = 60.0


@dataclass(frozen=True)
class S3Server:
    """A running server; its buckets are empty and need no credentials."""

    port: int
    bucket: str

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def new_url(self) -> str:
        """A place in the bucket that nothing was ever written to."""
        return f"s3://{self.bucket}/{uuid.uuid4().hex}"

    def options(self, **others: str) -> dict[str, str]:
        """Options of the store for this server."""
        return {
            "endpoint": self.endpoint,
            "allow_http": "true",
            "region": "us-east-1",
            "access_key_id": "AKIDEXAMPLE",
            "secret_access_key": "not-checked-by-default",
            **others,
        }

    def call(self, path: str, data: bytes | None = None, method: str = "POST") -> bytes:
        """One plain HTTP request; for what moto offers besides S3."""
        request = urllib.request.Request(
            f"{self.endpoint}{path}", data=data, method=method, headers={"Content-Type": "text/plain"}
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            body: bytes = response.read()
        return body


@contextlib.contextmanager
def start_s3_server(bucket: str = "kite-tests") -> Iterator[S3Server]:
    """moto's server on a free port, with one bucket; stopped at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "MOTO_"))}
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=clean,
    )
    try:
        _wait_until_open(process, port)
        server = S3Server(port, bucket)
        server.call(f"/{bucket}", method="PUT")
        yield server
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_open(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"moto's server ended with {process.returncode}; run it by hand to see why")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"moto's server did not listen within {_START_S} s")


@dataclass(frozen=True)
class Request:
    """What a client asked the proxy for."""

    method: str
    path: str
    headers: dict[str, str]


@dataclass
class S3Proxy:
    """Passes requests on to a server, except when told to go wrong.

    ``proxy.faults`` holds what happens to the next requests, one entry each: None passes, "500" and "503" answer so,
    "drop" closes the connection unanswered, "hang" waits until the proxy stops, "truncate" sends half of the body,
    "echo" answers 400 and repeats all headers, as some servers do. ``proxy.always`` happens to all after those;
    ``proxy.only`` is the one method that this concerns. ``proxy.bad`` happens to every path that ends with one of
    ``proxy.bad_paths``.
    """

    server: S3Server
    certificate: tuple[Path, Path] | None = None
    faults: collections.deque[str | None] = field(default_factory=collections.deque)
    always: str | None = None
    only: str | None = None
    bad: str | None = None
    bad_paths: list[str] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    most_at_once: int = 0
    port: int = 0

    def __post_init__(self) -> None:
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._now = 0

    @property
    def endpoint(self) -> str:
        return f"{'http' if self.certificate is None else 'https'}://127.0.0.1:{self.port}"

    @contextlib.contextmanager
    def running(self) -> Iterator[S3Proxy]:
        """Listens on a free port until the end of the block."""
        proxy = self

        class Handler(_Handler):
            owner = proxy

        listener = _Listener(("127.0.0.1", 0), Handler)
        if self.certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*self.certificate)
            listener.socket = context.wrap_socket(listener.socket, server_side=True)
        self.port = listener.server_address[1]
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02}, name="s3-proxy")
        thread.start()
        try:
            yield self
        finally:
            self._stopping.set()
            listener.shutdown()
            thread.join()
            listener.server_close()

    def fault_of(self, request: Request) -> str | None:
        """Notes the request; what goes wrong with it."""
        with self._lock:
            self.requests.append(request)
            if any(request.path.endswith(path) for path in self.bad_paths):
                return self.bad
            if self.only is not None and request.method != self.only:
                return None
            return self.faults.popleft() if self.faults else self.always

    def enter(self, step: int) -> None:
        """Counts how many requests are under way."""
        with self._lock:
            self._now += step
            self.most_at_once = max(self.most_at_once, self._now)

    def wait_until_stopped(self) -> None:
        """What "hang" does."""
        self._stopping.wait(60)


class _Listener(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away, or refuses the certificate, is part of the tests."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: S3Proxy

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing."""

    def do_any(self) -> None:
        owner = self.owner
        owner.enter(1)
        try:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            fault = owner.fault_of(Request(self.command, self.path, {k.lower(): v for k, v in self.headers.items()}))
            if fault in ("500", "503"):
                self._answer(int(fault), [], b"<Error><Code>SlowDown</Code></Error>")
            elif fault == "echo":
                said = "".join(f"<H>{name}: {value}</H>" for name, value in self.headers.items()).encode()
                self._answer(400, [], b"<Error><Code>BadToken</Code><Message>no good</Message>" + said + b"</Error>")
            elif fault == "drop":
                self.close_connection = True
            elif fault == "hang":
                owner.wait_until_stopped()
                self.close_connection = True
            else:
                self._pass_on(body, truncate=fault == "truncate")
        finally:
            owner.enter(-1)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = do_any

    def _pass_on(self, body: bytes, *, truncate: bool) -> None:
        upstream = http.client.HTTPConnection("127.0.0.1", self.owner.server.port, timeout=60)
        with contextlib.closing(upstream):
            headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
            upstream.request(self.command, self.path, body or None, headers)
            response = upstream.getresponse()
            answer = response.read()
            kept = [(k, v) for k, v in response.getheaders() if k.lower() not in ("connection", "transfer-encoding")]
        self._answer(response.status, kept, answer, truncate=truncate)

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, *, truncate: bool = False) -> None:
        self.send_response_only(status)
        names = {name.lower() for name, _ in headers}
        for name, value in headers:
            self.send_header(name, value)
        if "content-length" not in names:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[: len(body) // 2] if truncate else body)
        self.close_connection = self.close_connection or truncate


def self_signed_certificate(folder: Path) -> tuple[Path, Path]:
    """Files of a new certificate for 127.0.0.1 and of its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kite test")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    paths = (folder / "certificate.pem", folder / "key.pem")
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return paths
