"""Pages are packed to the same bytes by csrc/ on the CPU, by PyTorch, and by the CUDA kernels (run on the CPU here)."""

import ctypes
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

from kitelib.backends.torch_engine.kernels.openmp import parallel_function
from kitelib.native import build as native_build
from kitelib.native import pages, pages_torch
from kitelib.native.library import native_library
from kitelib.native.pages import FORMS, ITEM, KINDS, RESULT, PageLayout, Segment
from kitelib.native.upcycle_ext import PageMover, check_results, checksum
from kitelib.upcycle.codec import codec_named
from kitelib.upcycle.int8 import Int8Codec
from tests.support.page_caches import blank_like, item_table, packed_pieces, random_segments, unit_bytes

torch = pytest.importorskip("torch")

needs_library = pytest.mark.skipif(native_library() is None, reason="the native part is not built")

PICKS = [(3, 0, 16), (0, 0, 5), (4, 3, 13), (1, 15, 1), (2, 0, 8)]
SHAPES = [
    pytest.param("tensors", [64] * 4, torch.bfloat16, id="tensors-bf16"),
    pytest.param("arena", [64] * 4, torch.float16, id="arena-f16"),
    pytest.param("arena", [192] * 6, torch.bfloat16, id="arena-groups"),
    pytest.param("tensors", [72] * 2, torch.float16, id="last-group-short"),
    pytest.param("tensors", [5] * 3, torch.bfloat16, id="odd"),
    pytest.param("arena", [64], torch.bfloat16, id="one-segment"),
    pytest.param("arena", [64, 128, 32, 64], torch.bfloat16, id="mixed"),
    pytest.param("tensors", [32] * 4, torch.float32, id="f32"),
    pytest.param("tensors", [3, 5], torch.float64, id="f64"),
    pytest.param("arena", [24] * 2, torch.uint8, id="u8"),
]


