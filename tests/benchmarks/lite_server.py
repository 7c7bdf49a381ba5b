"""The second peer: the batched server in llama-cpp-python's source package, over HTTP on the loopback interface.

The server is a script with its own dependencies, so it runs in its own environment; the benchmark points that
environment at the llama.cpp build of its own, so both sides run the same compiled library.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import threading
import time
import venv
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from lite_report import progress

__all__ = ["ServerPeer", "cache_folder", "find_server", "scratch_folder", "set_up_server"]

_REQUIREMENTS = ("fastapi", "uvicorn", "openai", "jinja2", "safetensors", "websockets", "pydantic", "numpy")


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kite"


def find_server(server: str | None, python: str | None) -> tuple[Path, Path] | None:
    """Paths of the server's script and of the Python that runs it; None if one of them is not there."""
    version = metadata.version("llama_cpp_python")
    base = Path(server) if server else cache_folder() / f"llama_cpp_python-{version}"
    script = base / "examples" / "server" / "server.py" if base.is_dir() else base
    interpreter = Path(python) if python else cache_folder() / "peer-venv" / "bin" / "python"
    return (script, interpreter) if script.is_file() and interpreter.is_file() else None


def set_up_server() -> None:
    """Downloads the source package and makes the server's environment. Only on the user's word: it uses the network."""
    folder, version = cache_folder(), metadata.version("llama_cpp_python")
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / f"llama_cpp_python-{version}").is_dir():
        progress(f"downloading the source package of llama-cpp-python {version}")
        with tempfile.TemporaryDirectory() as temporary:
            _run(
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--no-binary",
                ":all:",
                "--dest",
                temporary,
                f"llama-cpp-python=={version}",
            )
            with tarfile.open(next(Path(temporary).glob("*.tar.gz"))) as archive:
                archive.extractall(folder, filter="data")
    environment = folder / "peer-venv"
    if not environment.is_dir():
        progress("making the server's environment")
        venv.create(environment, with_pip=True)
        _run(str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", *_REQUIREMENTS)


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command[:4])} ... failed with exit code {done.returncode}")


class ServerPeer:
    """A running server.

    Args:
        script: its server.py.
        python: the Python of its environment.
        model: GGUF file.
        threads: threads of prefill and decode.
        folder: where its configuration, its log and its disk cache go; the same folder again is a restart.
        num_context_tokens: KV cells, all sequences together.
    """

    def __init__(
        self, script: Path, python: Path, model: str, threads: int, folder: Path, *, num_context_tokens: int
    ) -> None:
        self._port = _free_port()
        config = {
            "server": {"host": "127.0.0.1", "port": self._port},
            # n_batch as llama.cpp's default: the server reuses no more of a prompt than its first batch, so the 512
            # of its own example configurations would make every longer prefix a partial miss.
            "model": {
                "path": str(Path(model).resolve()),
                "alias": "peer",
                "n_ctx": num_context_tokens,
                "n_seq_max": 32,
                "n_batch": 2048,
                "n_ubatch": 512,
                "threads": threads,
                "threads_batch": threads,
                "kv_unified": True,
                "store_logits": False,
            },
            "disk_cache": {"path": str(folder / "sequences"), "max_bytes": 2**31, "min_tokens": 128},
        }
        path = folder / "config.json"
        path.write_text(json.dumps(config))
        environment = os.environ | {"PYTHONPATH": _library_folder(folder)}
        self._log = (folder / "server.log").open("a")
        self._process = subprocess.Popen(
            [str(python), str(script), "-C", str(path)], stdout=self._log, stderr=self._log, env=environment
        )
        try:
            self._wait_until_ready(folder / "server.log")
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self, log: Path) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise SystemExit(f"the server stopped with code {self._process.returncode}:\n{log.read_text()[-2000:]}")
            with contextlib.suppress(OSError):
                self.round_trip()
                return
            time.sleep(0.2)
        raise SystemExit(f"the server did not answer within 120 s:\n{log.read_text()[-2000:]}")

    def round_trip(self) -> float:
        """Seconds of one HTTP request that computes nothing: what HTTP itself costs."""
        begin = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        connection.request("GET", "/healthz")
        connection.getresponse().read()
        connection.close()
        return time.perf_counter() - begin

    def ttft(self, prompt: str | Sequence[int]) -> float:
        return self.complete(prompt, 1)[0]

    def complete(self, prompt: str | Sequence[int], max_tokens: int) -> tuple[float, float, str]:
        """Seconds to the first streamed token, seconds in all, and the text."""
        begin = time.perf_counter()
        first, text = 0.0, []
        for event in self._stream(prompt, max_tokens):
            first = first or time.perf_counter() - begin
            text.append(str(event["choices"][0]["text"]))
        return first, time.perf_counter() - begin, "".join(text)

    def simultaneous(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[list[float], float]:
        """All prompts at once, one connection each: the TTFTs, s, and tokens per second over all."""
        results: list[tuple[float, int]] = [(0.0, 0)] * len(prompts)
        start = threading.Barrier(len(prompts) + 1)

        def run(index: int) -> None:
            start.wait()
            begin, first, num_tokens = time.perf_counter(), 0.0, 0
            for event in self._stream(prompts[index], max_tokens):
                first = first or time.perf_counter() - begin
                num_tokens += bool(event["choices"][0]["text"])
            results[index] = first, num_tokens

        threads = [threading.Thread(target=run, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        start.wait()
        begin = time.perf_counter()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - begin
        return [first for first, _ in results], sum(count for _, count in results) / seconds

    def _stream(self, prompt: str | Sequence[int], max_tokens: int) -> Iterator[dict[str, Any]]:
        body = {
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=600)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"the server answered {response.status}: {response.read()[:500]!r}")
            for line in response:
                if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                    yield json.loads(data)
        finally:
            connection.close()

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def _library_folder(folder: Path) -> str:
    """A folder with nothing but links to this environment's llama_cpp and what it imports.

    The server imports the multimodal bindings although text needs none; a build without that library gets an
    empty module in their place.
    """
    site, links = Path(sysconfig.get_paths()["purelib"]), folder / "library"
    if not links.is_dir():
        (links / "llama_cpp").mkdir(parents=True)
        (links / "diskcache").symlink_to(site / "diskcache")
        for path in (site / "llama_cpp").iterdir():
            (links / "llama_cpp" / path.name).symlink_to(path)
        if not list((site / "llama_cpp" / "lib").glob("*mtmd*")):
            bindings = links / "llama_cpp" / "mtmd_cpp.py"
            bindings.unlink()
            bindings.touch()
    return str(links)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for one server's files, removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="kite-peer-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
