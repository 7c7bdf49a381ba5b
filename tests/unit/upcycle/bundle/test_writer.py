"""`BundleWriter`: what it takes, chooses and writes, and that it leaves nothing behind when it does not."""

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import tracemalloc

import numpy as np
import pytest
import safetensors

from kitelib.errors import ConfigError, InvalidRequestError
from kitelib.upcycle.adapter_unit import AdapterContent, adapter_digest, adapter_unit
from kitelib.upcycle.bundle import Bundle, BundleRoot, BundleWriter, container
from kitelib.upcycle.bundle.signing import new_key
from tests.support.bundle_files import OLD_BUNDLE
from tests.support.bundle_units import BUNDLE_ROOT, IDENTITY, header_of, sample_units
from tests.support.bundles import write_units
from tests.support.units import LAYOUT, ROOT, kv_unit, logits_unit, units_of

HMAC_KEY = b"0123456789abcdef"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "x.kite"


@pytest.fixture(autouse=True)
def folder(path):
    path.parent.mkdir()
    return path.parent


def test_summary(path):
    summary = write_units(path, sample_units(), IDENTITY, BUNDLE_ROOT)
    units = sample_units()
    header, data = header_of(path)
    assert summary.num_bytes == path.stat().st_size
    assert summary.header_bytes == summary.num_bytes - len(data)
    assert summary.data_bytes == len(data) == sum(len(unit.data) for unit in units)
    assert summary.units == {"kv": 4, "logits": 1, "completion": 1}
    assert (summary.tokens, summary.left_out, summary.signer) == (14, 0, None)
    assert summary.path == str(path)
    with Bundle.open(path) as bundle:
        assert bundle.digest == summary.digest
    assert set(header["__metadata__"]) == {"kite.bundle", "kite.units"}


def test_standard_tools_see_the_units(path):
    write_units(path, sample_units(), IDENTITY, BUNDLE_ROOT)
    with safetensors.safe_open(path, "numpy") as file:
        assert set(file.keys()) == {f"{unit.kind}.{unit.cf.hex()}" for unit in sample_units()}
        for unit in sample_units():
            if unit.dtype != "bfloat16":
                tensor = file.get_tensor(f"{unit.kind}.{unit.cf.hex()}")
                assert (str(tensor.dtype), tensor.shape) == (unit.dtype, unit.shape)
                assert tensor.tobytes() == unit.data.tobytes()
    raw = dict(safetensors.deserialize(path.read_bytes()))
    unit = next(unit for unit in sample_units() if unit.dtype == "bfloat16")
    found = raw[f"kv.{unit.cf.hex()}"]
    assert (found["dtype"], tuple(found["shape"]), bytes(found["data"])) == ("BF16", unit.shape, unit.data.tobytes())


def test_data_is_aligned_to_its_elements(path):
    odd = dataclasses.replace(sample_units()[5], dtype="uint8", shape=(11,), data=np.zeros(11, np.uint8))
    write_units(path, [odd, *sample_units()[:5]], IDENTITY, BUNDLE_ROOT)
    header, data = header_of(path)
    assert (path.stat().st_size - len(data)) % 64 == 0
    widths = {"F32": 4, "U32": 4, "F16": 2, "BF16": 2, "U8": 1}
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["data_offsets"][0] % widths[entry["dtype"]] == 0


def test_a_unit_is_kept_once_and_its_hits_add_up(path):
    unit, other = sample_units()[:2]
    with BundleWriter(path, IDENTITY) as writer:
        assert writer.add(unit, BUNDLE_ROOT, hits=2)
        assert writer.add(other, BUNDLE_ROOT)
        assert not writer.add(unit, BUNDLE_ROOT, hits=0.5)
        assert writer.finish().units == {"kv": 2}
    with Bundle.open(path) as bundle:
        assert {unit.cf: unit.hits for unit in bundle.units} == {unit.cf: 2.5, other.cf: 1.0}


def test_only_roots_in_use_are_named(path):
    roots = [dataclasses.replace(BUNDLE_ROOT, root=bytes([index]) * 32, namespace=str(index)) for index in range(3)]
    units = [kv_unit([index] * 4, 0, 4, root=root.root) for index, root in enumerate(roots)]
    with BundleWriter(path, IDENTITY) as writer:
        for unit, root, hits in zip(units, roots, (5, 0.001, 9), strict=True):
            writer.add(unit, root, hits=hits)
        whole = writer.finish(max_bytes=None).num_bytes
    with BundleWriter(path, IDENTITY) as writer:
        for unit, root, hits in zip(units, roots, (5, 0.001, 9), strict=True):
            writer.add(unit, root, hits=hits)
        summary = writer.finish(max_bytes=whole - 1)
    assert summary.left_out == 1
    with Bundle.open(path) as bundle:
        assert [root.namespace for root in bundle.manifest.roots] == ["0", "2"]
        assert [bundle.manifest.roots[unit.root].root for unit in bundle.units] == [roots[0].root, roots[2].root]


