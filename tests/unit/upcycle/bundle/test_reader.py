"""`Bundle`: maps, verifies, and becomes a miss when anything is not what it was."""

import dataclasses
import gc
import hashlib
import json
import os
import subprocess
import sys
import textwrap
import threading
import zlib

import numpy as np
import pytest

from kitelib.errors import (
    BundleError,
    BundleNotFoundError,
    BundleSignatureError,
    ConfigError,
    FormatError,
)
from kitelib.fingerprint import model_key, store_key
from kitelib.upcycle.bundle import Bundle
from kitelib.upcycle.bundle.signing import new_key
from kitelib.upcycle.unit import Expectation
from tests.support.bundle_files import bundle_file
from tests.support.bundle_units import BUNDLE_ROOT, IDENTITY, header_of, sample_units, write_raw
from tests.support.bundles import write_units

HMAC_KEY = b"0123456789abcdef"


def written(path, **options):
    write_units(path, sample_units(), IDENTITY, BUNDLE_ROOT, **options)
    return path


def expectation(unit, **changes):
    fields = {"kind": unit.kind, "cf": unit.cf, "token_ids": unit.token_ids, "model_state": IDENTITY.model_state}
    return Expectation(**{**fields, "layout": unit.layout, "num_bytes": unit.data_bytes, **changes})


