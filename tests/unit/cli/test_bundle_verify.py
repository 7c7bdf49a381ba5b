"""`kite bundle verify`: reads everything, and with a model proves that it is what the model computes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kitelib.upcycle.bundle import Bundle, BundleWriter
from kitelib.upcycle.bundle.signing import new_key
from tests.support.backends import BackendKit
from tests.support.engines import some_tokens

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def built(kite_bundle: Run, kit: BackendKit, tmp_path: Path) -> Callable[..., Path]:
    """``built(lines, *options)``: a bundle of a tiny model."""

    def make(lines: list[Any], *options: Any, model: Any = None) -> Path:
        prompts, path = tmp_path / "prompts.jsonl", tmp_path / "built.kite"
        prompts.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        what = ("build", model or kit.small(), "--prompts", prompts, "-o", path, "--threads", 1)
        code, _, err = kite_bundle(*what, *options)
        assert (code, err) == (0, "")
        return path

    return make


PROMPTS: list[Any] = [some_tokens(70), {"prompt": some_tokens(40, first=900), "completion": 4}]


def planted(path: Path, target: Path) -> Path:
    """A bundle with good checksums in which two blocks have each other's KV."""
    with Bundle.open(path) as bundle:
        manifest = bundle.manifest
        blocks = [unit for unit in bundle.units if unit.kind == "kv" and len(unit.token_ids) == 16]
        other = {blocks[0].cf: blocks[1], blocks[1].cf: blocks[0]}
        with BundleWriter(target, manifest.model) as writer:
            for unit in bundle.units:
                made = bundle.read(unit)
                if unit.kind == "kv" and unit.cf in other:
                    made = dataclasses.replace(made, data=bundle.read(other[unit.cf]).data)
                writer.add(made, manifest.roots[unit.root])
            writer.finish()
    return target


def test_every_unit_is_read(kite_bundle: Run, built: Callable[..., Path]) -> None:
    path = built(PROMPTS)
    code, out, err = kite_bundle("verify", path)
    assert (code, err) == (0, "")
    first, second = out.splitlines()
    assert first.startswith(f"{path}: 12 units checked, 0 bad; ")
    assert first.endswith(" MB/s")
    assert second == "not signed"
    code, out, _ = kite_bundle("verify", path, "--json")
    found = json.loads(out)
    assert (code, found["ok"], found["units"], found["bad"], found["signer"]) == (0, True, 12, [], None)
    assert found["bytes"] == path.stat().st_size > found["payload_bytes"] > 0
    assert found["bytes_per_s"] > 0
    assert "proof" not in found


def test_a_damaged_unit_is_named(kite_bundle: Run, kit: BackendKit, built: Callable[..., Path]) -> None:
    path = built(PROMPTS)
    with Bundle.open(path) as bundle:
        unit = bundle.units[3]
    data = bytearray(path.read_bytes())
    data[unit.start] ^= 1
    path.write_bytes(data)
    code, out, _ = kite_bundle("verify", path, "--model", kit.small())
    assert code == 1
    assert out.startswith(f"{unit.kind} {unit.cf.hex()[:16]}: ")
    assert "12 units checked, 1 bad" in out
    assert out.endswith("Nothing was computed, since units are bad.\n")
    code, out, _ = kite_bundle("verify", path, "--json")
    assert (code, [each["cf"] for each in json.loads(out)["bad"]]) == (1, [unit.cf.hex()])


@pytest.mark.parametrize("numerics", ["standard", "bitwise"])
def test_a_model_proves_it(kite_bundle: Run, kit: BackendKit, built: Callable[..., Path], numerics: str) -> None:
    path = built(PROMPTS, "--numerics", numerics)
    code, out, err = kite_bundle("verify", path, "--model", kit.small(), "--threads", 1)
    assert (code, err) == (0, "")
    rows = sorted(line.split() for line in out.splitlines() if line.endswith("good"))
    assert sorted(row[1:4] for row in rows) == [["40", "39", "39"], ["70", "69", "69"]]
    what = "equal bits" if numerics == "bitwise" else "equal values, within the bounds of standard numerics"
    assert f"2 prompts restored and computed cold ({what}): 0 wrong" in out
    code, out, _ = kite_bundle("verify", path, "--model", kit.small(), "--threads", 1, "--json")
    proof = json.loads(out)["proof"]
    assert (code, proof["ok"], proof["numerics"], proof["problems"]) == (0, True, numerics, [])
    assert sorted(run["answer_tokens"] for run in proof["runs"]) == [0, 4]