def _supports(form, widths, dtype):
    return FORMS[form] < FORMS["int8"] or (len(set(widths)) == 1 and dtype in {torch.bfloat16, torch.float16})


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    """The CUDA kernels compiled for the CPU."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    target = tmp_path_factory.mktemp("emulator") / "emulator.so"
    source = native_build.source_folder() / "tests" / "emulate_pages.cpp"
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-pthread"]
    subprocess.run([compiler, *flags, str(source), "-o", str(target)], check=True, capture_output=True, timeout=120)
    function = ctypes.CDLL(str(target)).kite_emulate
    pointer = ctypes.c_void_p
    function.argtypes = [pointer, pointer, ctypes.c_uint64, pointer, ctypes.c_int32, ctypes.c_int32]
    return function


@needs_library
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("place", "widths", "dtype"), SHAPES)
def test_library_and_torch_give_the_same_bytes_and_restore_them(place, widths, dtype, form):
    if not _supports(form, widths, dtype):
        with pytest.raises(ValueError, match="segments of one width"):
            PageMover(random_segments(place, widths, 16, dtype)).packed_bytes(16, form)
        return
    segments = random_segments(place, widths, 16, dtype)
    movers = [PageMover(segments, native=native) for native in (True, False)]
    assert [mover.is_native for mover in movers] == [True, False]
    made = []
    for mover in movers:
        items, size = item_table(mover, form, PICKS)
        packed = torch.full((size,), 0xAA, dtype=torch.uint8)
        results = mover.pack(items, packed, form, checksum=True)
        check_results(results)
        made.append((packed, results))
    assert torch.equal(made[0][0], made[1][0])
    assert torch.equal(made[0][1], made[1][1])
    pieces = packed_pieces(movers[0], form, items, made[0][0])
    assert [value % 2**64 for value in made[0][1][:, 0].tolist()] == [checksum(piece) for piece in pieces]
    restored = []
    for native in (True, False):
        fresh = blank_like(segments)
        results = PageMover(fresh, native=native).unpack(items, made[0][0], form, checksum=True)
        assert torch.equal(results, made[0][1])
        restored.append(fresh)
    for first, second in zip(*restored, strict=True):
        assert torch.equal(first, second)
    for block, start, tokens in PICKS:
        before = unit_bytes(segments, block, start, tokens)
        after = unit_bytes(restored[0], block, start, tokens)
        if FORMS[form] < FORMS["int8"]:
            assert torch.equal(before, after)
        else:
            _assert_near(before.view(dtype).view(len(widths), -1), after.view(dtype).view(len(widths), -1), form)
    untouched = restored[0][0][PICKS[1][0], 5:]
    assert not untouched.any()


def _assert_near(before, after, form):
    """Half a step of the stored byte, and the rounding to 16 bits."""
    exact, highest = before.double(), before.double().abs().amax(dim=1, keepdim=True)
    half_step = highest / 254 if form == "int8" else exact.abs() / 16 + highest / 448 / 1024
    assert ((exact - after.double()).abs() <= half_step + exact.abs() / 128).all()


@needs_library
@pytest.mark.parametrize("vectors", [1, 0])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("place", "widths", "dtype"), SHAPES)
def test_cuda_kernels_give_the_same_bytes(emulator, place, widths, dtype, form, vectors):
    if not _supports(form, widths, dtype):
        return
    segments = random_segments(place, widths, 16, dtype)
    mover = PageMover(segments)
    items, size = item_table(mover, form, [PICKS[0], PICKS[4]] if vectors else PICKS[1:4])
    expected = torch.zeros(size, dtype=torch.uint8)
    expected_results = mover.pack(items, expected, form, checksum=True)
    packed = _aligned(size)
    used, results = _emulate(emulator, segments, items, form, packed, vectors, unpack=False)
    if all(width % 32 == 0 for width in widths) and dtype.itemsize == 2:
        assert used == vectors
    assert torch.equal(packed, expected)
    assert torch.equal(results, expected_results)
    fresh, wanted = blank_like(segments), blank_like(segments)
    PageMover(wanted).unpack(items, expected, form)
    _, results = _emulate(emulator, fresh, items, form, packed, vectors, unpack=True)
    assert torch.equal(results, expected_results)
    assert all(torch.equal(*pair) for pair in zip(fresh, wanted, strict=True))


def _aligned(size):
    held = torch.zeros(size + 64, dtype=torch.uint8)
    start = -held.data_ptr() % 64
    return held[start : start + size]


def _emulate(emulator, segments, items, form, packed, vectors, unpack):
    mover = PageMover(segments)
    layout, _ = mover._layout(FORMS[form])
    table = mover._table(items, packed, FORMS[form])
    table["packed"] += np.uint64(packed.data_ptr())
    results = np.zeros(len(table), RESULT)
    used = emulator(
        ctypes.byref(layout.c_layout), table.ctypes.data, len(table), results.ctypes.data, int(unpack), vectors
    )
    return used, torch.from_numpy(results.view(np.int64).reshape(-1, 2).copy())


@needs_library
@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_cuda_kernels_report_what_they_can_not_hold_and_what_is_damaged(emulator, form):
    segments = random_segments("tensors", [64] * 2, 16, torch.bfloat16)
    mover = PageMover(segments)
    items, size = item_table(mover, form, [(0, 0, 16), (1, 0, 16)])
    packed = _aligned(size)
    _emulate(emulator, segments, items, form, packed, 1, unpack=False)
    packed[items[1, 3] + mover.packed_bytes(16, form) - 1] = 0x80 if form == "int8" else 0x7F
    for vectors in (1, 0):
        _, results = _emulate(emulator, segments, items, form, packed, vectors, unpack=True)
        assert results[:, 1].tolist() == [0, pages.DAMAGED]
        segments[1][0, 3, 7] = float("nan")
        _, results = _emulate(emulator, segments, items, form, packed.clone(), vectors, unpack=False)
        assert results[:, 1].tolist() == [pages.NOT_FINITE, 0]


@needs_library
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("threads", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("num_items", [1, 5])
def test_threads_do_not_change_the_bytes(form, threads, num_items):
    segments = random_segments("arena", [64] * 6, 16, torch.bfloat16)
    mover = PageMover(segments)
    items, size = item_table(mover, form, PICKS[:num_items])
    alone, shared = (torch.zeros(size, dtype=torch.uint8) for _ in range(2))
    runner = parallel_function()
    assert runner is not None
    first = mover.pack(items, alone, form, checksum=True)
    second = mover.pack(items, shared, form, checksum=True, runner=runner, threads=threads)
    assert torch.equal(alone, shared)
    assert torch.equal(first, second)
    restored = [blank_like(segments) for _ in range(2)]
    PageMover(restored[0]).unpack(items, alone, form)
    PageMover(restored[1]).unpack(items, alone, form, runner=runner, threads=threads)
    assert all(torch.equal(*pair) for pair in zip(*restored, strict=True))


@needs_library
def test_packing_from_many_threads_at_once():
    segments = random_segments("arena", [64] * 6, 16, torch.bfloat16)
    mover = PageMover(segments)
    items, size = item_table(mover, "int8", PICKS)
    expected = torch.zeros(size, dtype=torch.uint8)
    mover.pack(items, expected, "int8")
    made = [torch.zeros(size, dtype=torch.uint8) for _ in range(6)]
    workers = [threading.Thread(target=mover.pack, args=(items, each, "int8")) for each in made]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(torch.equal(each, expected) for each in made)


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_library), False])
@pytest.mark.parametrize("tokens", [1, 7, 8, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_int8_is_what_the_codec_stores(native, tokens, dtype):
    segments = random_segments("arena", [72] * 4, 16, dtype)
    mover = PageMover(segments, native=native)
    packed = torch.zeros(mover.packed_bytes(tokens, "int8"), dtype=torch.uint8)
    check_results(mover.pack(np.array([[2, 0, tokens, 0]]), packed, "int8"))
    name, shape = str(dtype).removeprefix("torch."), (4, tokens, 72)
    plain = Int8Codec("int8_kv", compress=False)
    unit = unit_bytes(segments, 2, 0, tokens).numpy()
    assert bytes(packed.numpy()) == bytes(plain.encode(unit, name, shape))
    fresh = blank_like(segments)
    check_results(PageMover(fresh, native=native).unpack(np.array([[2, 0, tokens, 0]]), packed, "int8"))
    decoded = plain.decode(bytes(packed.numpy()), len(unit), name, shape)
    assert unit_bytes(fresh, 2, 0, tokens).numpy().tobytes() == decoded.tobytes()


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_library), False])
def test_planes_are_what_the_codec_stores_after_its_table(native):
    segments = random_segments("arena", [64] * 4, 16, torch.float32)
    mover = PageMover(segments, native=native)
    packed = torch.zeros(mover.packed_bytes(16, "planes"), dtype=torch.uint8)
    mover.pack(np.array([[1, 0, 16, 0]]), packed, "planes")
    stored = len(packed) // 4
    table = (4).to_bytes(8, "little") + 4 * (bytes(8) + stored.to_bytes(8, "little"))
    unit = unit_bytes(segments, 1, 0, 16).numpy()
    decoded = codec_named("paged_kvcache_v2/zstd").decode(
        table + bytes(packed.numpy()), len(unit), "float32", (4, 16, 64)
    )
    assert decoded.tobytes() == unit.tobytes()


@needs_library
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_every_16_bit_value_is_stored_as_torch_stores_it(kind, form):
    dtype = getattr(torch, kind)
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    every = torch.where(torch.isfinite(every), every, torch.zeros_like(every))
    segments = [every.view(1, 1, 65536)[:, :, torch.randperm(65536, generator=torch.Generator().manual_seed(1))]]
    made, restored = [], []
    for native in (True, False):
        mover = PageMover(segments, native=native)
        packed = torch.zeros(mover.packed_bytes(1, form), dtype=torch.uint8)
        check_results(mover.pack(np.array([[0, 0, 1, 0]]), packed, form))
        made.append(packed)
        fresh = [torch.zeros_like(segments[0])]
        check_results(PageMover(fresh, native=native).unpack(np.array([[0, 0, 1, 0]]), packed, form))
        restored.append(fresh[0].view(torch.int16))
    assert torch.equal(*made)
    assert torch.equal(*restored)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 63, 64, 1000])
def test_the_checksum_is_the_one_in_the_header(size):
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    mask, total = 2**64 - 1, size * 0xD6E8FEB86659FD93

    def mix(z):
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        return z ^ z >> 31

    for i in range(-(-size // 8)):
        word = int.from_bytes(data[8 * i : 8 * i + 8].tobytes(), "little")
        total += mix(word ^ ((i + 1) * 0x9E3779B97F4A7C15 & mask))
    expected = mix(total & mask)
    assert checksum(torch.from_numpy(data), native=False) == expected
    if native_library() is not None:
        assert checksum(torch.from_numpy(data)) == expected


def test_a_checksum_changes_with_every_bit_and_with_the_order():
    data = torch.arange(40, dtype=torch.uint8)
    seen = {checksum(data), checksum(data[:39]), checksum(data.flip(0)), checksum(torch.roll(data, 8))}
    for index in range(40):
        for bit in range(8):
            changed = data.clone()
            changed[index] ^= 1 << bit
            seen.add(checksum(changed))
    assert len(seen) == 4 + 320


def _layout(array, **changes):
    given = {
        "num_blocks": 5,
        "block_tokens": 16,
        "item_bytes": 2,
        "kind": 7,
        "form": 0,
        "token_bytes": 32,
        "stride": 512,
    }
    given |= changes
    segment = Segment(array.ctypes.data if given.get("base", 1) else 0, given["stride"], given["token_bytes"])
    names = ("num_blocks", "block_tokens", "item_bytes", "kind", "form")
    return PageLayout([segment] * given.get("segments", 1), *(given[name] for name in names))


@needs_library
@pytest.mark.parametrize(
    "changes",
    [
        {"segments": 0},
        {"num_blocks": 0},
        {"block_tokens": 0},
        {"item_bytes": 3},
        {"item_bytes": 0},
        {"form": 4},
        {"form": -1},
        {"token_bytes": 0},
        {"token_bytes": 33},
        {"stride": 511},
        {"base": 0},
        {"form": 2, "kind": 0},
        {"form": 2, "item_bytes": 4},
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(changes):
    library = pages.pages_library()
    cache, packed = np.zeros(5 * 512, np.uint8), np.zeros(4096, np.uint8)
    item = np.array([(0, 0, 16, packed.ctypes.data, 512)], ITEM)
    assert library.page_bytes(_layout(cache), 16) == 512
    assert library.move(_layout(cache), item) == 0
    with pytest.raises(ValueError, match="can't be packed"):
        library.page_bytes(_layout(cache, **changes), 16)
    with pytest.raises(ValueError, match="do not fit the cache"):
        library.move(_layout(cache, **changes), item)


@needs_library
@pytest.mark.parametrize(
    "item",
    [
        (5, 0, 16, 1, 512),
        (0, 0, 0, 1, 0),
        (0, 1, 16, 1, 512),
        (0, 17, 1, 1, 32),
        (0, 0, 16, 0, 512),
        (0, 0, 16, 1, 511),
    ],
)
def test_an_item_that_does_not_fit_is_refused(item):
    cache, packed = np.zeros(5 * 512, np.uint8), np.zeros(4096, np.uint8)
    block, first, tokens, given, size = item
    table = np.array([(block, first, tokens, packed.ctypes.data if given else 0, size)], ITEM)
    for unpack in (False, True):
        with pytest.raises(ValueError, match="1 items do not fit"):
            pages.pages_library().move(_layout(cache), table, unpack=unpack)


@needs_library
def test_tables_of_another_kind_are_refused():
    library, cache = pages.pages_library(), np.zeros(5 * 512, np.uint8)
    with pytest.raises(ValueError, match="items are int64"):
        library.move(_layout(cache), np.zeros((1, 4), np.int64))
    with pytest.raises(ValueError, match="for 2 items"):
        library.move(_layout(cache), np.zeros(2, ITEM), np.zeros(3, RESULT))
    with pytest.raises(ValueError, match="contiguous bytes"):
        library.checksum(np.zeros(8, np.uint16))


def test_a_library_without_pages_or_of_another_version_is_refused_with_a_note(tmp_path):
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        pytest.skip("no C compiler")
    for name, text, wanted in (
        ("none", "int x;", "kite_pages_abi"),
        ("old", "unsigned kite_pages_abi(void) {return 9;}", "version 9"),
    ):
        source = tmp_path / f"{name}.c"
        source.write_text(text + "\n", encoding="utf-8")
        native_build.compile_library(tmp_path / f"{name}.so", [source], ["-fvisibility=default"])
        loaded, note = pages.load_pages_library(tmp_path / f"{name}.so")
        assert loaded is None
        assert wanted in note
        assert "make upcycle_ext" in note
    assert pages.load_pages_library(Path(tmp_path / "missing.so"))[0] is None


def test_the_sizes_of_torch_and_library_agree():
    if native_library() is None:
        pytest.skip("the native part is not built")
    cache = np.zeros(5 * 16 * 144 * 3, np.uint8)
    for form in FORMS.values():
        segments = [Segment(cache.ctypes.data, 16 * 144, 144)] * 3
        layout = PageLayout(segments, 5, 16, 2, 7, form)
        for tokens in range(1, 17):
            expected = pages_torch.form_bytes(3, 3 * 144, tokens, form)
            assert pages.pages_library().page_bytes(layout, tokens) == expected
