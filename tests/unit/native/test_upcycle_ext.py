"""The torch operations, their checks and notes, and the CUDA library where there is an nvcc but perhaps no GPU."""

import ctypes
import importlib.util
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from kitelib.errors import FormatError
from kitelib.native import build as native_build
from kitelib.native import pages_cuda, upcycle_ext
from kitelib.native.pages_cuda import CudaLibrary, load_cuda_library
from kitelib.native.upcycle_ext import PageMover, check_results, register_ops, upcycle_note
from tests.support.page_caches import blank_like, item_table, random_segments, unit_bytes

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[3]
needs_nvcc = pytest.mark.skipif(native_build.find_nvcc() is None, reason="no nvcc: the CUDA toolkit is not installed")
needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("cc", "gcc", "clang")), reason="no C compiler"
)


def test_the_operations_pack_and_unpack():
    register_ops()
    segments = random_segments("arena", [64] * 4, 16, torch.bfloat16)
    mover = PageMover(segments)
    items, size = item_table(mover, "raw", [(4, 0, 16), (1, 0, 3)])
    packed = torch.zeros(size, dtype=torch.uint8)
    table = torch.from_numpy(items)
    results = torch.ops.kitelib.pack_pages(segments, table, "raw", packed, checksum=True)
    assert torch.equal(packed[: mover.packed_bytes(16)], unit_bytes(segments, 4, 0, 16))
    assert torch.equal(results, mover.pack(items, packed, checksum=True))
    fresh = blank_like(segments)
    assert torch.equal(torch.ops.kitelib.unpack_pages(fresh, table, "raw", packed, checksum=True), results)
    assert torch.equal(unit_bytes(fresh, 1, 0, 3), unit_bytes(segments, 1, 0, 3))


def test_the_operations_have_shapes_without_data():
    register_ops()
    segments = [torch.empty((5, 16, 64), device="meta") for _ in range(2)]
    items, packed = torch.empty((3, 4), dtype=torch.int64, device="meta"), torch.empty(9, device="meta").byte()
    for function in (torch.ops.kitelib.pack_pages, torch.ops.kitelib.unpack_pages):
        results = function(segments, items, "raw", packed)
        assert (results.shape, results.dtype, results.device.type) == ((3, 2), torch.int64, "meta")


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_values_that_are_not_finite_and_damaged_bytes_are_reported_per_item(native, form):
    segments = random_segments("tensors", [64] * 2, 16, torch.float16)
    segments[1][3, 9, 7] = float("inf")
    mover = PageMover(segments, native=native)
    items, size = item_table(mover, form, [(2, 0, 16), (3, 0, 16), (3, 0, 9)])
    packed = torch.zeros(size, dtype=torch.uint8)
    results = mover.pack(items, packed, form)
    assert [bool(status) for status in results[:, 1]] == [False, True, False]
    with pytest.raises(FormatError, match="item 1 has values that are not finite"):
        check_results(results)
    for position, byte in ((0, 1), (1, 2), (7, 1), (9, 0x7C), (9, 0xBC), (-1, 0x80 if form == "int8" else 0xFF)):
        damaged = packed[: mover.packed_bytes(16, form)].clone()
        damaged[position] = byte
        with pytest.raises(FormatError, match="item 0 is damaged"):
            check_results(mover.unpack(items[:1], damaged, form))


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(
    ("row", "size", "message"),
    [
        ((5, 0, 16, 0), 8192, "not in a cache of 5 blocks"),
        ((-1, 0, 16, 0), 8192, "not in a cache"),
        ((0, 1, 16, 0), 8192, "not in a cache"),
        ((0, -1, 4, 0), 8192, "not in a cache"),
        ((0, 0, 0, 0), 8192, "not in a cache"),
        ((0, 2**62, 2**62, 0), 8192, "not in a cache"),
        ((0, 0, 16, 1), 8192, "of 8192 bytes does not fit 8192"),
        ((0, 0, 16, -1), 8193, "does not fit"),
        ((0, 0, 16, 2**62), 8192, "does not fit"),
    ],
)
def test_items_outside_of_cache_or_buffer_are_refused(native, row, size, message):
    mover = PageMover(random_segments("arena", [64] * 4, 16, torch.bfloat16), native=native)
    for move in (mover.pack, mover.unpack):
        with pytest.raises(ValueError, match=message):
            move(np.array([row], np.int64), torch.zeros(size, dtype=torch.uint8))