@pytest.mark.parametrize(
    ("compression", "names"),
    [
        ("none", {"paged_kvcache_v2/none", "raw/none"}),
        ("zstd", {"paged_kvcache_v2/zstd", "raw/zstd", "raw/none"}),
        ("entropy", {"paged_kvcache_v2/entropy", "raw/none"}),
    ],
)
def test_compression_is_kept_where_it_is_smaller(path, compression, names):
    large = kv_unit([7] * 4, 0, 4)
    random = np.random.default_rng(0)
    smooth = (random.standard_normal((2, 64, 64)) * 0.1).astype(np.float16).view(np.uint8).reshape(-1)
    noise = random.integers(0, 256, 16384, np.uint8)
    logits = dataclasses.replace(sample_units()[4], shape=(4096,), data=np.zeros(16384, np.uint8))
    completion = sample_units()[5]
    units = [
        dataclasses.replace(large, shape=(2, 64, 64), data=smooth),
        dataclasses.replace(kv_unit([8] * 4, 0, 4), shape=(8192,), data=noise),
        logits,
        completion,
    ]
    model = dataclasses.replace(IDENTITY, block_bytes=16384, vocab_size=4096)
    summary = write_units(path, units, model, BUNDLE_ROOT, compression=compression)
    with Bundle.open(path) as bundle:
        found = {(unit.kind, unit.cf): unit for unit in bundle.units}
        assert {unit.codec for unit in bundle.units} == names | {"paged_kvcache_v2/none"}
        for unit in units:
            stored = found[unit.kind, unit.cf]
            assert stored.stop - stored.start <= len(unit.data)
            assert (stored.stop - stored.start < len(unit.data)) == ("none" not in stored.codec)
            assert bundle.read(stored, full=True).data.tobytes() == unit.data.tobytes()
        assert found["kv", units[1].cf].codec == "paged_kvcache_v2/none"
    assert summary.data_bytes == sum(len(unit.data) for unit in units)


def test_units_of_others_are_refused(path):
    weights = bytes(16)
    content = AdapterContent({"a": 1.0}, weights, adapter_digest({"a": 1.0}, weights))
    unit = sample_units()[0]
    with BundleWriter(path, IDENTITY) as writer:
        for wrong, words in [
            (dataclasses.replace(unit, model_state=b"x" * 32), "is of model state 7878"),
            (dataclasses.replace(unit, layout="other"), "has the layout 'other'"),
            (adapter_unit(content, IDENTITY.model_state), "of kind 'lora'"),
        ]:
            with pytest.raises(InvalidRequestError, match=words):
                writer.add(wrong, BUNDLE_ROOT)
        for hits in (-1, float("nan"), float("inf")):
            with pytest.raises(InvalidRequestError, match="hits is"):
                writer.add(unit, BUNDLE_ROOT, hits=hits)
        assert writer.add(unit, BUNDLE_ROOT)
        assert writer.finish().units == {"kv": 1}


@pytest.mark.parametrize(
    "options",
    [
        {"labels": {"a": 1}},
        {"labels": {1: "a"}},
        {"labels": {"a": "x" * 5000}},
        {"labels": {str(index): "" for index in range(257)}},
        {"epoch": -1},
        {"epoch": 2**64},
        {"compression": "gzip"},
    ],
)
def test_what_no_reader_would_take_is_refused_at_once(path, options):
    with pytest.raises(ConfigError):
        BundleWriter(path, IDENTITY, **options)
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize(
    "root",
    [
        BundleRoot(b"x", {}),
        BundleRoot(b"x" * 32, {"a": 1.5}),
        BundleRoot(b"x" * 32, {}, "n" * 5000),
        BundleRoot(b"x" * 32, {}, None, (b"short", 1.0)),
        BundleRoot(b"x" * 32, {}, None, (bytes(32), float("nan"))),
    ],
)
def test_roots_that_no_reader_would_take_are_refused_at_once(path, root):
    with BundleWriter(path, IDENTITY) as writer, pytest.raises(ConfigError):
        writer.add(sample_units()[0], root)


def test_longest_texts_are_read_again(path):
    labels = {"digits": "9" * 4096, "brackets": "[{\"':" * 800, **{str(index): "" for index in range(254)}}
    write_units(path, sample_units(), IDENTITY, BUNDLE_ROOT, labels=labels)
    with Bundle.open(path) as bundle:
        assert bundle.manifest.labels == labels


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="can't be written"):
        BundleWriter(tmp_path / "none" / "x.kite", IDENTITY)


