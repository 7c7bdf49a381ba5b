"""Building bundles: everything that a prompt left is in them, whatever else the engine does meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from kitelib import KiteEngine, PoolConfig, ReusePolicy, SamplingParams
from kitelib.engine.bundle_building import build_bundle
from kitelib.engine.bundle_prompts import BundlePrompt
from kitelib.errors import (
    BackendError,
    BundleMismatchError,
    ConfigError,
    InvalidRequestError,
    PromptTooLongError,
    UnknownAdapterError,
    UnsupportedOptionError,
)
from kitelib.fingerprint import BlockChain, short
from kitelib.upcycle.bundle import Bundle
from kitelib.yoco.completions import sampling_key
from tests.support.backends import BackendKit
from tests.support.engines import assert_nothing_left, evict_context, some_tokens

COLD = ReusePolicy(mode="off")


def kinds(bundle: Bundle) -> dict[str, int]:
    found: dict[str, int] = {}
    for unit in bundle.units:
        found[unit.kind] = found.get(unit.kind, 0) + 1
    return found


def expected_units(engine: KiteEngine, tokens: list[int], **policy: Any) -> set[tuple[str, bytes]]:
    """Kind and fingerprint of everything that a prompt leaves."""
    root = engine._current.root(ReusePolicy(numerics=engine.reuse.numerics, **policy), None)
    chain = BlockChain(root, engine.stats()["block_tokens"], tokens)
    found = {("kv", bytes(cf)) for cf in chain.fingerprints} | {("logits", bytes(chain.end()))}
    return found | ({("kv", bytes(chain.end()))} if chain.tail else set())


def held(bundle: Bundle) -> set[tuple[str, bytes]]:
    return {(unit.kind, bytes(unit.cf)) for unit in bundle.units}


async def test_every_unit_of_every_prompt_is_there_once(open_tiny: Callable[..., Any], tmp_path: Path) -> None:
    first, second = some_tokens(70), [*some_tokens(48), *some_tokens(9, first=900)]
    third = some_tokens(32)  # no tail
    async with open_tiny() as engine:
        path = tmp_path / "three.kite"
        prompts = [first, BundlePrompt(prompt=second, hits=5), third]
        summary = await build_bundle(engine, prompts, path, labels={"fleet": "test"})
        with Bundle.open(path) as bundle:
            wanted = set().union(*(expected_units(engine, each) for each in (first, second, third)))
            assert held(bundle) == wanted
            assert len(bundle.units) == len(wanted)
            assert bundle.check() == []
            assert bundle.manifest.labels == {"fleet": "test"}
            assert bundle.manifest.epoch == engine.pool.epoch
            assert bundle.manifest.model.model_state == engine._current.backend.info.model_state
            (root,) = bundle.manifest.roots
            assert root.root == engine._current.root(engine.reuse, None)
            assert (root.namespace, root.adapter) == (None, None)
            hits = {bytes(unit.cf): unit.hits for unit in bundle.units if unit.kind == "kv"}
            chain = BlockChain(root.root, 16, first)
            assert [hits[bytes(cf)] for cf in chain.fingerprints] == [7.0, 7.0, 6.0, 1.0]
        assert (summary.units["kv"], summary.units["logits"], summary.left_out) == (4 + 1 + 1, 3, 0)
        await assert_nothing_left(engine)
    assert [each.name for each in tmp_path.iterdir()] == ["three.kite"]


async def test_the_units_are_those_that_a_request_would_find(open_tiny: Callable[..., Any], tmp_path: Path) -> None:
    tokens = some_tokens(70)
    async with open_tiny() as engine:
        path = tmp_path / "one.kite"
        await engine.build_bundle([tokens], path)
        cold = await engine.generate(tokens, max_tokens=1, logprobs=20, reuse=COLD)
        with Bundle.open(path) as bundle:
            (logits,) = [bundle.read(unit).data.view(np.float32) for unit in bundle.units if unit.kind == "logits"]
            assert int(logits.argmax()) == cold.token_ids[0]
            for unit in bundle.units:
                (pooled,) = [each for each in await engine.pool.get_rus_by_cf(unit.cf) if each.kind == unit.kind]
                assert np.array_equal(pooled.data, bundle.read(unit, full=True).data)


async def test_completions_are_a_guess_and_an_answer(open_tiny: Callable[..., Any], tmp_path: Path) -> None:
    with_one, without = some_tokens(40), some_tokens(40, first=900)
    async with open_tiny() as engine:
        path = tmp_path / "completions.kite"
        prompts = [with_one, BundlePrompt(prompt=without, completion=0)]
        summary = await build_bundle(engine, prompts, path, completions=6)
        assert summary.units["completion"] == 2
        cold = await engine.generate(with_one, max_tokens=6, reuse=COLD)
        with Bundle.open(path) as bundle:
            chain = BlockChain(bundle.manifest.roots[0].root, 16, with_one)
            completions = engine._current.completions
            for key in (None, sampling_key(SamplingParams())):
                expected = completions.wanted(chain, key).expected
                (unit,) = [each for each in bundle.units if (each.kind, each.cf) == ("completion", expected.cf)]
                ended, *tokens = bundle.read(unit, expected).data.view(np.uint32).tolist()
                assert (bool(ended), tokens) == (cold.finish_reason == "stop", cold.token_ids)


async def test_templates_keep_kv_of_what_is_stable(shared_engine: KiteEngine, tmp_path: Path) -> None:
    await shared_engine.invalidate()
    system = "You are the assistant of a car. Be brief, and answer in one sentence. " * 3
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "{{question}}"}]
    path = tmp_path / "template.kite"
    prompts = [BundlePrompt(messages=messages, varying=True)]
    await build_bundle(shared_engine, prompts, path, completions=4)
    asked = await shared_engine.tokenize_chat([messages[0], {"role": "user", "content": "Is it warm outside?"}])
    size = shared_engine.stats()["block_tokens"]
    with Bundle.open(path) as bundle:
        assert set(kinds(bundle)) == {"kv"}
        chain = BlockChain(bundle.manifest.roots[0].root, size, asked)
        full = [unit for unit in bundle.units if len(unit.token_ids) == size]
        assert {unit.cf for unit in full} == set(chain.fingerprints[: len(full)])
        assert len(full) >= 2
        for tail in [unit for unit in bundle.units if len(unit.token_ids) < size]:
            start = len(full) * size
            assert tail.token_ids.tolist() == asked[start : start + len(tail.token_ids)]
    await assert_nothing_left(shared_engine)


async def test_a_namespace_has_its_own_root(open_tiny: Callable[..., Any], tmp_path: Path) -> None:
    tokens = some_tokens(40)
    async with open_tiny(pool=PoolConfig(namespace_secret=b"s" * 32)) as engine:
        path = tmp_path / "tenant.kite"
        await build_bundle(engine, [tokens], path, reuse=ReusePolicy(namespace="tenant"))
        with Bundle.open(path) as bundle:
            assert held(bundle) == expected_units(engine, tokens, namespace="tenant")
            assert bundle.manifest.roots[0].namespace == "tenant"


async def test_adapters_have_their_own_roots(kit: BackendKit, cache_dir: Path, tmp_path: Path) -> None:
    model = kit.small()
    adapter = str(kit.adapter(tmp_path / "adapter", model, 3))
    tokens = some_tokens(40)
    async with KiteEngine.open(model, n_ctx=256, threads=1, cache_dir=cache_dir, adapters={"de": adapter}) as engine:
        path = tmp_path / "adapters.kite"
        await build_bundle(engine, [tokens, BundlePrompt(prompt=tokens, adapter="de")], path)
        with Bundle.open(path) as bundle:
            roots = {root.adapter: root.root for root in bundle.manifest.roots}
            state = engine._current.backend.adapter_states["de"]
            assert roots == {
                None: engine._current.root(engine.reuse, None),
                state: engine._current.root(engine.reuse, "de"),
            }
            assert kinds(bundle) == {"kv": 2 * 3, "logits": 2}
        with pytest.raises(UnknownAdapterError, match=r"prompts\[0\]: no adapter is called 'fr'"):
            await build_bundle(engine, [BundlePrompt(prompt=tokens, adapter="fr")], path)


BLOCKS_OF_MEMORY = [3, 6]


@pytest.mark.parametrize("blocks", BLOCKS_OF_MEMORY)
async def test_a_memory_tier_smaller_than_the_prompt(
    open_tiny: Callable[..., Any], tmp_path: Path, blocks: int
) -> None:
    tokens = some_tokens(200)
    async with open_tiny() as engine:
        block_bytes = engine.stats()["block_bytes"]
    memory = blocks * (block_bytes + 1024) + 4 * 2048
    async with open_tiny(pool=PoolConfig(memory_bytes=memory)) as engine:
        path = tmp_path / "small.kite"
        await build_bundle(engine, [tokens], path)
        with Bundle.open(path) as bundle:
            assert held(bundle) == expected_units(engine, tokens)
            assert bundle.check() == []
        assert engine.stats()["pool"]["memory"]["bytes"] <= memory


async def test_only_a_disk_tier(open_tiny: Callable[..., Any], tmp_path: Path) -> None:
    tokens = some_tokens(70)
    async with open_tiny(pool=PoolConfig(memory_bytes=0, disk=str(tmp_path / "disk"))) as engine:
        path = tmp_path / "disk.kite"
        await build_bundle(engine, [tokens], path)
        with Bundle.open(path) as bundle:
            assert held(bundle) == expected_units(engine, tokens)


async def test_what_the_pool_and_the_context_lost_is_computed_again(
    open_tiny: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = some_tokens(70)
    async with open_tiny() as engine:
        from kitelib.engine import bundle_building

        real = bundle_building.compute

        async def lossy(*args: Any) -> Any:
            generation = await real(*args)
            await evict_context(engine)
            engine.pool.memory.clear()
            return generation

        monkeypatch.setattr(bundle_building, "compute", lossy)
        path = tmp_path / "again.kite"
        await build_bundle(engine, [tokens], path)
        with Bundle.open(path) as bundle:
            assert held(bundle) == expected_units(engine, tokens)


async def test_a_unit_that_cannot_be_kept_is_named(
    open_tiny: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bundle never lacks a part silently."""
    tokens = some_tokens(40)
    async with open_tiny() as engine:
        chain = BlockChain(engine._current.root(engine.reuse, None), 16, tokens)
        lost = chain.fingerprints[1]
        encode = engine.pool.encode
        monkeypatch.setattr(engine.pool, "encode", lambda unit: ("kite:gone", b"") if unit.cf == lost else encode(unit))
        with pytest.raises(BackendError, match=f"the kv unit {short(lost)} of a prompt of 40 tokens was computed"):
            await build_bundle(engine, [tokens], tmp_path / "lost.kite")
        assert list(tmp_path.iterdir()) == []
        await assert_nothing_left(engine)