def test_other_bad_arguments_are_refused():
    segments = random_segments("tensors", [64] * 2, 16, torch.bfloat16)
    mover, items = PageMover(segments), np.array([[0, 0, 16, 0]])
    packed = torch.zeros(8192, dtype=torch.uint8)
    for bad in (packed.view(torch.int8), packed.view(2, -1), packed[::2], packed.to("meta")):
        with pytest.raises(ValueError, match="packed pages are"):
            mover.pack(items, bad)
    for bad in (items.astype(np.int32), items[0], items[:, :3]):
        with pytest.raises(ValueError, match="items are"):
            mover.pack(bad, packed)
    with pytest.raises(ValueError, match="'zip' is unknown"):
        mover.pack(items, packed, "zip")
    with pytest.raises(ValueError, match="even addresses"):
        mover.pack(np.array([[0, 0, 16, 1]]), packed, "int8")
    with pytest.raises(ValueError, match="17 tokens can't be packed"):
        mover.packed_bytes(17)
    with pytest.raises(ValueError, match="at least one segment"):
        PageMover([])
    with pytest.raises(ValueError, match="segments differ"):
        PageMover([segments[0], segments[1].half()])
    with pytest.raises(ValueError, match="have gaps or overlap"):
        PageMover([segments[0][:, ::2]])
    with pytest.raises(ValueError, match="have gaps or overlap"):
        PageMover([segments[0][:1].expand(5, 16, 64)])
    with pytest.raises(ValueError, match="a segment has shape"):
        PageMover([segments[0][0]])


def test_without_the_library_pages_are_packed_by_torch(monkeypatch):
    monkeypatch.setattr(upcycle_ext, "pages_library", lambda: None)
    monkeypatch.setattr(upcycle_ext, "pages_note", lambda: "it is not built")
    segments = random_segments("arena", [64] * 2, 16, torch.bfloat16)
    mover = PageMover(segments)
    assert not mover.is_native
    assert upcycle_note() == "it is not built"
    packed = torch.zeros(mover.packed_bytes(16), dtype=torch.uint8)
    mover.pack(np.array([[3, 0, 16, 0]]), packed)
    assert torch.equal(packed, unit_bytes(segments, 3, 0, 16))


