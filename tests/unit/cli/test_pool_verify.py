"""`kite pool verify`: finds every bad unit, deletes it if asked, and is safe on hostile ones."""

from __future__ import annotations

import dataclasses
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard

from kitelib.stores.keys import unit_key
from kitelib.testing import Fault, FaultyStore, fault_every
from kitelib.upcycle.unit import HEAD_BYTES, RecyclableUnit
from tests.support.pools import disk_at, entry, filled, key_of, with_store
from tests.support.units import kv_unit, logits_unit, units_of

Run = Callable[..., tuple[int, str, str]]
TOKENS = list(range(1, 10))
BLOCK = kv_unit(TOKENS, 0, 4)
NEXT = kv_unit(TOKENS, 4, 8)


def flipped(value: bytes, place: int) -> bytes:
    return value[:place] + bytes([value[place] ^ 1]) + value[place + 1 :]


def claiming(unit: RecyclableUnit, num_bytes: int) -> bytes:
    """A small value whose header, with good checksums, says that its data has `num_bytes` bytes of zstd."""
    value = bytearray(entry(unit, codec="raw", compression="zstd")[1])
    head = struct.Struct("<8sHHI 5B3s II QQQ d 32s32s32s")
    assert head.size == HEAD_BYTES
    fields = list(head.unpack_from(value))
    header_bytes, dims = fields[3], fields[8]
    plane = zstandard.ZstdCompressor().compress(bytes(num_bytes))
    payload = struct.pack("<B7x", 1) + struct.pack("<B7xQ", 1, len(plane)) + plane
    fields[11], fields[12], fields[13] = zlib.crc32(payload), len(payload), num_bytes
    head.pack_into(value, 0, *fields)
    struct.pack_into(f"<{dims}Q", value, head.size, num_bytes // 2)
    struct.pack_into("<I", value, header_bytes - 4, zlib.crc32(value[: header_bytes - 4]))
    return bytes(value[:header_bytes]) + payload


GOOD = entry(BLOCK)[1]
BAD = {
    "payload": (flipped(GOOD, len(GOOD) - 1), "the payload's checksum does not match"),
    "header": (flipped(GOOD, HEAD_BYTES - 1), "the header's checksum does not match"),
    "magic": (flipped(GOOD, 0), "the magic number is not that of a unit"),
    "cut": (GOOD[:-5], "the unit has"),
    "longer": (GOOD + b"x", "the unit has"),
    "empty": (b"", "0 bytes are too few for a unit"),
    "pickle": (b"\x80\x04\x95cos\nsystem\n(S'echo'\ntR." + bytes(400), "the magic number is not that of a unit"),
    "swapped": (entry(NEXT)[1], f"it is the kv unit {NEXT.cf.hex()[:16]} and lies under the key of another"),
    "model": (
        entry(dataclasses.replace(BLOCK, model_state=b"n" * 32))[1],
        "lies under the key of another",
    ),
    "huge": (claiming(BLOCK, 2**31), "are more than the"),
}


def test_good_units_are_good_in_every_codec(kite_pool: Run, tmp_path: Path) -> None:
    pairs = [("raw", "none"), ("raw", "zstd"), *(("paged_kvcache_v2", name) for name in ("none", "zstd", "entropy"))]
    units = [
        entry(unit, codec=codec, compression=compression)
        for number, (codec, compression) in enumerate(pairs)
        for unit in units_of([number + 10, *TOKENS])
    ]
    filled(disk_at(tmp_path), units)
    assert kite_pool("verify", "--disk", tmp_path) == (0, f"disk: {len(units)} units checked, 0 bad\n", "")


@pytest.mark.parametrize("case", BAD)
def test_a_bad_unit_is_found_and_with_fix_deleted(kite_pool: Run, tmp_path: Path, case: str) -> None:
    """B3: whatever bytes lie in a shared store, they are looked at, never run, and told apart from good ones."""
    value, reason = BAD[case]
    key = key_of(BLOCK)
    filled(disk_at(tmp_path), [(key, value), entry(NEXT), entry(logits_unit(TOKENS))])
    code, out, _ = kite_pool("verify", "--disk", tmp_path)
    assert code == 1
    assert out.splitlines()[0].startswith(f"disk: {key}: ")
    assert reason in out.splitlines()[0]
    assert out.splitlines()[1] == "disk: 3 units checked, 1 bad"

    code, out, _ = kite_pool("verify", "--disk", tmp_path, "--fix", "--json")
    (tier,) = json.loads(out)["tiers"]
    assert (code, tier["checked"], tier["bad"], tier["deleted"]) == (0, 3, 1, 1)
    assert [unit["key"] for unit in tier["bad_units"]] == [key]
    assert kite_pool("verify", "--disk", tmp_path) == (0, "disk: 2 units checked, 0 bad\n", "")


def test_a_key_that_is_no_units_is_bad(kite_pool: Run, tmp_path: Path) -> None:
    key = key_of(BLOCK)
    filled(disk_at(tmp_path), [(key[:-1], GOOD), (key.replace("{", "{0"), GOOD), ("kite:junk", GOOD)])
    code, out, _ = kite_pool("verify", "--disk", tmp_path)
    assert (code, out.count("lies under the key of another")) == (1, 3)


def test_only_what_is_asked_for_is_checked(kite_pool: Run, tmp_path: Path) -> None:
    filled(disk_at(tmp_path), [(key_of(BLOCK), b"junk"), entry(logits_unit(TOKENS))])
    assert kite_pool("verify", "--kind", "logits", "--disk", tmp_path)[1] == "disk: 1 units checked, 0 bad\n"
    assert kite_pool("verify", "--model", "00", "--disk", tmp_path)[1] == "disk: 0 units checked, 0 bad\n"


def test_many_and_large_units_pass_in_batches(kite_pool: Run, tmp_path: Path) -> None:
    large = dataclasses.replace(
        logits_unit(TOKENS), shape=(20 * 2**20,), data=np.zeros(80 * 2**20, np.uint8), dtype="float32"
    )
    small = [unit for number in range(60) for unit in units_of([number + 10, *TOKENS])]
    claims = claiming(BLOCK, 100 * 2**20)
    assert len(claims) < 2**20
    filled(disk_at(tmp_path), [*map(entry, small), entry(large), (key_of(BLOCK), claims)])
    code, out, _ = kite_pool("verify", "--disk", tmp_path, "--json")
    (tier,) = json.loads(out)["tiers"]
    assert (code, tier["checked"], tier["bad"], tier["gone"]) == (0, len(small) + 2, 0, 0)


def test_hmacs_are_checked_with_a_key_per_namespace(kite_pool: Run, tmp_path: Path) -> None:
    secret = b"sixteen bytes or more"
    key_file = tmp_path / "key"
    key_file.write_bytes(secret)
    folder = tmp_path / "pool"
    own, tenant, none = units_of(TOKENS[:8])
    filled(
        disk_at(folder),
        [
            entry(own, hmac_key=unit_key(secret, None)),
            entry(tenant, hmac_key=unit_key(secret, "tenant")),
            entry(none),
        ],
    )
    assert kite_pool("verify", "--disk", folder)[0] == 0

    options = ["verify", "--disk", folder, "--hmac-key-file", key_file]
    code, out, _ = kite_pool(*options, "--namespace", "tenant")
    assert (code, "the unit carries no HMAC, but a key is set" in out, "1 bad" in out) == (1, True, True)
    code, out, _ = kite_pool(*options)
    assert (code, "the HMAC does not match" in out, "2 bad" in out) == (1, True, True)
    key_file.write_bytes(b"another")
    assert "3 bad" in kite_pool(*options, "--namespace", "tenant")[1]
    assert secret.decode() not in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--hmac-key-file", "none"], "kite: the file 'none' of --hmac-key-file can't be read: No such file"),
        (["--namespace", "a"], "kite: --namespace is given without --hmac-key-file"),
    ],
)
def test_a_wrong_option_is_told(kite_pool: Run, tmp_path: Path, options: list[str], words: str) -> None:
    filled(disk_at(tmp_path), [entry(BLOCK)])
    code, out, err = kite_pool("verify", "--disk", tmp_path, *options)
    assert (code, out) == (2, "")
    assert words in err