async def test_other_requests_run_beside_it(open_tiny: Callable[..., Any], tmp_path: Path) -> None:
    prompts = [some_tokens(60, first=first) for first in range(100, 1000, 100)]
    others = [some_tokens(50, first=first) for first in range(150, 1050, 100)]
    async with open_tiny() as engine:
        path = tmp_path / "busy.kite"
        building = asyncio.create_task(build_bundle(engine, prompts, path, completions=4))
        answers = await asyncio.gather(*(engine.generate(each, max_tokens=4) for each in others))
        await building
        cold = [await engine.generate(each, max_tokens=4, reuse=COLD) for each in others]
        assert [each.token_ids for each in answers] == [each.token_ids for each in cold]
        with Bundle.open(path) as bundle:
            assert held(bundle) >= set().union(*(expected_units(engine, each) for each in prompts))


@pytest.mark.parametrize("after", [0, 1, 3])
async def test_a_cancelled_build_leaves_nothing(open_tiny: Callable[..., Any], tmp_path: Path, after: int) -> None:
    prompts = [some_tokens(60, first=first) for first in range(100, 1000, 100)]
    async with open_tiny() as engine:
        stages: list[str] = []
        building = asyncio.create_task(
            build_bundle(engine, prompts, tmp_path / "x.kite", progress=lambda stage, share: stages.append(stage))
        )
        while len(stages) < after + 1 and not building.done():
            await asyncio.sleep(0)
        building.cancel()
        with pytest.raises(asyncio.CancelledError):
            await building
        assert list(tmp_path.iterdir()) == []
        assert len((await engine.generate(prompts[0], max_tokens=3)).token_ids) == 3
        await assert_nothing_left(engine)


