"""Adapter folders: what is read, what names them, and what is refused, with the remedy."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from kitelib.backends.torch_engine.peft_folder import folder_digest, pair_tensors, read_adapter
from kitelib.errors import KiteError, ModelFormatError, ModelNotFoundError, UnsupportedOptionError
from tests.support.peft_folders import edit_config, edit_tensors, small_model, write_adapter

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
SECOND = FIRST.replace("lora_A", "lora_B")
MODULE = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model("llama")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, model: Any) -> Path:
    folder = tmp_path_factory.mktemp("peft") / "adapter"
    write_adapter(folder, model)
    return folder


@pytest.fixture
def folder(tmp_path: Path, original: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "adapter"))


def refusal(folder: Path, kind: type[KiteError] = UnsupportedOptionError) -> str:
    with pytest.raises(kind) as caught:
        read_adapter(folder, "mine", folder.parent / "cache")
    assert "the adapter 'mine'" in str(caught.value)
    return str(caught.value)


def digest_of(folder: Path) -> bytes:
    return folder_digest(folder, "mine", folder.parent / "cache")


def test_factors_follow_rank_alpha_and_patterns(folder: Path) -> None:
    assert read_adapter(folder, "mine", folder.parent).scales[MODULE] == 2.0
    edit_config(folder, use_rslora=True)
    assert read_adapter(folder, "mine", folder.parent).scales[MODULE] == 4.0
    edit_config(folder, alpha_pattern={r"layers\.[0]\..*q_proj": 3, "q_proj": 12})
    scales = read_adapter(folder, "mine", folder.parent).scales
    assert scales[MODULE] == 1.5
    assert scales["model.layers.1.self_attn.q_proj"] == 6.0
    assert scales["model.layers.1.self_attn.v_proj"] == 4.0


def test_moved_folder_has_the_same_digest(folder: Path, tmp_path: Path) -> None:
    before = digest_of(folder)
    assert read_adapter(folder, "other", tmp_path / "elsewhere").digest == before
    moved = folder.rename(tmp_path / "moved")
    edit_config(moved, base_model_name_or_path="other/name", lora_dropout=0.7, inference_mode=True)
    assert digest_of(moved) == before


def test_changed_weight_or_factor_has_another_digest(folder: Path) -> None:
    before = digest_of(folder)
    edit_config(folder, lora_alpha=9)
    changed = digest_of(folder)
    edit_config(folder, lora_alpha=8)
    assert digest_of(folder) == before != changed

    def nudge(tensors: dict[str, Any]) -> None:
        tensors[FIRST][0, 0] += 1e-3

    edit_tensors(folder, nudge)
    assert digest_of(folder) not in (before, changed)


def test_remembered_digest_reads_no_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kitelib.backends.digest._SETTLED_NS", 0)
    weights = folder / "adapter_model.safetensors"
    os.utime(weights, (time.time() - 100,) * 2)
    before = digest_of(folder)
    monkeypatch.setattr("kitelib.backends.digest._hash", lambda *_: pytest.fail("hashed again"))
    assert digest_of(folder) == before


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("use_dora", True, "use_dora=False"),
        ("bias", "all", "bias='none'"),
        ("bias", "lora_only", "bias='none'"),
        ("lora_bias", True, "lora_bias=False"),
        ("modules_to_save", ["lm_head"], "merge the adapter, or train without them"),
        ("trainable_token_indices", [1, 2], "merge the adapter"),
        ("fan_in_fan_out", True, "Conv1D"),
        ("layer_replication", [[0, 1], [0, 2]], "merge the adapter and save that"),
        ("target_parameters", ["mlp.experts.down_proj"], "adapt Linear modules"),
        ("alora_invocation_tokens", [5], "use a plain one"),
        ("megatron_config", {"a": 1}, "plain Linear"),
        ("use_qalora", True, "plain LoRA"),
        ("init_lora_weights", "pissa", "path_initial_model_for_weight_conversion"),
        ("init_lora_weights", "olora", "path_initial_model_for_weight_conversion"),
        ("peft_type", "LOHA", "only 'LORA' is supported"),
        ("peft_type", None, "only 'LORA' is supported"),
        ("invented_in_2031", {"x": 1}, "not known here"),
        ("target_modules", "(a+)+b", "give the names instead"),
        ("target_modules", ".*.*.*.*.*.*.*", "give the names instead"),
        ("rank_pattern", {"(q|v){2}": 4}, "give the names instead"),
        ("rank_pattern", {"(q|v)?": 4}, "give the names instead"),
        ("rank_pattern", {"a?" * 32 + "b": 4}, "give the names instead"),
        ("rank_pattern", {".*" * 6: 4}, "give the names instead"),
    ],
)
def test_unsupported_settings_are_refused_with_the_remedy(folder: Path, field: str, value: Any, remedy: str) -> None:
    message = refusal(edit_config(folder, **{field: value}))
    assert field in message
    assert remedy in message


@pytest.mark.parametrize("value", [None, False, [], {}, ""])
def test_unknown_settings_that_are_off_are_no_reason_to_refuse(folder: Path, value: Any) -> None:
    edit_config(folder, invented_in_2031=value, use_dora=False, init_lora_weights="gaussian")
    assert read_adapter(folder, "mine", folder.parent).scales


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", 0),
        ("r", 4.0),
        ("r", True),
        ("r", 10**400),
        ("r", None),
        ("lora_alpha", "8"),
        ("lora_alpha", float("inf")),
        ("lora_alpha", float("nan")),
        ("alpha_pattern", ["q_proj"]),
        ("alpha_pattern", {"q_proj": "8"}),
        ("alpha_pattern", {"q_proj(": 8}),
        ("rank_pattern", {"q_proj": -4}),
        ("target_modules", None),
        ("target_modules", []),
        ("target_modules", [1]),
        ("target_modules", "[q"),
    ],
)
def test_settings_that_make_no_sense_are_named(folder: Path, field: str, value: Any) -> None:
    assert field in refusal(edit_config(folder, **{field: value}), ModelFormatError)


def test_rank_and_targets_must_be_those_of_the_tensors(folder: Path) -> None:
    assert "has rank 4 at" in refusal(edit_config(folder, rank_pattern={"q_proj": 5}), ModelFormatError)
    edit_config(folder, rank_pattern={}, target_modules=["v_proj", "proj"])
    assert "'model.layers.0.self_attn.q_proj', which target_modules does not name" in refusal(folder, ModelFormatError)
    edit_config(folder, target_modules=".*(q|v)_proj")
    assert read_adapter(folder, "mine", folder.parent).scales
    edit_config(folder, target_modules="all-linear")
    assert read_adapter(folder, "mine", folder.parent).scales


@pytest.mark.parametrize(
    ("name", "kind", "part"),
    [
        ("base_model.model.lm_head.weight", ModelFormatError, "only base_model.model.<module>.lora_A.weight"),
        (f"{MODULE}.lora_A.weight", ModelFormatError, "only base_model.model"),
        (FIRST.replace("lora_A.weight", "lora_magnitude_vector"), UnsupportedOptionError, "DoRA"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", UnsupportedOptionError, "embeddings"),
        (FIRST.replace("lora_A.weight", "lora_B.bias"), UnsupportedOptionError, "lora_bias=False"),
        (FIRST.replace("lora_A.weight", "hada_w1_a"), UnsupportedOptionError, "LoHa"),
        (FIRST.replace("lora_A.weight", "lokr_w1"), UnsupportedOptionError, "LoKr"),
        (FIRST.replace("q_proj", "k_proj"), ModelFormatError, "only one of lora_A and lora_B"),
        (FIRST.replace("q_proj", "x" * 300), ModelFormatError, "only base_model"),
    ],
)
def test_tensors_of_another_kind_are_named(folder: Path, name: str, kind: type[KiteError], part: str) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(4, 64)}))
    message = refusal(folder, kind)
    assert part in message
    assert name[:250].replace(".lora_A.weight", "") in message or name[18:40] in message


@pytest.mark.parametrize(
    ("shapes", "kind", "part"),
    [
        ({}, ModelFormatError, "no weights at all"),
        ({FIRST: ("F32", (4, 64)), SECOND: ("F32", (64, 5))}, ModelFormatError, "ranks must agree"),
        ({FIRST: ("F32", (4, 64, 3)), SECOND: ("F32", (64, 4))}, UnsupportedOptionError, "only Linear"),
        ({FIRST: ("F32", (0, 64)), SECOND: ("F32", (64, 0))}, UnsupportedOptionError, "only Linear"),
        ({FIRST: ("I8", (4, 64)), SECOND: ("F32", (64, 4))}, UnsupportedOptionError, "I8 numbers"),
    ],
)
def test_shapes_and_types_of_tensors_are_checked(shapes: Any, kind: type[KiteError], part: str) -> None:
    with pytest.raises(kind, match=part):
        pair_tensors(shapes, "it")


def test_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    assert "check the path" in refusal(tmp_path / "nowhere", ModelNotFoundError)
    assert "it is a file" in refusal(folder / "adapter_config.json", ModelNotFoundError)
    weights = folder / "adapter_model.safetensors"
    weights.rename(folder / "adapter_model.bin")
    assert "safe_serialization=True" in refusal(folder, ModelNotFoundError)
    (folder / "adapter_model.bin").unlink()
    assert "has no adapter_model.safetensors" in refusal(folder, ModelNotFoundError)
    weights.write_bytes(b"")
    (folder / "adapter_config.json").unlink()
    assert "has no adapter_config.json" in refusal(folder, ModelNotFoundError)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"r": ' + b"9" * 5000 + b"}", b" " * (2**20 + 1)]
)
def test_configuration_that_is_none_is_refused(folder: Path, text: bytes) -> None:
    (folder / "adapter_config.json").write_bytes(text)
    assert "adapter_config.json" in refusal(folder, ModelFormatError)


@pytest.mark.parametrize("damage", ["short", "empty", "huge_header", "not_json", "overlap", "pickle"])
def test_damaged_weights_are_refused(folder: Path, damage: str) -> None:
    path = folder / "adapter_model.safetensors"
    good = path.read_bytes()
    head = {FIRST: {"dtype": "F32", "shape": [4, 64], "data_offsets": [0, 1024]}}
    text = json.dumps({**head, SECOND: {**head[FIRST], "shape": [64, 4]}}).encode()
    path.write_bytes(
        {
            "short": good[:-1],
            "empty": b"",
            "huge_header": (2**40).to_bytes(8, "little") + good[8:],
            "not_json": good[:8] + b"x" * len(good[8:]),
            "overlap": len(text).to_bytes(8, "little") + text + bytes(1024),
            "pickle": b"\x80\x04\x95cos\nsystem\n(S'x'\ntR.",
        }[damage]
    )
    assert "damaged or cut short" in refusal(folder, ModelFormatError)


def test_file_that_changes_while_it_is_read_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "adapter_model.safetensors"
    read = Path.read_bytes

    def changing(self: Path) -> bytes:
        data = read(self)
        if self == path:
            path.write_bytes(data + b"x")
        return data

    monkeypatch.setattr(Path, "read_bytes", changing)
    assert "changed while it was read" in refusal(folder, ModelFormatError)