def test_a_file_that_was_cut_on_the_disk_does_not_count_as_good(kite_pool: Run, tmp_path: Path) -> None:
    filled(disk_at(tmp_path), [entry(BLOCK), entry(NEXT)])
    path = next(path for path in (tmp_path / "values").rglob("*.ru") if BLOCK.cf.hex() in path.name)
    path.write_bytes(path.read_bytes()[:-3])
    _, out, _ = kite_pool("verify", "--disk", tmp_path)
    assert out == "disk: 1 units checked, 0 bad, 1 gone before they could be read\n"
    assert with_store(disk_at(tmp_path), lambda store: store.get_many([key_of(BLOCK)])) == [None]


def test_a_tier_that_fails_on_the_way_is_told_with_what_was_checked(
    kite_pool: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    units = [unit for number in range(60) for unit in units_of([number + 10, *TOKENS])]
    filled(disk_at(tmp_path / "a"), map(entry, units))
    filled(disk_at(tmp_path / "b"), map(entry, units))
    breaking = FaultyStore(disk_at(tmp_path / "a")(), fault_every(10, Fault("fail"), "get_heads"))
    stores = [("breaking", breaking), ("whole", disk_at(tmp_path / "b")())]
    monkeypatch.setattr("kitelib.stores.registry.open_stores", lambda config: stores)
    code, out, _ = kite_pool("verify", "--store", "x://", "--json")
    first, second = json.loads(out)["tiers"]
    assert code == 1
    assert first["problem"] == "call 9 of get_heads fails on schedule"
    assert 0 < first["checked"] < len(units)
    assert (second["problem"], second["checked"], second["bad"]) == ("", len(units), 0)


def test_progress_is_shown_to_a_person_only(kite_pool: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(disk_at(tmp_path), [entry(BLOCK)])
    assert kite_pool("verify", "--disk", tmp_path)[2] == ""
    monkeypatch.setattr("kitelib.cli.pool_check.is_terminal", lambda stream: True)
    assert "disk: 1 units checked, 0 bad" in kite_pool("verify", "--disk", tmp_path)[2]