def test_an_empty_bundle_is_not_written(path):
    with BundleWriter(path, IDENTITY) as writer, pytest.raises(ConfigError, match="no unit was added"):
        writer.finish()
    assert os.listdir(path.parent) == []


def test_a_writer_is_used_once(path):
    with BundleWriter(path, IDENTITY) as writer:
        writer.add(sample_units()[0], BUNDLE_ROOT)
        writer.finish()
        writer.abandon()
        with pytest.raises(InvalidRequestError, match="has finished or was abandoned"):
            writer.finish()
        with pytest.raises(InvalidRequestError, match="has finished or was abandoned"):
            writer.add(sample_units()[1], BUNDLE_ROOT)


@pytest.mark.parametrize("seal", [{}, {"hmac_key": HMAC_KEY}, {"sign_key": True, "hmac_key": HMAC_KEY}])
def test_max_bytes_is_kept(path, tmp_path, seal):
    if "sign_key" in seal:
        (tmp_path / "key.pem").write_bytes(new_key()[0])
        seal = {**seal, "sign_key": tmp_path / "key.pem"}
    units = [unit for start in range(0, 40, 4) for unit in units_of([start % 7, 1, 2, 3, start % 10, 5, 6, 7, 8, 9])]
    whole = write_units(path, units, IDENTITY, BUNDLE_ROOT, **seal)
    counts = []
    for max_bytes in range(whole.num_bytes + 1500, 4000, -1777):
        summary = write_units(path, units, IDENTITY, BUNDLE_ROOT, max_bytes=max_bytes, **seal)
        assert path.stat().st_size == summary.num_bytes <= max_bytes
        counts.append(sum(summary.units.values()))
        assert summary.left_out + counts[-1] == sum(whole.units.values())
        with Bundle.open(path) as bundle:
            assert bundle.check() == []
            blocks = {unit.cf for unit in bundle.units if unit.kind == "kv"} | {BUNDLE_ROOT.root}
            assert all(unit.parent in blocks for unit in bundle.units)  # nothing without what it goes on from
    assert counts[0] == sum(whole.units.values())
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) > 3
    path.unlink()
    with pytest.raises(ConfigError, match="no unit fits into max_bytes=1000"):
        write_units(path, units, IDENTITY, BUNDLE_ROOT, max_bytes=1000, **seal)
    assert os.listdir(path.parent) == []


def test_what_is_used_most_is_kept(path):
    prompts = [[index, 1, 2, 3] for index in range(9)]
    with BundleWriter(path, IDENTITY) as writer:
        for prompt in prompts:
            writer.add(kv_unit(prompt, 0, 4), BUNDLE_ROOT, hits=prompt[0])
        writer.finish(max_bytes=5000)
    with Bundle.open(path) as bundle:
        kept = sorted(int(unit.token_ids[0]) for unit in bundle.units)
    assert 0 < len(kept) < 9
    assert kept == list(range(9 - len(kept), 9))


def test_sealing(path, tmp_path):
    pem, public = new_key()
    (tmp_path / "key.pem").write_bytes(pem)
    plain = write_units(path, sample_units(), IDENTITY, BUNDLE_ROOT)
    assert plain.signer is None
    sealed = write_units(path, sample_units(), IDENTITY, BUNDLE_ROOT, sign_key=tmp_path / "key.pem", hmac_key=HMAC_KEY)
    assert sealed.signer == public
    with Bundle.open(path, require_signature=True, trusted_keys=[public]) as bundle:
        assert bundle.digest == sealed.digest
    with Bundle.open(path, hmac_key=HMAC_KEY) as bundle:
        assert bundle.authenticated


@pytest.mark.parametrize("fault", ["key", "hmac", "progress", "full"])
def test_a_failed_finish_leaves_the_old_bundle_alone(path, tmp_path, fault):
    path.write_bytes(OLD_BUNDLE)
    (tmp_path / "key.pem").write_bytes(b"no key")

    def stop(done, total):
        raise KeyboardInterrupt

    options = {"key": {"sign_key": tmp_path / "key.pem"}, "hmac": {"hmac_key": b""}, "progress": {"progress": stop}}
    with BundleWriter(path, IDENTITY) as writer:
        for unit in sample_units():
            writer.add(unit, BUNDLE_ROOT)
        if fault == "full":
            # A scratch file that lost its end: as on a disk that fails.
            os.ftruncate(writer._scratch.fileno(), 10)
        with pytest.raises((ConfigError, KeyboardInterrupt)):
            writer.finish(**options.get(fault, {}))
        assert os.listdir(path.parent) == [path.name]
    assert path.read_bytes() == OLD_BUNDLE


