"""The form of bundles, held fast by a file: what one release wrote, every later one must read. docs/format.md is the spec.

``python -m tests.golden.test_bundle`` writes the file if it is missing: a new one, or one of a new format version.
"""

import dataclasses
import hashlib
import hmac
import json
import struct
import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import safetensors
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from kitelib.fingerprint import block_fingerprint, end_fingerprint
from kitelib.upcycle.bundle import Bundle, BundleRoot, BundleUnit, Manifest, ModelIdentity, container, signing
from kitelib.upcycle.bundle.manifest_json import metadata_of, tensors_of
from kitelib.upcycle.codec import codec_named
from tests.golden.test_format import BLOCKS, HMAC_KEY, MODEL, PROMPT, ROOT, kv_block, logits

FILE = Path(__file__).parent / "cockpit.kite"
SIGNING_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))  # as public as this file
PUBLIC_KEY = SIGNING_KEY.public_key().public_bytes_raw().hex()
ADAPTER = (bytes(range(32, 64)), 0.5)


def first_block():
    return dataclasses.replace(
        kv_block(),
        cf=BLOCKS[0],
        parent=ROOT,
        token_ids=np.array(PROMPT[:16], np.uint32),
        data=kv_block().data[::-1].copy(),
    )


def completion():
    return dataclasses.replace(
        logits(),
        kind="completion",
        layout="kite.completion",
        dtype="uint32",
        shape=(3,),
        data=np.array([1, 70, 2**32 - 1], "<u4").view(np.uint8),
    )


def units():
    """With the codec of each and its hits, in the order of their payloads."""
    return [
        (logits(), "raw/none", 1.0),
        (completion(), "raw/none", 0.25),
        (kv_block(), "paged_kvcache_v2/none", 12.0),
        (first_block(), "paged_kvcache_v2/zstd", 12.0),
    ]


def manifest(payloads):
    entries = [
        BundleUnit(
            kind=unit.kind,
            cf=unit.cf,
            parent=unit.parent,
            token_ids=unit.token_ids,
            layout=unit.layout,
            dtype=unit.dtype,
            shape=unit.shape,
            codec=codec,
            data_bytes=len(unit.data),
            epoch=unit.epoch,
            created_at=unit.created_at,
            sha256=hashlib.sha256(payload).digest(),
            crc32=zlib.crc32(payload),
            root=0,
            hits=hits,
            start=0,
            stop=len(payload),
        )
        for (unit, codec, hits), payload in zip(units(), payloads, strict=True)
    ]
    return Manifest(
        version=1,
        tool="kitelib golden",
        created_at=1_790_000_002.25,
        epoch=3,
        model=ModelIdentity("golden", MODEL, {"weights": "ab12", "kv_type": "f16"}, "golden.kv", 16, 2048, 50),
        roots=(BundleRoot(ROOT, {"backend": "golden", "chunk": 64, "flash": False}, "tenant", ADAPTER),),
        units=tuple(entries),
        labels={"f\u00fcr": "\u8f66\U0001f697"},
    )


def write(path, payloads):
    made = manifest(payloads)
    metadata, tensors = metadata_of(made), tensors_of(made.units)
    message = container.seal_message(container.content_digest(metadata, tensors))
    pem = SIGNING_KEY.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with tempfile.NamedTemporaryFile() as key_file:
        key_file.write(pem)
        key_file.flush()
        metadata[container.SIGNATURE_KEY] = signing.sign_message(key_file.name, message)
    metadata[container.HMAC_KEY] = signing.bundle_hmac(HMAC_KEY, message).hex()
    container.write_file(path, metadata, tensors, payloads)


def test_a_file_of_an_earlier_release_is_read():
    with Bundle.open(FILE, require_signature=True, trusted_keys=[PUBLIC_KEY]) as bundle:
        assert bundle.check() == []
        assert bundle.digest == "b62ec3eadd295f868352a9a84f4cf31bb2fb895534a994cc79c5f700afaf8fa9"
        expected = manifest([b""] * 4)
        for name in ("version", "tool", "created_at", "epoch", "model", "roots", "labels"):
            assert getattr(bundle.manifest, name) == getattr(expected, name)
        for entry, (unit, codec, hits) in zip(bundle.units, units(), strict=True):
            read = bundle.read(entry)
            assert read.data.tobytes() == unit.data.tobytes()
            for name in ("kind", "cf", "parent", "model_state", "epoch", "created_at", "layout", "dtype", "shape"):
                assert getattr(read, name) == getattr(unit, name), name
            assert np.array_equal(read.token_ids, unit.token_ids)
            assert (entry.codec, entry.hits) == (codec, hits)
    with Bundle.open(FILE, hmac_key=HMAC_KEY) as bundle:
        assert bundle.authenticated


