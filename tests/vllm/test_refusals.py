"""What can't work is refused at the start, with the remedy."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from kitelib.errors import ConfigError, ModelNotFoundError, UnsupportedOptionError
from kitelib.integrations.vllm import compat
from kitelib.integrations.vllm.identity import model_state_of
from kitelib.integrations.vllm.layout import Rank, read_layout
from kitelib.integrations.vllm.settings import read_settings
from tests.vllm.engines import EngineError, open_engine, transfer_config


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"pol": {}}, r"kv_connector_extra_config has the unknown key 'pol'; did you mean 'pool'\?"),
        ({"pool": {"dsk": "/x"}}, r"kv_connector_extra_config.pool has the unknown key 'dsk'; did you mean 'disk'\?"),
        ({"pool": {"memory_bytes": -1}}, "kv_connector_extra_config.pool.PoolConfig.memory_bytes is -1"),
        ({"pool": {"hmac_key": "x"}}, "give kv_connector_extra_config.pool.hmac_key_file"),
        ({"pool": {}, "config": "x"}, 'both "pool" and "config"'),
        ({"patience_seconds": -1}, "patience_seconds is -1"),
    ],
)
def test_settings_name_what_is_wrong(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_settings(extra)


def test_settings_from_a_file_and_secrets(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"0123456789abcdef\n")
    (tmp_path / "config.yaml").write_text(f"ru_pool: {{backend: disk, disk_path: {tmp_path / 'pool'}}}\n")
    extra = {"config": str(tmp_path / "config.yaml"), "hmac_key_file": str(tmp_path / "key")}
    pool = read_settings(extra).to_pool_config()
    assert (pool.disk, pool.hmac_key) == (str(tmp_path / "pool"), b"0123456789abcdef")
    beside = {"pool": {"disk": "/x", "namespace_secret_file": str(tmp_path / "key")}}
    assert read_settings(beside).to_pool_config().namespace_secret == b"0123456789abcdef"
    with pytest.raises(ConfigError, match="can't be read"):
        read_settings({"hmac_key_file": str(tmp_path / "none")}).to_pool_config()
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match="an empty file"):
        read_settings({"hmac_key_file": str(tmp_path / "empty")}).to_pool_config()


def test_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    compat.check_interface(KVConnectorBase_V1)
    for version in ("0.11.0", "0.99.0", "1.2.3"):
        monkeypatch.setattr("vllm.__version__", version)
        with pytest.raises(UnsupportedOptionError, match=f"this vLLM is {version}, and KiteConnector is tested with"):
            compat.check_interface(KVConnectorBase_V1)
        compat.check_interface(KVConnectorBase_V1, allow_untested=True)


def test_an_interface_that_has_changed() -> None:
    class Changed(KVConnectorBase_V1):  # type: ignore[misc]
        get_finished = None

        def update_state_after_alloc(self, request: Any, num_external_tokens: int, blocks: Any) -> None: ...

    with pytest.raises(UnsupportedOptionError, match="has no update_state_after_alloc, get_finished as"):
        compat.check_interface(Changed)


def _config(**changes: Any) -> Any:
    parts: dict[str, Any] = {
        "kv_transfer_config": SimpleNamespace(kv_load_failure_policy="recompute", kv_role="kv_both"),
        "parallel_config": SimpleNamespace(decode_context_parallel_size=1),
        "cache_config": SimpleNamespace(cache_dtype="auto"),
        "speculative_config": None,
    }
    return SimpleNamespace(**{**parts, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"kv_transfer_config": SimpleNamespace(kv_load_failure_policy="fail", kv_role="kv_both")},
            "kv_load_failure_policy is 'fail'; set it to \"recompute\"",
        ),
        (
            {"kv_transfer_config": SimpleNamespace(kv_load_failure_policy="recompute", kv_role="kv_consumer")},
            "kv_role is 'kv_consumer'; set it to \"kv_both\"",
        ),
        ({"parallel_config": SimpleNamespace(decode_context_parallel_size=2)}, "decode_context_parallel_size is 2"),
        ({"cache_config": SimpleNamespace(cache_dtype="fp8")}, "kv_cache_dtype is 'fp8'"),
        ({"speculative_config": SimpleNamespace(method="eagle")}, "the speculative method 'eagle'"),
    ],
)
def test_configurations_that_can_not_work(changes: dict[str, Any], message: str) -> None:
    compat.check_config(_config())
    with pytest.raises(ConfigError, match=message):
        compat.check_config(_config(**changes))


class FullAttentionSpec:
    """As vLLM's, as far as it is read."""

    block_size, num_kv_heads, head_size = 32, 2, 64
    page_size_bytes = 32 * 2 * 64 * 2 * 4


class SlidingWindowSpec(FullAttentionSpec):
    """A kind that is not known."""