def test_an_abandoned_writer_leaves_nothing(path):
    with BundleWriter(path, IDENTITY) as writer:
        writer.add(sample_units()[0], BUNDLE_ROOT)
    assert os.listdir(path.parent) == []


def test_a_killed_writer_leaves_nothing(path):
    """The scratch file has no name, so nobody has to remove it."""
    code = """
        import sys, time
        from kitelib.upcycle.bundle import BundleWriter
        from tests.support.bundle_units import BUNDLE_ROOT, IDENTITY, sample_units
        writer = BundleWriter(sys.argv[1], IDENTITY)
        for unit in sample_units():
            writer.add(unit, BUNDLE_ROOT)
        print("added", flush=True)
        sys.stdin.read()
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(sys.modules["tests.support.units"].__file__)))
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=os.path.dirname(root),
    )
    assert process.stdout.readline() == "added\n"
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert os.listdir(path.parent) == []


def test_payloads_are_not_held_in_memory(path):
    size = 2**20
    tracemalloc.start()
    try:
        with BundleWriter(path, dataclasses.replace(IDENTITY, block_bytes=size)) as writer:
            for index in range(24):
                unit = kv_unit([index, 1, 2, 3], 0, 4)
                data = np.full(size, index, np.uint8)
                writer.add(dataclasses.replace(unit, shape=(size // 2,), data=data), BUNDLE_ROOT)
            writer.finish()
        assert tracemalloc.get_traced_memory()[1] < 5 * size
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 24 * size
    with Bundle.open(path) as bundle:
        assert bundle.check() == []


def test_payloads_lie_in_the_order_they_came(path):
    units = sample_units()[:3]
    write_units(path, units, IDENTITY, BUNDLE_ROOT)
    with Bundle.open(path) as bundle:
        assert [unit.cf for unit in bundle.units] == [unit.cf for unit in units]


ROUNDED = BundleRoot(ROOT, {"layout": LAYOUT, "kv_precision": "int8"})


def test_rounded_units_need_a_root_that_says_so(path):
    kv = dataclasses.replace(kv_unit([1, 2, 3, 4], 0, 4), codec="int8_kv/none")
    logits = dataclasses.replace(logits_unit([1, 2, 3, 4]), codec="fp16_quant/none")
    with BundleWriter(path, IDENTITY) as writer:
        for unit, root in ((kv, BUNDLE_ROOT), (logits, BUNDLE_ROOT), (logits, ROUNDED)):
            with pytest.raises(InvalidRequestError, match="was rounded by the codec"):
                writer.add(unit, root)
        assert writer.add(kv, ROUNDED)
        assert writer.finish().units == {"kv": 1}


@pytest.mark.parametrize(
    ("unit", "words"),
    [
        (kv_unit(range(1, 6), 0, 5), "5 tokens; a block of the model has 1 to 4"),
        (dataclasses.replace(kv_unit([1, 2], 0, 2), shape=(2,), data=np.zeros(4, np.uint8)), "4 bytes for 2 tokens"),
        (dataclasses.replace(logits_unit([1]), shape=(1,), data=np.zeros(4, np.uint8)), "4 bytes; logits"),
    ],
)
def test_units_of_no_size_of_the_model_are_refused(path, unit, words):
    with BundleWriter(path, IDENTITY) as writer, pytest.raises(InvalidRequestError, match=words):
        writer.add(unit, BUNDLE_ROOT)


def test_the_time_may_be_given(path):
    digests = set()
    for _ in range(2):
        with BundleWriter(path, IDENTITY, created_at=12.5) as writer:
            for unit in sample_units():
                writer.add(unit, BUNDLE_ROOT)
            digests.add(writer.finish().digest)
        with Bundle.open(path) as bundle:
            assert bundle.manifest.created_at == 12.5
    assert len(digests) == 1
    with pytest.raises(ConfigError, match="a bundle can't say this"):
        BundleWriter(path, IDENTITY, created_at=float("nan"))


def test_a_header_that_no_reader_takes_is_an_error_with_a_remedy(path, monkeypatch):
    monkeypatch.setattr(container, "MAX_HEADER_BYTES", 2**11)
    with BundleWriter(path, IDENTITY) as writer:
        for unit in sample_units():
            writer.add(unit, BUNDLE_ROOT)
        with pytest.raises(ConfigError, match=r"6 units need a header of \d+ bytes, and readers take 2048; take fewer"):
            writer.finish()
    assert not path.exists()
