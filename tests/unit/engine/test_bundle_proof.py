"""`prove_bundle`: what a build made is proved, and a wrong unit with right checksums is found and named."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kitelib import KiteEngine, PoolConfig, ReusePolicy, SamplingParams
from kitelib.engine.bundle_prompts import BundlePrompt
from kitelib.engine.bundle_proof import KV_BOUND, BundleProof, prove_bundle
from kitelib.engine.bundle_runs import runs_of
from kitelib.errors import BundleMismatchError, BundleNotFoundError, ConfigError
from kitelib.fingerprint import BlockChain, short
from kitelib.runtime.threads import to_the_end
from kitelib.upcycle.bundle import Bundle, BundleUnit, BundleWriter
from kitelib.upcycle.unit import RecyclableUnit
from kitelib.yoco.completions import sampling_key
from tests.support.backends import BackendKit
from tests.support.engines import assert_nothing_left, some_tokens

NUMERICS = ["bitwise", "standard"]
FIRST = some_tokens(70)
SECOND = [*some_tokens(48), *some_tokens(9, first=900)]


async def rewritten(
    source: Path, target: Path, change: Callable[[BundleUnit, RecyclableUnit], RecyclableUnit | None]
) -> Path:
    """A bundle with good checksums whose units `change` gives; None leaves one out."""
    return await to_the_end(lambda: _rewrite(source, target, change))


def _rewrite(source: Path, target: Path, change: Callable[[BundleUnit, RecyclableUnit], RecyclableUnit | None]) -> Path:
    with Bundle.open(source) as bundle:
        manifest = bundle.manifest
        with BundleWriter(target, manifest.model, epoch=manifest.epoch) as writer:
            for unit in bundle.units:
                made = change(unit, bundle.read(unit))
                if made is not None:
                    writer.add(made, manifest.roots[unit.root], hits=unit.hits)
            writer.finish()
    return target


def problems(proof: BundleProof) -> list[str]:
    return [*proof.problems, *(problem for run in proof.runs for problem in run.problems)]


def cfs(units: Iterable[BundleUnit], kind: str) -> list[bytes]:
    return [unit.cf for unit in units if unit.kind == kind]


@pytest.fixture(params=NUMERICS)
def opening(request: pytest.FixtureRequest, open_tiny: Callable[..., Any]) -> Callable[..., Any]:
    """``opening(**options)``: a tiny engine with bitwise and with standard numerics."""
    return lambda **options: open_tiny(reuse=ReusePolicy(numerics=request.param), **options)


@pytest.fixture
async def built(opening: Callable[..., Any], tmp_path: Path) -> Path:
    path = tmp_path / "built.kite"
    async with opening() as engine:
        await engine.build_bundle([FIRST, BundlePrompt(prompt=SECOND, completion=5)], path)
    return path


async def test_what_was_built_is_proved(opening: Callable[..., Any], built: Path) -> None:
    seen: list[float] = []
    async with opening() as engine:
        proof = await prove_bundle(engine, built, progress=lambda stage, share: seen.append(share))
        assert problems(proof) == []
        assert proof.ok
        assert proof.numerics == engine.reuse.numerics
        rows = sorted((run.tokens, run.expected_tokens, run.cached_tokens, run.answer_tokens) for run in proof.runs)
        assert rows == [(57, 56, 56, 5), (70, 69, 69, 0)]
        for run in proof.runs:
            assert run.kv_difference is not None
            assert run.stored_difference is not None
            bound = 0.0 if engine.reuse.numerics == "bitwise" else KV_BOUND
            assert run.kv_difference <= bound
        assert proof.unchecked == 1  # the guess
        assert seen == sorted(seen)
        assert engine.stats()["bundles"] == {}
        await assert_nothing_left(engine)


async def test_kv_of_another_prompt_is_found(opening: Callable[..., Any], built: Path, tmp_path: Path) -> None:
    """The writer computes good checksums for whatever it is given; only computing shows that it is wrong."""
    with Bundle.open(built) as bundle:
        chain = BlockChain(bundle.manifest.roots[0].root, 16, FIRST)
        victim, donor = chain.fingerprints[1], chain.fingerprints[2]
        (data,) = [bundle.read(unit).data for unit in bundle.units if unit.cf == donor]
    path = await rewritten(
        built,
        tmp_path / "planted.kite",
        lambda entry, unit: dataclasses.replace(unit, data=data) if entry.cf == victim else unit,
    )
    with Bundle.open(path) as bundle:
        assert bundle.check() == []
    async with opening() as engine:
        proof = await prove_bundle(engine, path)
        assert not proof.ok
        assert any(f"the kv unit {short(victim)} differs from the cold run" in each for each in problems(proof))
        assert not any(short(cf) in each for cf in chain.fingerprints if cf != victim for each in problems(proof))


@pytest.mark.parametrize("kind", ["tail", "logits", "answer"])
async def test_other_wrong_units_are_found(opening: Callable[..., Any], built: Path, tmp_path: Path, kind: str) -> None:
    with Bundle.open(built) as bundle:
        chain = BlockChain(bundle.manifest.roots[0].root, 16, SECOND)

    async with opening() as engine:
        key = sampling_key(SamplingParams())
        answer_cf = engine._current.completions.wanted(chain, key).expected.cf

        def change(entry: BundleUnit, unit: RecyclableUnit) -> RecyclableUnit:
            mine = {
                "tail": entry.kind == "kv" and entry.cf == chain.end(),
                "logits": entry.kind == "logits" and entry.cf == chain.end(),
                "answer": entry.kind == "completion" and entry.cf == answer_cf,
            }[kind]
            if not mine:
                return unit
            data = unit.data.copy()
            if kind == "answer":
                data.view(np.uint32)[3] = (data.view(np.uint32)[3] + 1000) % 2048
            elif kind == "logits":
                data.view(np.float32)[:] = data.view(np.float32)[::-1]
            else:
                data[:] = np.roll(data, len(data) // 2)
            return dataclasses.replace(unit, data=data)

        proof = await prove_bundle(engine, await rewritten(built, tmp_path / "planted.kite", change))
        message = {
            "tail": f"the kv unit {short(chain.end())} differs",
            "logits": "the stored logits differ",
            "answer": "the stored answer is not what the model says, from its token 3 on",
        }[kind]
        assert any(message in each for each in problems(proof)), problems(proof)
        assert [bool(run.problems) for run in sorted(proof.runs, key=lambda run: run.tokens)] == [True, False]


async def test_one_changed_bit_is_found_with_bitwise_numerics(open_tiny: Callable[..., Any], tmp_path: Path) -> None:
    async with open_tiny() as engine:
        await engine.build_bundle([FIRST], tmp_path / "built.kite")
        root = engine._current.root(engine.reuse, None)
        victim = BlockChain(root, 16, FIRST).fingerprints[0]

        def change(entry: BundleUnit, unit: RecyclableUnit) -> RecyclableUnit:
            data = unit.data.copy()
            data[len(data) // 2] ^= entry.cf == victim
            return dataclasses.replace(unit, data=data)

        proof = await prove_bundle(engine, await rewritten(tmp_path / "built.kite", tmp_path / "bit.kite", change))
        assert any(f"the kv unit {short(victim)} differs" in each for each in problems(proof))


async def test_a_unit_whose_parent_is_missing_is_not_proved(
    opening: Callable[..., Any], built: Path, tmp_path: Path
) -> None:
    with Bundle.open(built) as bundle:
        chain = BlockChain(bundle.manifest.roots[0].root, 16, FIRST)
    path = await rewritten(
        built, tmp_path / "gap.kite", lambda entry, unit: None if entry.cf == chain.fingerprints[3] else unit
    )
    async with opening() as engine:
        proof = await prove_bundle(engine, path)
    assert not proof.ok
    lost = {short(chain.end())}
    assert {each.split()[3] for each in proof.problems} == lost
    assert all("can't be proved: what comes before it is not in the bundle" in each for each in proof.problems)


@pytest.mark.parametrize("missing", ["tail", "logits"])
async def test_parts_may_be_left_out_at_the_end(
    opening: Callable[..., Any], built: Path, tmp_path: Path, missing: str
) -> None:
    """As a size budget does: what is there is proved, and is used as far as it goes."""
    with Bundle.open(built) as bundle:
        chain = BlockChain(bundle.manifest.roots[0].root, 16, FIRST)
    kind = "kv" if missing == "tail" else "logits"
    path = await rewritten(
        built,
        tmp_path / "less.kite",
        lambda entry, unit: None if (entry.kind, entry.cf) == (kind, chain.end()) else unit,
    )
    async with opening() as engine:
        proof = await prove_bundle(engine, path)
        assert problems(proof) == []
        (run,) = [run for run in proof.runs if run.tokens == 70]
        assert run.expected_tokens == (64 if missing == "tail" else 69)


async def test_templates_and_blocks_without_tail(opening: Callable[..., Any], tmp_path: Path) -> None:
    """A run that ends at a block boundary, and one without logits."""
    async with opening() as engine:
        await engine.build_bundle([some_tokens(48), some_tokens(64)], tmp_path / "x.kite")
        without_logits = await rewritten(
            tmp_path / "x.kite", tmp_path / "y.kite", lambda entry, unit: unit if entry.kind == "kv" else None
        )
        proof = await prove_bundle(engine, tmp_path / "x.kite")
        assert problems(proof) == []
        assert sorted((run.tokens, run.cached_tokens) for run in proof.runs) == [(48, 47), (64, 63)]
        proof = await prove_bundle(engine, without_logits)
        assert problems(proof) == []
        assert [(run.tokens, run.cached_tokens) for run in proof.runs] == [(64, 63)]


async def test_namespaces_and_adapters(kit: BackendKit, cache_dir: Path, tmp_path: Path) -> None:
    model = kit.small()
    adapters = {"de": str(kit.adapter(tmp_path / "adapter", model, 3))}
    path = tmp_path / "x.kite"

    def opening(**options: Any) -> Any:
        return KiteEngine.open(model, n_ctx=256, threads=1, cache_dir=cache_dir, **options)

    async with opening(adapters=adapters) as engine:
        prompts = [FIRST, BundlePrompt(prompt=FIRST, adapter="de")]
        await engine.build_bundle(prompts, path, reuse=ReusePolicy(namespace="tenant"))
        proof = await prove_bundle(engine, path)
        assert problems(proof) == []
        assert {(run.namespace, run.adapter) for run in proof.runs} == {("tenant", None), ("tenant", "de")}
    async with opening() as engine:
        proof = await prove_bundle(engine, path)
        assert len(proof.runs) == 1
        assert proof.problems == (
            "6 units can't be proved: they are of adapters or namespaces that this engine does not have",
        )


async def test_who_may_prove_what(
    kit: BackendKit, open_tiny: Callable[..., Any], cache_dir: Path, tmp_path: Path
) -> None:
    path = tmp_path / "x.kite"
    async with open_tiny() as engine:
        await engine.build_bundle([FIRST], path)
        with pytest.raises(BundleNotFoundError):
            await prove_bundle(engine, tmp_path / "missing.kite")
    async with open_tiny(pool=PoolConfig(disk=str(tmp_path / "disk"))) as engine:
        with pytest.raises(ConfigError, match="without outer tiers"):
            await prove_bundle(engine, path)
    async with open_tiny(n_ctx=64) as engine:
        proof = await prove_bundle(engine, path)
        assert problems(proof) == ["the prompt has 70 tokens, but 63 fit; give a larger n_ctx"]
    async with KiteEngine.open(kit.small(2), n_ctx=256, threads=1, cache_dir=cache_dir) as other:
        with pytest.raises(BundleMismatchError):
            await prove_bundle(other, path)
        assert other.stats()["bundles"] == {}


async def test_runs_are_found_whatever_parents_say(open_tiny: Callable[..., Any], tmp_path: Path) -> None:
    """A manifest is not to be trusted: parents in a circle, or of many tails."""
    async with open_tiny() as engine:
        await engine.build_bundle([FIRST], tmp_path / "x.kite")
    with Bundle.open(tmp_path / "x.kite") as bundle:
        manifest = bundle.manifest
    blocks = [unit for unit in manifest.units if unit.kind == "kv" and len(unit.token_ids) == 16]
    circle = [dataclasses.replace(unit, parent=blocks[index - 1].cf, cf=unit.cf) for index, unit in enumerate(blocks)]
    runs, unreachable = runs_of(dataclasses.replace(manifest, units=tuple(circle)))
    assert runs == []
    assert len(unreachable) == len(circle)
    runs, unreachable = runs_of(manifest)
    assert unreachable == []
    assert [run.tokens() for run in runs] == [FIRST]
    assert [run.num_tokens for run in runs] == [70]


@pytest.mark.parametrize("numerics", NUMERICS)
async def test_a_real_model(smollm2: Path, cache_dir: Path, tmp_path: Path, numerics: Any) -> None:
    """Other chunks when it is built than when it is proved: standard numerics differ then, and stay within the bounds."""
    policy = ReusePolicy(numerics=numerics)
    system = {
        "role": "system",
        "content": "You are the assistant of a car. Answer in one sentence, and be friendly. " * 4,
    }
    chats = [
        [system, {"role": "user", "content": text}] for text in ("Open the window.", "打开车窗。", "What is 2 + 2?")
    ]
    path = tmp_path / "x.kite"
    async with KiteEngine.open(smollm2, n_ctx=512, threads=1, cache_dir=cache_dir, reuse=policy) as engine:
        for chat in chats[:2]:
            await engine.generate(messages=chat, max_tokens=1)
        await engine.build_bundle(chats, path, completions=8)
    async with KiteEngine.open(smollm2, n_ctx=512, threads=1, cache_dir=cache_dir, reuse=policy) as engine:
        proof = await prove_bundle(engine, path)
        assert problems(proof) == []
        assert len(proof.runs) == 3
        assert all(run.answer_tokens for run in proof.runs)


async def test_a_sliding_window(gemma_path: Path, cache_dir: Path, tmp_path: Path) -> None:
    """B42: all parts of the state are there, and reuse is proved by restoring."""
    options: dict[str, Any] = {"n_ctx": 1024, "threads": 1, "cache_dir": cache_dir}
    async with KiteEngine.open(gemma_path, reuse=ReusePolicy(numerics="standard"), **options) as engine:
        await engine.build_bundle([some_tokens(600)], tmp_path / "x.kite")
        proof = await prove_bundle(engine, tmp_path / "x.kite")
        assert problems(proof) == []
        assert proof.runs[0].cached_tokens == 599


@pytest.mark.parametrize("tenths", [3, 6, 9])
async def test_what_a_size_budget_keeps_is_proved(opening: Callable[..., Any], tmp_path: Path, tenths: int) -> None:
    """Whatever is left out, what is there can be reached and is used."""
    prompts = [
        BundlePrompt(prompt=FIRST, completion=4),
        BundlePrompt(prompt=SECOND, hits=9),
        some_tokens(90, first=700),
    ]
    async with opening() as engine:
        whole = await engine.build_bundle(prompts, tmp_path / "whole.kite")
        budget = whole.num_bytes * tenths // 10
        some = await engine.build_bundle(prompts, tmp_path / "some.kite", max_bytes=budget)
        assert some.left_out > 0
        assert (tmp_path / "some.kite").stat().st_size <= budget
        proof = await prove_bundle(engine, tmp_path / "some.kite")
        assert problems(proof) == []
        assert proof.runs


async def test_a_cancelled_proof_leaves_the_engine_as_it_was(open_tiny: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "x.kite"
    async with open_tiny() as engine:
        await engine.build_bundle([some_tokens(60, first=first) for first in range(100, 700, 100)], path)
        seen: list[str] = []
        proving = asyncio.create_task(prove_bundle(engine, path, progress=lambda stage, share: seen.append(stage)))
        while len(seen) < 3:
            await asyncio.sleep(0)
        proving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await proving
        assert engine.stats()["bundles"] == {}
        assert len((await engine.generate(FIRST, max_tokens=3)).token_ids) == 3
        await assert_nothing_left(engine)
