"""Compiling in the background: the program computes what the model does, is kept, and never stands in the way."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kitelib.backends.torch_engine import compile_worker
from kitelib.backends.torch_engine.compile_worker import _inputs, _state
from kitelib.backends.torch_engine.compiled import CompiledDecode, decode_step
from kitelib.backends.torch_engine.forward import Forward
from kitelib.backends.torch_engine.opening import open_model
from kitelib.backends.torch_engine.plan import use_step
from kitelib.backends.torch_engine.program import Program, ProgramRecord, failure_file, program_folder
from kitelib.errors import BackendError
from tests.support.hf_folders import write_model

torch = pytest.importorskip("torch")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_model(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=1)
    return open_model(folder, cache_dir=folder / "cache")


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def compiled(opened: Any, cache: Path, **options: Any) -> CompiledDecode:
    return CompiledDecode(opened, cache, **{"threads": 1, "max_rows": 32, "min_parameters": 0, **options})


@needs_compiler
@pytest.mark.timeout(400)  # runs a C++ compiler; 87 s on a busy machine of two cores
@pytest.mark.filterwarnings("default")
@pytest.mark.usefixtures("one_thread")
def test_another_process_compiles_it_and_it_is_kept(opened: Any, tmp_path: Path) -> None:
    first = compiled(opened, tmp_path, niceness=0)
    first.start()
    assert first.ready(1) is None
    assert first.stats()["state"] == "compiling"
    try:
        assert first.wait(280), first.stats()
    finally:
        first.close()
    again = compiled(opened, tmp_path)
    again.start()
    assert again.stats()["state"] == "ready"
    program = again.ready(32)
    assert program is not None
    assert again.ready(33) is None
    forward = Forward(opened.model, latent=False)
    for rows in (1, 2, 5, 32):
        inputs = _inputs(forward, rows)
        with torch.inference_mode(), use_step(_state()):
            torch.testing.assert_close(program(*inputs), forward.logits(*inputs), atol=1e-3, rtol=1e-3)
            one = program(*inputs[:2], inputs[2][-1:])
            torch.testing.assert_close(one, forward.logits(*inputs)[-1:], atol=1e-3, rtol=1e-3)
    assert not list((tmp_path / "compiled").glob("build-*"))
    again.close()
    assert again.ready(1) is None


def fake_program(cache: Path, opened: Any, content: bytes = b"no library") -> Path:
    folder = program_folder(cache, opened.model_state, 1, 32)
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o700)
    (folder / "step.so").write_bytes(content)
    (folder / "step.json").write_text("{}")
    ProgramRecord(32, len(content), False, 1.0, 2.0).write(folder)
    return folder


def test_a_damaged_library_is_a_note(opened: Any, tmp_path: Path) -> None:
    fake_program(tmp_path, opened)
    broken = compiled(opened, tmp_path)
    broken.start()
    assert "can't be loaded" in broken.stats()["state"]
    assert broken.ready(1) is None


def test_a_cut_off_or_nonsensical_program_is_none(opened: Any, tmp_path: Path) -> None:
    folder = fake_program(tmp_path, opened)
    assert ProgramRecord.read(folder) is not None
    (folder / "step.so").write_bytes(b"no")
    assert ProgramRecord.read(folder) is None
    with pytest.raises(BackendError, match="incomplete"):
        Program(folder)
    (folder / "program.json").write_text(json.dumps({"rows": 1}))
    assert ProgramRecord.read(folder) is None


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_code_that_others_may_write_is_not_run(opened: Any, tmp_path: Path) -> None:
    folder = fake_program(tmp_path, opened)
    folder.parent.chmod(0o777)
    with pytest.raises(BackendError, match="others may write"):
        Program(folder)


def test_the_key_tells_apart_what_matters(opened: Any, tmp_path: Path) -> None:
    keys = {
        program_folder(tmp_path, state, threads, rows, experts)
        for state in (opened.model_state, bytes(32))
        for threads in (1, 2)
        for rows in (32, 64)
        for experts in (None, "eager")
    }
    assert len(keys) == 16


def test_a_known_failure_is_not_tried_again(opened: Any, tmp_path: Path) -> None:
    known = compiled(opened, tmp_path)
    failed = failure_file(program_folder(tmp_path, opened.model_state, 1, 32))
    failed.parent.mkdir(parents=True)
    failed.write_text("the compiler failed: no")
    known.start()
    assert known.stats()["state"] == "not compiled: the compiler failed: no"


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        ({"available_memory_bytes": lambda: 0}, "does not fit into memory"),
        ({"available_memory_bytes": lambda: 2**30}, "compiling takes"),
        ({"shutil.which": lambda _: None}, "no C++ compiler"),
        ({"sys.executable": ""}, "where its Python is"),
        ({"sys.platform": "plan9"}, "only done on Linux"),
    ],
)
def test_reasons_not_to_compile(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patch: dict[str, Any], reason: str
) -> None:
    for name, value in patch.items():
        monkeypatch.setattr(f"kitelib.backends.torch_engine.compiled.{name}", value)
    refused = compiled(opened, tmp_path)
    refused.start()
    assert reason in refused.stats()["state"]
    assert not refused.wait(0)


def test_a_small_model_is_left_alone(opened: Any, tmp_path: Path) -> None:
    small = compiled(opened, tmp_path, min_parameters=20_000_000)
    small.start()
    assert "so small" in small.stats()["state"]


def test_a_program_that_fails_in_a_step_is_not_used_again(opened: Any, tmp_path: Path) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("broken")

    broken = compiled(opened, tmp_path)
    broken._program = fail  # type: ignore[assignment]
    packed: Any = type("Packed", (), {"num_rows": 1})()
    rows = torch.zeros(1, dtype=torch.int64).numpy()
    packed.ids = packed.positions = packed.select = rows
    assert decode_step(broken, packed) is None
    assert broken.ready(1) is None
    assert "broken" in broken.stats()["state"]


def test_closing_ends_the_worker(opened: Any, tmp_path: Path) -> None:
    running = compiled(opened, tmp_path)
    running.start()
    worker = running._worker
    assert worker is not None
    assert worker.poll() is None
    running.close()
    assert worker.returncode is not None
    running.close()


def test_a_program_that_computes_something_else_is_refused(opened: Any) -> None:
    forward = Forward(opened.model, latent=False)

    def off(*inputs: Any) -> Any:
        return forward.logits(*inputs) * 1.01

    def right(*inputs: Any) -> Any:
        return forward.logits(*inputs) * 1.0001

    check: Any = compile_worker._check
    check(right, forward, 8)
    with pytest.raises(compile_worker.CompileError, match="is off by"):
        check(off, forward, 8)


def test_old_programs_go(tmp_path: Path) -> None:
    for number in range(6):
        folder = tmp_path / str(number)
        folder.mkdir()
        ProgramRecord(1, 1, False, 1.0, 1.0).write(folder)
        os.utime(folder / "program.json", (number, number))
    compile_worker._forget_old(tmp_path / "0")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["0", "2", "3", "4", "5"]


def test_the_record_names_all_its_fields(tmp_path: Path) -> None:
    record = ProgramRecord(7, 1, True, 2.5, 1.5)
    record.write(tmp_path)
    (tmp_path / "step.so").write_bytes(b"x")
    (tmp_path / "step.json").write_text("{}")
    assert ProgramRecord.read(tmp_path) == record