def flip(path, position):
    """Changes one bit behind the reader's back: size and modification time stay."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.fixture
def path(tmp_path):
    return written(tmp_path / "x.kite")


@pytest.fixture
def keys(tmp_path):
    pem, public = new_key()
    (tmp_path / "key.pem").write_bytes(pem)
    return tmp_path / "key.pem", public


@pytest.mark.parametrize("compression", ["none", "zstd", "entropy"])
def test_units_come_back(tmp_path, compression):
    path = written(tmp_path / "x.kite", compression=compression)
    sources = {(unit.kind, unit.cf): unit for unit in sample_units()}
    with Bundle.open(path) as bundle:
        assert len(bundle.units) == len(sources)
        for unit in bundle.units:
            source = sources[unit.kind, unit.cf]
            for read in (
                bundle.read(unit),
                bundle.read(unit, expectation(unit)),
                bundle.read(
                    unit, expectation(unit, layout=None, num_bytes=None, token_ids=unit.token_ids.tolist()), full=True
                ),
            ):
                assert read.data.tobytes() == source.data.tobytes()
                assert (read.kind, read.cf, read.parent, read.shape) == (
                    source.kind,
                    source.cf,
                    source.parent,
                    source.shape,
                )
                assert (read.model_state, read.dtype, read.codec) == (source.model_state, source.dtype, unit.codec)
                assert not read.data.flags.writeable
        assert bundle.check() == []
        assert bundle.num_bytes == path.stat().st_size


def test_keys_are_those_of_the_stores(path):
    with Bundle.open(path) as bundle:
        model = model_key(IDENTITY.model_state)
        assert dict(bundle.keys) == {store_key(model, unit.kind, unit.cf): unit for unit in bundle.units}
        with pytest.raises(TypeError):
            bundle.keys["x"] = bundle.units[0]


def test_data_is_a_copy_that_outlives_bundle_and_file(path):
    """Whatever becomes of the file: a unit that was read may wait for its turn long after it was checked."""
    with Bundle.open(path) as bundle:
        reads = [bundle.read(unit) for unit in bundle.units]
        copies = [read.data.tobytes() for read in reads]
    del bundle
    gc.collect()
    assert not mapped(path)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(bytes(size))
        file.truncate(0)
    assert [read.data.tobytes() for read in reads] == copies


def mapped(path):
    with open("/proc/self/maps") as file:
        return [line for line in file if str(path) in line]


def test_closing_gives_the_descriptor_back(path):
    before = set(os.listdir("/proc/self/fd"))
    bundle = Bundle.open(path)
    bundle.close()
    bundle.close()
    assert set(os.listdir("/proc/self/fd")) == before
    assert not mapped(path)
    with pytest.raises(FormatError, match="is closed"):
        bundle.read(bundle.units[0])
    assert not bundle.changed


def test_a_refused_file_is_given_back(path):
    header, data = header_of(path)
    write_raw(path, header, data + b"x")
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(BundleError):
        Bundle.open(path)
    assert set(os.listdir("/proc/self/fd")) == before


def test_what_is_not_there(tmp_path):
    for path in (tmp_path / "none.kite", tmp_path / "none" / "x.kite"):
        with pytest.raises(BundleNotFoundError, match="there is no bundle"):
            Bundle.open(path)
    with pytest.raises(FileNotFoundError):
        Bundle.open(str(tmp_path / "none.kite"))
    (tmp_path / "empty.kite").touch()
    for path in (tmp_path, tmp_path / "empty.kite", "a\0b"):
        with pytest.raises(BundleError) as caught:
            Bundle.open(path)
        assert not isinstance(caught.value, BundleNotFoundError)
    os.symlink("loop", tmp_path / "loop")
    with pytest.raises(BundleError, match="can't be opened"):
        Bundle.open(tmp_path / "loop")


def test_a_longer_header_than_allowed(path):
    with pytest.raises(BundleError, match="at most 100 are read"):
        Bundle.open(path, max_header_bytes=100)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "logits"}, "of kind 'kv', not 'logits'"),
        ({"cf": b"x" * 32}, f"the unit is .*, not {b'x'.hex() * 8}"),
        ({"model_state": b"x" * 32}, "of model state"),
        ({"layout": "other"}, "layout is"),
        ({"num_bytes": 95}, "not 95"),
        ({"token_ids": [1, 2, 3]}, "token ids differ"),
        ({"token_ids": [1, 2, 3, 5]}, "token ids differ"),
    ],
)
def test_only_what_is_looked_for_is_given(path, changes, words):
    with Bundle.open(path) as bundle:
        unit = next(unit for unit in bundle.units if unit.kind == "kv" and unit.token_ids.tolist() == [1, 2, 3, 4])
        bundle.read(unit, expectation(unit))
        with pytest.raises(FormatError, match=words):
            bundle.read(unit, expectation(unit, **changes))


def test_units_of_other_bundles_are_refused(path):
    with (
        Bundle.open(path) as bundle,
        Bundle.open(path) as other,
        pytest.raises(FormatError, match="none of the bundle"),
    ):
        bundle.read(other.units[0])


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_damage_is_found_at_every_use(tmp_path, compression):
    path = written(tmp_path / "x.kite", compression=compression)
    with Bundle.open(path) as bundle:
        for unit in bundle.units:
            bundle.read(unit)
            flip(path, unit.stop - 1)
            with pytest.raises(FormatError, match="CRC-32 differs"):
                bundle.read(unit)
            flip(path, unit.stop - 1)
            bundle.read(unit)
        flip(path, bundle.units[1].start)
        ((unit, reason),) = bundle.check()
        assert unit is bundle.units[1]
        assert "CRC-32" in reason


def test_check_reports_progress(path):
    done = []
    with Bundle.open(path) as bundle:
        bundle.check(done.append)
        assert done == [unit.stop - bundle.units[0].start for unit in bundle.units]


def with_other_bytes(path, position):
    """A bundle whose payload was changed by somebody who set the CRC-32 right, but not the SHA-256."""
    header, data = header_of(path)
    data = bytearray(data)
    data[position] ^= 1
    units = json.loads(header["__metadata__"]["kite.units"])
    for unit in units:
        begin, end = header[f"{unit['kind']}.{unit['cf']}"]["data_offsets"]
        if begin <= position < end:
            unit["crc32"] = zlib.crc32(data[begin:end])
    header["__metadata__"]["kite.units"] = json.dumps(units)
    return write_raw(path, header, bytes(data))


def test_full_reads_compare_sha256(path):
    with_other_bytes(path, 0)
    with Bundle.open(path) as bundle:
        assert not bundle.authenticated
        bundle.read(bundle.units[0])
        with pytest.raises(FormatError, match="SHA-256 differs"):
            bundle.read(bundle.units[0], full=True)
        assert [unit for unit, _ in bundle.check()] == [bundle.units[0]]


@pytest.mark.parametrize("sealed_by", ["hmac", "signature"])
def test_authenticated_bundles_compare_sha256_once(tmp_path, keys, sealed_by):
    key_file, public = keys
    made = {"hmac_key": HMAC_KEY} if sealed_by == "hmac" else {"sign_key": key_file}
    opened = {"hmac_key": HMAC_KEY} if sealed_by == "hmac" else {"trusted_keys": [public]}
    path = written(tmp_path / "x.kite", **made)
    with Bundle.open(path, **opened) as bundle:
        assert bundle.authenticated
        first, second = bundle.units[:2]
        bundle.read(first)
        # The CRC-32 is that of the header, so only a SHA-256 can tell: forge the record, which is what a collision is.
        for unit in (first, second):
            object.__setattr__(unit, "sha256", hashlib.sha256(b"other").digest())
        bundle.read(first)
        with pytest.raises(FormatError, match="SHA-256 differs"):
            bundle.read(second)
        with pytest.raises(FormatError, match="SHA-256 differs"):
            bundle.read(first, full=True)
    with_other_bytes(path, 0)
    with pytest.raises(BundleSignatureError):
        Bundle.open(path, **opened)


def test_policies(tmp_path, keys):
    key_file, public = keys
    other = new_key()[1]
    plain, keyed, signed = (tmp_path / name for name in ("plain", "keyed", "signed"))
    written(plain)
    written(keyed, hmac_key=HMAC_KEY)
    written(signed, sign_key=key_file)

    for path in (plain, keyed, signed):
        with Bundle.open(path) as bundle:
            assert (bundle.signer, bundle.authenticated) == (None, False)
            assert bundle.has_hmac == (path == keyed)
            assert bundle.signed_by == (public if path == signed else None)
    with Bundle.open(signed, require_signature=True, trusted_keys=[other, public]) as bundle:
        assert bundle.signer == public
    with Bundle.open(signed, trusted_keys=[public], hmac_key=HMAC_KEY) as bundle:  # a trusted signature is enough
        assert bundle.authenticated
    with Bundle.open(keyed, trusted_keys=[public], hmac_key=HMAC_KEY) as bundle:
        assert (bundle.signer, bundle.authenticated) == (None, True)
    with Bundle.open(plain, trusted_keys=[public]) as bundle:
        assert not bundle.authenticated

    for path, options, words in [
        (plain, {"require_signature": True, "trusted_keys": [public]}, "is not signed"),
        (keyed, {"require_signature": True, "trusted_keys": [public], "hmac_key": HMAC_KEY}, "is not signed"),
        (signed, {"trusted_keys": [other]}, "none of the 1 trusted keys"),
        (plain, {"hmac_key": HMAC_KEY}, "neither an HMAC nor a trusted signature"),
        (signed, {"hmac_key": HMAC_KEY}, "neither an HMAC nor a trusted signature"),
        (keyed, {"hmac_key": b"another key of 16"}, "does not match"),
    ]:
        with pytest.raises(BundleSignatureError, match=words) as caught:
            Bundle.open(path, **options)
        assert repr(str(path)) in str(caught.value)
    with pytest.raises(ConfigError, match="needs trusted_keys"):
        Bundle.open(signed, require_signature=True)


def test_a_seal_can_not_be_moved_to_another_bundle(tmp_path, keys):
    key_file, public = keys
    sealed = written(tmp_path / "sealed", sign_key=key_file, hmac_key=HMAC_KEY)
    other = written(tmp_path / "other", labels={"of": "somebody else"})
    seal = {name: header_of(sealed)[0]["__metadata__"][name] for name in ("kite.signature", "kite.hmac")}
    header, data = header_of(other)
    header["__metadata__"].update(seal)
    write_raw(other, header, data)
    with pytest.raises(BundleSignatureError):
        Bundle.open(other, trusted_keys=[public])
    with pytest.raises(BundleSignatureError, match="does not match"):
        Bundle.open(other, hmac_key=HMAC_KEY)


@pytest.mark.parametrize("text", ["", "zz", "00" * 31, "[]", "{}"])
def test_seals_that_are_none(path, keys, text):
    header, data = header_of(path)
    header["__metadata__"].update({"kite.signature": text, "kite.hmac": text})
    write_raw(path, header, data)
    with Bundle.open(path) as bundle:
        assert (bundle.signed_by, bundle.has_hmac) == (None, True)
    with pytest.raises(BundleSignatureError):
        Bundle.open(path, trusted_keys=[keys[1]])
    with pytest.raises(BundleSignatureError):
        Bundle.open(path, hmac_key=HMAC_KEY)


def test_the_digest_is_that_of_the_content(tmp_path, keys):
    first = written(tmp_path / "a")
    header, data = header_of(first)
    signed = written(tmp_path / "b", sign_key=keys[0])
    (tmp_path / "c").write_bytes(signed.read_bytes())
    write_raw(tmp_path / "d", dict(reversed(header.items())), data)
    with Bundle.open(signed) as b, Bundle.open(tmp_path / "c") as c:
        assert b.digest == c.digest
    with Bundle.open(first) as a, Bundle.open(tmp_path / "d") as d:
        assert a.digest == d.digest
        assert len(a.digest) == 64


@pytest.mark.parametrize("how", ["truncate", "append", "rewrite"])
def test_an_overwritten_file_is_a_miss_for_good(path, how):
    whole = path.read_bytes()
    with Bundle.open(path) as bundle:
        bundle.read(bundle.units[0])
        times = path.stat()
        if how == "truncate":
            os.truncate(path, 100)
        elif how == "append":
            with path.open("ab") as file:
                file.write(b"x")
        else:
            path.write_bytes(whole)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
        with pytest.raises(FormatError, match="was changed since it was opened"):
            bundle.read(bundle.units[0])
        assert bundle.changed
        path.write_bytes(whole)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        with pytest.raises(FormatError, match="was changed"):
            bundle.read(bundle.units[0])
        assert len(bundle.check()) == len(bundle.units)


def test_a_replaced_or_removed_file_stays_usable(path, tmp_path):
    with Bundle.open(path) as bundle:
        (tmp_path / "new").write_bytes(b"something else")
        os.replace(tmp_path / "new", path)
        assert bundle.check() == []
        path.unlink()
        assert bundle.check() == []
        assert not bundle.changed


def test_reading_in_threads_while_it_is_closed(path):
    bundle = Bundle.open(path)
    sources = {(unit.kind, unit.cf): unit.data.tobytes() for unit in sample_units()}
    wrong, started = [], threading.Barrier(5)

    def work():
        started.wait()
        for _ in range(300):
            for unit in bundle.units:
                try:
                    if bundle.read(unit).data.tobytes() != sources[unit.kind, unit.cf]:
                        wrong.append(unit)
                except FormatError as error:
                    if "closed" not in str(error):
                        wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    started.wait()
    bundle.read(bundle.units[0])
    bundle.close()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert not bundle.changed


def test_a_bundle_built_on_one_path_is_used_on_another(path, tmp_path):
    other = tmp_path / "elsewhere" / "\u00fc y.kite"
    other.parent.mkdir()
    other.write_bytes(path.read_bytes())
    with Bundle.open(path) as first, Bundle.open(other) as second:
        assert first.digest == second.digest
        assert second.check() == []
        assert second.path == str(other)


def run(code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_two_processes_share_the_pages(tmp_path):
    """Both read every page; each then sees its mapping as shared and clean: one copy in memory, and none of its own."""
    path = written(tmp_path / "x.kite")
    large = np.arange(2**19, dtype="<u4").view(np.uint8)
    with Bundle.open(path) as bundle:
        unit = bundle.read(next(unit for unit in bundle.units if unit.kind == "logits"))
    model = dataclasses.replace(IDENTITY, vocab_size=2**19)
    write_units(path, [dataclasses.replace(unit, shape=(2**19,), data=large)], model, BUNDLE_ROOT)
    code = """
        import sys
        from kitelib.upcycle.bundle import Bundle
        bundle = Bundle.open(sys.argv[1])
        unit = bundle.read(bundle.units[0], full=True)
        print("read", flush=True)
        sys.stdin.readline()
        found, inside = {}, False
        for line in open("/proc/self/smaps"):
            if "-" in line.split()[0]:
                inside = sys.argv[1] in line
            elif inside and line.endswith("kB\\n"):
                name, value, _ = line.split()
                found[name] = int(value)
        print(found["Rss:"], found["Shared_Clean:"], found["Private_Dirty:"], found["Private_Clean:"], flush=True)
        sys.stdin.readline()
    """
    processes = [run(code, path) for _ in range(2)]
    try:
        assert [process.stdout.readline() for process in processes] == ["read\n"] * 2
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
            resident, shared, dirty, private = map(int, process.stdout.readline().split())
            assert resident >= 2048
            assert shared > 0
            assert shared == resident
            assert (dirty, private) == (0, 0)
    finally:
        for process in processes:
            process.communicate("\n")


def test_opening_needs_little():
    code = """
        import sys
        from kitelib.upcycle.bundle.reader import Bundle
        print([name for name in ("torch", "transformers", "redis", "safetensors", "cryptography", "llama_cpp")
               if name in sys.modules])
    """
    process = run(code)
    assert process.communicate()[0] == "[]\n"
    assert process.returncode == 0


@pytest.mark.parametrize("content", [b"GGUF\x03\0\0\0\x22\0\0\0", b"Some text that is no bundle.\n", b"PK\x03\x04" * 9])
def test_a_file_of_another_kind_is_called_that(tmp_path, content):
    (tmp_path / "x.kite").write_bytes(content)
    with pytest.raises(BundleError, match=r"x\.kite' can't be used: it is no bundle, but a file of another kind"):
        Bundle.open(tmp_path / "x.kite")


def test_a_folder_is_refused_without_a_number_of_the_system(tmp_path):
    with pytest.raises(BundleError, match=r"can't be opened: [^\[]+$"):
        Bundle.open(tmp_path)


def test_one_key_needs_no_list(tmp_path):
    pem, public = new_key()
    (tmp_path / "key.pem").write_bytes(pem)
    path = bundle_file(tmp_path / "a.kite", sign_key=tmp_path / "key.pem")
    for key in (public, bytes.fromhex(public)):
        with Bundle.open(path, require_signature=True, trusted_keys=key) as bundle:
            assert bundle.signer == public
    with pytest.raises(BundleSignatureError):
        Bundle.open(path, require_signature=True, trusted_keys="0" * 64)