def test_the_same_bytes_are_written(tmp_path):
    """But for the compressed payload, which may differ between versions of zstd and is taken from the file."""
    with Bundle.open(FILE) as bundle:
        payloads = [bytes(bundle.stored(unit)) for unit in bundle.units]
    for (unit, codec, _), payload in list(zip(units(), payloads, strict=True))[:3]:
        assert bytes(codec_named(codec).encode(unit.data, unit.dtype, unit.shape)) == payload
    write(tmp_path / "again.kite", payloads)
    assert (tmp_path / "again.kite").read_bytes() == FILE.read_bytes()


def field(tag, body):
    return tag + struct.pack("<Q", len(body)) + body


def canonical(value):
    return json.dumps(value, ensure_ascii=True, sort_keys=True, separators=(",", ":"))


def test_the_specification_describes_the_file():
    """Reads it by docs/format.md, without any code of the library but the fingerprints."""
    blob = FILE.read_bytes()
    (length,) = struct.unpack_from("<Q", blob)
    assert (8 + length) % 64 == 0
    header = json.loads(blob[8 : 8 + length])
    assert blob[8 : 8 + length].rstrip(b" ").decode("ascii") == canonical(header)
    texts = header.pop("__metadata__")
    assert set(texts) == {"kite.bundle", "kite.units", "kite.signature", "kite.hmac"}
    bundle, entries = json.loads(texts["kite.bundle"]), json.loads(texts["kite.units"])
    assert (bundle["version"], bundle["model"]["model_state"]) == (1, MODEL.hex())
    assert bundle["roots"][0]["adapter"] == {"digest": ADAPTER[0].hex(), "scale": 0.5}
    end = 0
    for entry in entries:
        tensor = header[f"{entry['kind']}.{entry['cf']}"]
        start, stop = tensor["data_offsets"]
        assert start == end
        end = stop
        payload = blob[8 + length + start : 8 + length + stop]
        assert (zlib.crc32(payload), hashlib.sha256(payload).hexdigest()) == (entry["crc32"], entry["sha256"])
        plain = {"float16": "F16", "float32": "F32", "uint32": "U32"}[entry["dtype"]], entry["shape"]
        compressed = entry["codec"] == "paged_kvcache_v2/zstd"
        assert (tensor["dtype"], tensor["shape"]) == (("U8", [stop - start]) if compressed else plain)
        link = block_fingerprint if entry["kind"] == "kv" else end_fingerprint
        assert link(bytes.fromhex(entry["parent"]), entry["token_ids"]).hex() == entry["cf"]
    assert 8 + length + end == len(blob)


def test_the_specification_describes_the_seals():
    blob = FILE.read_bytes()
    (length,) = struct.unpack_from("<Q", blob)
    tensors = json.loads(blob[8 : 8 + length])
    texts = tensors.pop("__metadata__")
    signature, code = json.loads(texts.pop("kite.signature")), texts.pop("kite.hmac")
    digest = hashlib.sha256(canonical({"metadata": texts, "tensors": tensors}).encode("ascii")).digest()
    message = b"kite.bundle\0" + digest
    assert (signature["algorithm"], signature["public_key"]) == ("ed25519", PUBLIC_KEY)
    key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature["public_key"]))
    key.verify(bytes.fromhex(signature["signature"]), field(b"s", b"kite.bundle.signature") + field(b"b", message))
    derived = hmac.digest(HMAC_KEY, field(b"s", b"kite.bundle.key"), "sha256")
    assert code == hmac.digest(derived, message, "sha256").hex()


@pytest.mark.parametrize("name", [f"{unit.kind}.{unit.cf.hex()}" for unit, codec, _ in units() if "zstd" not in codec])
def test_standard_tools_read_it(name):
    unit = next(unit for unit, _, _ in units() if name == f"{unit.kind}.{unit.cf.hex()}")
    with safetensors.safe_open(FILE, "numpy") as file:
        tensor = file.get_tensor(name)
    assert (tensor.dtype, tensor.shape) == (np.dtype(unit.dtype), unit.shape)
    assert tensor.tobytes() == unit.data.tobytes()


if __name__ == "__main__" and not FILE.exists():
    write(FILE, [bytes(codec_named(codec).encode(unit.data, unit.dtype, unit.shape)) for unit, codec, _ in units()])