async def test_progress_only_grows_and_ends_at_one(open_tiny: Callable[..., Any], tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []
    async with open_tiny() as engine:
        prompts = [some_tokens(30), some_tokens(60, first=500)]
        await build_bundle(engine, prompts, tmp_path / "x.kite", progress=lambda *each: seen.append(each))
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert [stage for stage, _ in seen][:2] == ["prompt 1 of 2", "prompt 2 of 2"]


async def test_an_invalidation_ends_it(open_tiny: Callable[..., Any], tmp_path: Path) -> None:
    async with open_tiny() as engine:
        prompts = [some_tokens(60, first=first) for first in range(100, 500, 100)]

        def note(stage: str, share: float) -> None:
            if stage == "prompt 2 of 4":
                engine.pool.forget()

        with pytest.raises(BackendError, match="the pool was invalidated while"):
            await build_bundle(engine, prompts, tmp_path / "x.kite", progress=note)
        assert list(tmp_path.iterdir()) == []


async def test_the_epoch_may_be_given(open_tiny: Callable[..., Any], tmp_path: Path) -> None:
    async with open_tiny() as engine:
        await engine.invalidate()
        for epoch in (None, 7):
            await build_bundle(engine, [some_tokens(40)], tmp_path / "x.kite", epoch=epoch, completions=2)
            with Bundle.open(tmp_path / "x.kite") as bundle:
                expected = engine.pool.epoch if epoch is None else epoch
                assert bundle.manifest.epoch == expected
                assert {unit.epoch for unit in bundle.units} == {expected}
        with pytest.raises(ConfigError, match="epoch is -1"):
            await build_bundle(engine, [some_tokens(40)], tmp_path / "x.kite", epoch=-1)


BAD_PROMPTS: list[tuple[Any, type[Exception], str]] = [
    ([], InvalidRequestError, "a list with at least one prompt"),
    ("text", InvalidRequestError, "put a single one into a list"),
    ([some_tokens(20), 7], InvalidRequestError, r"prompts\[1\]: a prompt of a bundle is 7"),
    ([some_tokens(20), some_tokens(300)], PromptTooLongError, r"prompts\[1\]: the prompt has 300 tokens, .* 255 fit"),
    ([[5000]], InvalidRequestError, r"prompts\[0\]: the prompt holds token id 5000; this model has 0 to 2047"),
    (
        [BundlePrompt(prompt=[9999], source="p.jsonl, line 4")],
        InvalidRequestError,
        "^p.jsonl, line 4: the prompt holds",
    ),
]


@pytest.mark.parametrize(("prompts", "kind", "message"), BAD_PROMPTS, ids=range(len(BAD_PROMPTS)))
async def test_prompts_are_checked_before_any_is_computed(
    open_tiny: Callable[..., Any], tmp_path: Path, prompts: Any, kind: type[Exception], message: str
) -> None:
    async with open_tiny() as engine:
        with pytest.raises(kind, match=message):
            await build_bundle(engine, prompts, tmp_path / "x.kite")
        assert engine.stats()["steps"] == 0
    assert list(tmp_path.iterdir()) == []


async def test_templates_without_a_stable_part(shared_engine: KiteEngine, tmp_path: Path) -> None:
    steps = shared_engine.stats()["steps"]
    with pytest.raises(InvalidRequestError, match=r"prompts\[0\]: the template begins with what varies"):
        await build_bundle(shared_engine, [BundlePrompt(prompt="{{a}} b", varying=True)], tmp_path / "x.kite")
    assert shared_engine.stats()["steps"] == steps


async def test_options_are_checked_before_anything_is_computed(open_tiny: Callable[..., Any], tmp_path: Path) -> None:
    tokens = some_tokens(20)
    async with open_tiny() as engine:
        with pytest.raises(ConfigError, match="completions is -1"):
            await build_bundle(engine, [tokens], tmp_path / "x.kite", completions=-1)
        with pytest.raises(ConfigError, match="missing"):
            await build_bundle(engine, [tokens], tmp_path / "missing" / "x.kite")
        with pytest.raises(ConfigError, match=r"key\.pem"):
            await build_bundle(engine, [tokens], tmp_path / "x.kite", sign_key=tmp_path / "key.pem")
        assert engine.stats()["steps"] == 0
    async with open_tiny(pool=PoolConfig(memory_bytes=0)) as engine:
        with pytest.raises(ConfigError, match="the engine keeps nothing"):
            await build_bundle(engine, [tokens], tmp_path / "x.kite")
    assert list(tmp_path.iterdir()) == []


async def test_a_model_whose_state_cannot_be_cut_is_refused(
    tiny_model: Callable[..., Path], cache_dir: Path, tmp_path: Path
) -> None:
    """A bundle without a recurrent state would be one that lacks a part."""
    async with KiteEngine.open(tiny_model("mamba"), n_ctx=128, threads=1, cache_dir=cache_dir) as engine:
        with pytest.raises(UnsupportedOptionError, match="recurrent model: its state can't be cut into blocks"):
            await build_bundle(engine, [some_tokens(20)], tmp_path / "x.kite")


async def test_a_sliding_window_does_not_lose_blocks(gemma_path: Path, cache_dir: Path, tmp_path: Path) -> None:
    """Blocks that have left the window are in the bundle: attention in full layers needs them."""
    async with KiteEngine.open(
        gemma_path, n_ctx=1024, threads=1, cache_dir=cache_dir, reuse=ReusePolicy(numerics="standard")
    ) as engine:
        window = engine._current.backend._model.n_swa
        tokens = some_tokens(window + 100)
        await build_bundle(engine, [tokens], tmp_path / "gemma.kite")
        with Bundle.open(tmp_path / "gemma.kite") as bundle:
            assert held(bundle) == expected_units(engine, tokens)
            assert 0 < window < len(tokens)


async def test_max_bytes_and_signature(open_tiny: Callable[..., Any], tmp_path: Path) -> None:
    from kitelib.upcycle.bundle.signing import new_key

    pem, public = new_key()
    (tmp_path / "key.pem").write_bytes(pem)
    often, rarely = some_tokens(100), some_tokens(100, first=900)
    async with open_tiny(pool=PoolConfig(hmac_key=b"k" * 32)) as engine:
        path = tmp_path / "x.kite"
        prompts = [BundlePrompt(prompt=rarely, hits=1), BundlePrompt(prompt=often, hits=100)]
        whole = await build_bundle(engine, prompts, path)
        some = await build_bundle(
            engine, prompts, path, max_bytes=whole.num_bytes * 6 // 10, sign_key=tmp_path / "key.pem"
        )
        assert (whole.left_out, whole.signer) == (0, None)
        assert some.left_out > 0
        assert some.signer == public
        with Bundle.open(path, require_signature=True, trusted_keys=[public], hmac_key=b"k" * 32) as bundle:
            assert held(bundle) >= expected_units(engine, often)
            assert bundle.signer == public


async def test_a_hanging_outer_tier_is_not_waited_for(
    open_tiny: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units are read from process memory; who else gets them is another matter."""
    async with open_tiny(pool=PoolConfig(disk=str(tmp_path / "disk"))) as engine:

        async def hang() -> None:
            await asyncio.sleep(3600)

        with monkeypatch.context() as patched:
            patched.setattr(engine.pool, "settle", hang)
            with anyio.fail_after(60):
                await build_bundle(engine, [some_tokens(70)], tmp_path / "x.kite")
        with Bundle.open(tmp_path / "x.kite") as bundle:
            assert held(bundle) == expected_units(engine, some_tokens(70))


async def test_rounded_logits_do_not_get_into_a_bundle(open_tiny: Callable[..., Any], tmp_path: Path) -> None:
    """They would look exact to an engine that does not round."""
    options: dict[str, Any] = {"pool": PoolConfig(logits_codec="fp16_quant")}
    async with open_tiny(reuse=ReusePolicy(numerics="standard"), **options) as engine:
        with pytest.raises(ConfigError, match="logits_codec='raw'"):
            await build_bundle(engine, [some_tokens(20)], tmp_path / "x.kite")
        assert engine.stats()["steps"] == 0
    assert list(tmp_path.iterdir()) == []


async def test_rounded_kv_is_of_a_root_that_says_so(open_tiny: Callable[..., Any], tmp_path: Path) -> None:
    pool, tokens = PoolConfig(kv_precision="int8"), some_tokens(40)
    async with open_tiny(pool=pool) as engine:
        await build_bundle(engine, [tokens], tmp_path / "x.kite")
        with Bundle.open(tmp_path / "x.kite") as bundle:
            assert {root.execution_path["kv_precision"] for root in bundle.manifest.roots} == {"int8"}
            assert bundle.check() == []
    async with open_tiny(pool=pool) as engine:
        await engine.preload(tmp_path / "x.kite")
        assert (await engine.generate(tokens, max_tokens=1)).reuse.tiers["bundle"] > 0
    async with open_tiny() as engine:
        with pytest.raises(BundleMismatchError, match="kv_precision is int8 in the bundle and exact here"):
            await engine.preload(tmp_path / "x.kite")


async def test_with_a_given_time_builds_are_the_same_byte_for_byte(
    open_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    prompts = [some_tokens(40), some_tokens(33, first=900)]
    for name in ("a.kite", "b.kite"):
        async with open_tiny() as engine:
            await build_bundle(engine, prompts, tmp_path / name, completions=3, created_at=1.7e9)
    assert (tmp_path / "a.kite").read_bytes() == (tmp_path / "b.kite").read_bytes()
    with Bundle.open(tmp_path / "a.kite") as bundle:
        assert {bundle.manifest.created_at, *(unit.created_at for unit in bundle.units)} == {1.7e9}