@pytest.fixture
def build_tool(monkeypatch):
    """What `make upcycle_ext` runs; it does not compile the CPU's part."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    spec = importlib.util.spec_from_file_location("build_native", ROOT / "tools" / "build_native.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    monkeypatch.setattr(tool, "build", lambda: (Path("cpu.so"), True))
    monkeypatch.setattr(sys, "argv", ["build_native.py", "--upcycle-ext"])
    return tool


def test_make_upcycle_ext_works_without_a_cuda_compiler(build_tool, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert build_tool.main() == 0
    said = capsys.readouterr().out
    assert "compiled to cpu.so" in said
    assert "no CUDA compiler (nvcc) was found" in said
    assert "make upcycle_ext CUDA_HOME=" in said
    with pytest.raises(native_build.BuildError, match="nvcc was not found"):
        native_build.build_cuda(tmp_path)


def test_make_upcycle_ext_fails_if_a_compiler_does(build_tool, tmp_path, monkeypatch, capsys):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho sorry >&2\nexit 3\n", encoding="utf-8")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(build_tool, "build_cuda", lambda: native_build.build_cuda(tmp_path))
    assert build_tool.main() == 1
    said = capsys.readouterr().out
    assert "status 3" in said
    assert "sorry" in said
    monkeypatch.setattr(build_tool, "build", lambda: native_build.build_cuda(tmp_path))
    assert build_tool.main() == 1


@pytest.fixture(scope="module")
def cuda_library(tmp_path_factory):
    """The CUDA library, compiled from the sources."""
    folder = tmp_path_factory.mktemp("cuda")
    path, fresh = native_build.build_cuda(folder)
    assert fresh
    assert native_build.build_cuda(folder) == (path, False)
    loaded, note = load_cuda_library(path)
    assert loaded is not None, note
    return loaded


@needs_nvcc
def test_the_cuda_library_compiles_loads_and_says_what_it_needs(cuda_library):
    found = cuda_library.functions.kite_cuda_version()
    assert found.runtime >= 12000
    for status, words in ((0, "no error"), (-1, "bad argument"), (35, "driver version is insufficient")):
        assert words in cuda_library.error(status)
    if not torch.cuda.is_available():
        assert found.num_devices == 0
        assert cuda_library.problem(0).startswith("no device")
        capability, handle = ctypes.c_int32(7), ctypes.c_void_p(7)
        assert cuda_library.functions.kite_cuda_probe(0, capability) > 0
        assert cuda_library.functions.kite_cuda_create(0, handle) > 0
        assert handle.value is None
        assert not capability.value


@needs_nvcc
def test_the_cuda_library_refuses_what_makes_no_sense(cuda_library):
    functions, made = cuda_library.functions, ctypes.c_void_p(7)
    assert functions.kite_cuda_layout_create(None, None, made) == -1
    assert made.value is None
    assert functions.kite_cuda_pack(None, None, None, 0, None, None) == -1
    functions.kite_cuda_destroy(None)
    functions.kite_cuda_layout_destroy(None)


class _Answers:
    """A library whose functions give what a test wants."""

    def __init__(self, driver, runtime, num_devices, status, probe=0):
        self._versions = pages_cuda._Versions(driver, runtime, num_devices, status)
        self._probe = probe

    def kite_cuda_version(self):
        return self._versions

    def kite_cuda_error(self, status):
        return f"error {status}".encode()

    def kite_cuda_probe(self, device, capability):
        capability.value = 75
        return self._probe


@pytest.mark.parametrize(
    ("answers", "device", "words"),
    [
        (_Answers(0, 13000, 0, 35), 0, "no NVIDIA driver (the library was built with CUDA 13.0)"),
        (_Answers(12040, 13000, 0, 35), 0, "driver supports CUDA up to 12.4, but the library was built with CUDA 13.0"),
        (_Answers(13000, 13000, 0, 100), 0, "no device 0: error 100"),
        (_Answers(13000, 13000, 2, 0), 2, "no device 2: 2 devices were found"),
        (_Answers(13000, 13000, 1, 0, 209), 0, "compute capability 7.5, and the library does not run on it: error 209"),
        (_Answers(13010, 13000, 1, 0), 0, ""),
    ],
)
def test_a_driver_or_device_that_does_not_fit_is_named(answers, device, words):
    library = CudaLibrary.__new__(CudaLibrary)
    library.functions = answers
    problem = library.problem(device)
    assert words in problem
    assert bool(words) == bool(problem)


def test_without_the_cuda_library_there_is_a_note(monkeypatch):
    monkeypatch.setattr(
        pages_cuda, "_found", lambda: (None, "the CUDA part is not built; to build it: make upcycle_ext")
    )
    monkeypatch.setattr(pages_cuda, "_contexts", {})
    assert pages_cuda.cuda_pages(3)[0] is None
    assert upcycle_note("cuda", 3).endswith("make upcycle_ext; blocks are packed by PyTorch instead")


@needs_compiler
def test_a_cuda_library_of_another_version_is_refused_with_a_note(tmp_path):
    assert load_cuda_library(tmp_path / "missing.so") == (
        None,
        "the CUDA part is not built; to build it: make upcycle_ext",
    )
    (tmp_path / "text.so").write_text("no library", encoding="utf-8")
    assert "is not used" in load_cuda_library(tmp_path / "text.so")[1]
    for name, text, wanted in (
        ("none", "int x;", "kite_cuda_abi"),
        ("old", "unsigned kite_cuda_abi(void) { return 9; }", "version 9 where 1 is needed"),
        ("some", "unsigned kite_cuda_abi(void) { return 1; }", "kite_cuda_version"),
    ):
        source = tmp_path / f"{name}.c"
        source.write_text(text + "\n", encoding="utf-8")
        native_build.compile_library(tmp_path / f"{name}.so", [source], ["-fvisibility=default"])
        loaded, note = load_cuda_library(tmp_path / f"{name}.so")
        assert loaded is None
        assert wanted in note


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("form", ["raw", "planes", "int8", "fp8"])
@pytest.mark.parametrize("width", [64, 20])
def test_a_gpu_packs_the_bytes_of_the_cpu(form, width):
    segments = random_segments("arena", [width] * 4, 16, torch.bfloat16)
    mover = PageMover(segments, native=False)
    items, size = item_table(mover, form, [(4, 0, 16), (1, 3, 5), (0, 0, 8)])
    expected = torch.zeros(size, dtype=torch.uint8)
    wanted = mover.pack(items, expected, form, checksum=True)
    assert upcycle_note("cuda") == ""
    for native in (True, False):
        there = PageMover([each.cuda() for each in segments], native=native)
        packed = torch.zeros(size, dtype=torch.uint8, device="cuda")
        assert torch.equal(there.pack(items, packed, form, checksum=True).cpu(), wanted)
        assert torch.equal(packed.cpu(), expected)
        fresh = [torch.zeros_like(each, device="cuda") for each in segments]
        assert torch.equal(PageMover(fresh, native=native).unpack(items, packed, form, checksum=True).cpu(), wanted)
        local = [torch.zeros(each.shape, dtype=each.dtype) for each in segments]
        PageMover(local, native=False).unpack(items, expected, form)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(fresh, local, strict=True))