class _Backend:
    name = "FLASH_ATTN"
    shape: Any = staticmethod(lambda blocks, tokens, heads, size: (2, blocks, tokens, heads, size))

    @classmethod
    def get_name(cls) -> str:
        return cls.name

    @classmethod
    def get_kv_cache_shape(cls, *sizes: int) -> tuple[int, ...]:
        shape: tuple[int, ...] = cls.shape(*sizes)
        return shape


def _read(
    backend: type[_Backend] = _Backend, shape: tuple[int, ...] = (2, 10, 32, 2, 64), **options: Any
) -> tuple[Any, torch.Tensor]:
    dtype = options.get("dtype", torch.float32)
    cache = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    layer = SimpleNamespace(get_attn_backend=lambda: backend)
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={"a": layer}))
    spec = options.get("spec", FullAttentionSpec)()
    groups = [SimpleNamespace(layer_names=["a"], kv_cache_spec=spec)] * options.get("groups", 1)
    caches = SimpleNamespace(kv_cache_groups=groups, num_blocks=10)
    return read_layout(config, caches, {"a": cache}, options.get("rank", Rank())), cache


def test_blocks_are_found_wherever_their_dimension_is() -> None:
    layout, cache = _read()
    blocks = layout.copy_out([3, 7])
    assert blocks.shape == (2, layout.block_bytes)
    assert blocks[1].tobytes() == cache[:, 7].contiguous().numpy().tobytes()
    layout.copy_in([1, 9], list(blocks))
    assert torch.equal(cache[:, 1], cache[:, 3])
    assert torch.equal(cache[:, 9], cache[:, 7])
    assert not torch.equal(cache[:, 2], cache[:, 3])


def test_a_block_may_be_several_of_the_kernel() -> None:
    small = type("Small", (_Backend,), {"shape": staticmethod(lambda blocks, *_: (blocks, 2, 16, 2, 64))})
    layout, cache = _read(small, (20, 2, 16, 2, 64))
    blocks = layout.copy_out([3])
    assert blocks[0].tobytes() == cache[6:8].numpy().tobytes()
    layout.copy_in([9], list(blocks))
    assert torch.equal(cache[18:], cache[6:8])


def test_layouts_have_names_of_their_own() -> None:
    other = type("Other", (_Backend,), {"name": "TRITON_ATTN"})
    turned = type("Turned", (_Backend,), {"shape": staticmethod(lambda blocks, *_: (blocks, 2, 32, 2, 64))})
    layouts = [
        _read()[0],
        _read(other)[0],
        _read(turned, (10, 2, 32, 2, 64))[0],
        _read(rank=Rank(1, 2))[0],
        _read(rank=Rank(0, 2))[0],
    ]
    assert _read()[0].id == layouts[0].id
    assert len({layout.id for layout in layouts}) == len(layouts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": type("Odd", (_Backend,), {"name": "ODD_ATTN"})}, "the attention backend is ODD_ATTN"),
        ({"shape": (2, 10, 32, 2, 32)}, r"keeps its KV as \(2, 10, 32, 2, 32\), 16384 bytes a block"),
        ({"shape": (2, 15, 32, 2, 64)}, r"keeps its KV as \(2, 15, 32, 2, 64\)"),
        (
            {"backend": type("Flat", (_Backend,), {"shape": staticmethod(lambda *_: (4, 4))})},
            r"as \(4, 4\), in which KiteConnector finds no dimension of blocks",
        ),
        ({"spec": SlidingWindowSpec}, "keeps its KV cache as SlidingWindowSpec"),
        ({"groups": 2}, "keeps its KV cache as FullAttentionSpec, FullAttentionSpec"),
        ({"dtype": torch.int32}, "the KV cache holds torch.int32"),
    ],
)
def test_layouts_that_nobody_knows(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=message):
        _read(**options)


def test_weights_that_are_no_files() -> None:
    model = SimpleNamespace(model="/none", revision=None, hf_overrides={}, quantization=None)
    config = SimpleNamespace(model_config=model, load_config=SimpleNamespace(load_format="dummy"))
    with pytest.raises(UnsupportedOptionError, match="load_format is 'dummy'"):
        model_state_of(config)
    config.load_config.load_format = "auto"
    with pytest.raises(ModelNotFoundError, match="neither a folder nor in the hub's cache"):
        model_state_of(config)


def test_vllm_does_not_start_with_what_can_not_work(model: Path, tmp_path: Path) -> None:
    transfer = {**transfer_config({"disk": str(tmp_path / "pool")}), "kv_load_failure_policy": "fail"}
    with pytest.raises(EngineError, match='set it to \\\\?"recompute'), open_engine(model, tmp_path / "log", transfer):
        pass