def test_a_planted_unit_is_found_only_by_the_model(
    kite_bundle: Run, kit: BackendKit, built: Callable[..., Path], tmp_path: Path
) -> None:
    path = planted(built(PROMPTS), tmp_path / "planted.kite")
    assert kite_bundle("verify", path)[0] == 0
    code, out, _ = kite_bundle("verify", path, "--model", kit.small(), "--threads", 1)
    assert code == 1
    assert "differs from the cold run" in out
    assert "wrong" in out


def test_another_model_is_refused(kite_bundle: Run, kit: BackendKit, built: Callable[..., Path]) -> None:
    code, out, err = kite_bundle("verify", built(PROMPTS), "--model", kit.small(2), "--threads", 1)
    assert (code, out) == (1, "")
    assert "weights" in err or "model_state" in err


def test_signatures_and_hmac(kite_bundle: Run, built: Callable[..., Path], tmp_path: Path) -> None:
    (pem, public), (_, other) = new_key(), new_key()
    (tmp_path / "key.pem").write_bytes(pem)
    (tmp_path / "hmac").write_bytes(b"k" * 32)
    (tmp_path / "wrong").write_bytes(b"w" * 32)
    signed = built(PROMPTS, "--sign-key", tmp_path / "key.pem", "--hmac-key-file", tmp_path / "hmac")
    code, out, _ = kite_bundle("verify", signed, "--trusted-key", public)
    assert (code, out.splitlines()[1]) == (0, f"signed by {public}")
    code, out, _ = kite_bundle("verify", signed)
    assert (code, out.splitlines()[1]) == (
        0,
        f"a signature that says it is of {public} was not checked: give --trusted-key",
    )
    assert kite_bundle("verify", signed, "--hmac-key-file", tmp_path / "hmac")[0] == 0
    for options in (("--trusted-key", other), ("--hmac-key-file", tmp_path / "wrong")):
        code, out, err = kite_bundle("verify", signed, *options)
        assert (code, out) == (1, ""), err
    code, _, err = kite_bundle("verify", signed, "--require-signature")
    assert code == 2
    assert "--require-signature needs --trusted-key" in err
    unsigned = built(PROMPTS)
    code, _, err = kite_bundle("verify", unsigned, "--trusted-key", public)
    assert code == 1
    assert "is not signed" in err


def test_what_is_no_bundle(kite_bundle: Run, tmp_path: Path) -> None:
    (tmp_path / "text.kite").write_text("no bundle at all")
    assert kite_bundle("verify", tmp_path / "text.kite")[0] == 1
    assert kite_bundle("verify", tmp_path / "missing.kite")[0] == 2
    assert kite_bundle("verify", tmp_path / "text.kite", "--model", tmp_path / "missing.gguf")[0] == 2


def test_adapters_namespaces_and_the_real_model(
    kite_bundle: Run, smollm2: Path, smollm2_lora: Path, tmp_path: Path
) -> None:
    """A cockpit's prompts from beginning to end: chats, a template, an adapter and completions."""
    system = {"role": "system", "content": "You are the assistant of a car. Answer in one sentence, and be friendly."}
    lines = [
        {"messages": [system, {"role": "user", "content": "Open the window."}], "hits": 20},
        {"messages": [system, {"role": "user", "content": "打开车窗。"}], "completion": 6},
        {"template": [system, {"role": "user", "content": "{{command}}"}], "hits": 1000},
        {"prompt": "The car is", "adapter": "lora"},
    ]
    prompts, path = tmp_path / "prompts.jsonl", tmp_path / "cockpit.kite"
    prompts.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    common = ("--threads", 1, "--adapter", f"lora={smollm2_lora}")
    code, out, err = kite_bundle(
        "build", smollm2, "--prompts", prompts, "-o", path, "--namespace", "fleet", "--ctx", 512, *common
    )
    assert (code, err) == (0, "")
    assert "4 prompts, 1 template among them" in out
    code, out, err = kite_bundle("verify", path, "--model", smollm2, "--json", *common)
    found = json.loads(out)
    assert (code, err, found["ok"]) == (0, "", True)
    runs = found["proof"]["runs"]
    assert {(run["namespace"], run["adapter"]) for run in runs} == {("fleet", None), ("fleet", "lora")}
    assert all(run["cached_tokens"] == run["expected_tokens"] for run in runs)
    code, out, _ = kite_bundle("verify", path, "--model", smollm2, "--threads", 1)
    assert code == 1
    assert "can't be proved: they are of adapters or namespaces that this engine does not have" in out


def test_help_has_examples(kite_bundle: Run) -> None:
    code, out, _ = kite_bundle("verify", "--help")
    assert code == 0
    assert "kite bundle verify cockpit.kite --model model.gguf" in out
