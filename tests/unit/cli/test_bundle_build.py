"""`kite bundle build`: a file of prompts becomes a bundle, and every mistake is found before anything is computed."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kitelib.upcycle.bundle import Bundle
from kitelib.upcycle.bundle.signing import new_key
from tests.support.backends import BackendKit
from tests.support.engines import some_tokens

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def build(kite_bundle: Run, kit: BackendKit, tmp_path: Path) -> Callable[..., tuple[int, str, str, Path]]:
    """``build(lines, *options)``: the command with a tiny model; also gives the path of the bundle."""
    model = kit.small()

    def run(lines: list[Any], *options: Any) -> tuple[int, str, str, Path]:
        prompts, target = tmp_path / "prompts.jsonl", tmp_path / "out.kite"
        prompts.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        found = kite_bundle(
            *("build", model, "--prompts", prompts, "-o", target, "--threads", 1, "--ctx", 256), *options
        )
        return (*found, target)

    return run


def test_a_bundle_and_its_summary(build: Callable[..., Any]) -> None:
    lines = [some_tokens(70), {"prompt": some_tokens(40, first=900), "hits": 9, "completion": 4}]
    code, out, err, path = build(lines, "--label", "fleet=test")
    assert (code, err) == (0, "")
    with Bundle.open(path) as bundle:
        assert bundle.manifest.labels == {"fleet": "test"}
        assert bundle.manifest.epoch == 0
        assert {root.execution_path["numerics"] for root in bundle.manifest.roots} == {"standard"}
        assert len(bundle.units) == 4 + 1 + 2 + 1 + 2 + 2
        assert bundle.digest in out
    assert out.startswith("prompts    2 prompts, in ")
    assert "2 completion, 8 kv, 2 logits" in out
    assert "numerics   standard: for any machine, in engines opened with ReusePolicy(numerics='standard')" in out
    assert f"kite bundle verify {path} --model " in out
    assert f"await engine.preload('{path}')" in out
    assert "ReusePolicy(numerics='standard', completions=True)" in out


def test_the_same_as_json(build: Callable[..., Any]) -> None:
    code, out, _, path = build([some_tokens(70)], "--json", "--numerics", "bitwise", "--epoch", 3)
    found = json.loads(out)
    assert (code, found["prompts"], found["units"], found["path"]) == (0, 1, {"kv": 5, "logits": 1}, str(path))
    assert (found["num_bytes"], found["left_out"], found["signer"]) == (path.stat().st_size, 0, None)
    assert found["numerics"] == "bitwise"
    with Bundle.open(path) as bundle:
        assert bundle.manifest.epoch == 3
        assert bundle.manifest.roots[0].execution_path["numerics"] == "bitwise"


def test_options_reach_the_bundle(build: Callable[..., Any], kit: BackendKit, tmp_path: Path) -> None:
    pem, public = new_key()
    (tmp_path / "key.pem").write_bytes(pem)
    (tmp_path / "hmac").write_bytes(b"k" * 32)
    (tmp_path / "secret").write_bytes(b"s" * 32)
    adapter = kit.adapter(tmp_path / "adapter", kit.small(), 3)
    code, out, err, path = build(
        [{"prompt": some_tokens(40), "adapter": "de"}],
        *("--sign-key", tmp_path / "key.pem", "--hmac-key-file", tmp_path / "hmac", "--adapter", f"de={adapter}"),
        *("--namespace", "tenant", "--namespace-secret-file", tmp_path / "secret", "--compress", "entropy"),
        *("--completions", 2),
    )
    assert (code, err) == (0, "")
    assert f"signed by  {public}" in out
    with Bundle.open(path, require_signature=True, trusted_keys=[public], hmac_key=b"k" * 32) as bundle:
        (root,) = bundle.manifest.roots
        assert root.namespace == "tenant"
        assert root.adapter is not None
        assert any(unit.codec.endswith("entropy") for unit in bundle.units)
        assert sum(unit.kind == "completion" for unit in bundle.units) == 2


def test_max_bytes_leaves_out_what_is_worth_least(build: Callable[..., Any]) -> None:
    lines = [{"prompt": some_tokens(100), "hits": 1}, {"prompt": some_tokens(100, first=900), "hits": 100}]
    _, out, _, path = build(lines, "--json")
    whole = json.loads(out)["num_bytes"]
    code, out, _, path = build(lines, "--json", "--max-bytes", f"{whole * 6 // 10 // 1024}K")
    assert code == 0
    assert json.loads(out)["left_out"] > 0
    assert path.stat().st_size <= whole * 6 // 10


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ([{"promt": "x"}], (), "prompts.jsonl, line 1: the key 'promt' is unknown; did you mean 'prompt'?"),
        ([[1, 2], [5000]], (), "prompts.jsonl, line 2: the prompt holds token id 5000"),
        ([[1, 2], some_tokens(300)], (), "prompts.jsonl, line 2: the prompt has 300 tokens, but at most 255 fit"),
        ([{"prompt": [1], "adapter": "fr"}], (), "line 1: no adapter is called 'fr'"),
        ([], (), "has no prompts"),
        ([[1, 2]], ("--sign-key", "/missing.pem"), "/missing.pem"),
        ([[1, 2]], ("--backend", "lama"), "did you mean 'llama_cpp'?"),
        ([[1, 2]], ("--adapter", "a=x", "--adapter", "a=y"), "--adapter a is given twice"),
        ([[1, 2]], ("--adapter", "a"), "'a' is no adapter; give NAME=PATH"),
        ([[1, 2]], ("--completions", "-1"), "-1"),
        ([[1, 2]], ("--label", "x"), "x"),
    ],
)
def test_mistakes_end_it_with_code_2(
    build: Callable[..., Any], lines: list[Any], options: tuple[str, ...], message: str
) -> None:
    code, out, err, path = build(lines, *options)
    assert (code, out) == (2, "")
    assert message in err
    assert not path.exists()


def test_a_model_that_is_named_as_the_target_stays(build: Callable[..., Any], kit: BackendKit, tmp_path: Path) -> None:
    (tmp_path / "precious.gguf").write_bytes(b"GGUF" + bytes(100))
    code, out, err, path = build([[1, 2]], "-o", tmp_path / "precious.gguf")
    assert (code, out) == (2, "")
    assert "precious.gguf' exists and is no bundle; give another name, or remove it" in err
    assert (tmp_path / "precious.gguf").read_bytes() == b"GGUF" + bytes(100)
    assert not path.exists()


def test_marks_in_what_is_no_template_are_pointed_out(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a build that is stopped says that there is no file."""

    async def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kitelib.cli.bundle_build._build", stop)
    code, out, err, path = build([[1, 2], {"prompt": "Today is {{date}}."}])
    assert (code, out) == (130, "")
    assert "line 2: {{date}} is taken as it stands; to have it mark what varies, give the prompt as a template\n" in err
    assert "line 1" not in err
    assert err.endswith("\nkite: stopped; nothing was written\n")
    assert not path.exists()


def test_help_has_examples(kite_bundle: Run) -> None:
    code, out, _ = kite_bundle("build", "--help")
    assert code == 0
    assert "--completions N" in out
    assert "kite bundle build model.gguf --prompts prompts.jsonl -o cockpit.kite" in out


def test_what_is_printed_at_the_end_works(
    build: Callable[..., Any], kite_bundle: Run, kit: BackendKit, tmp_path: Path, model_cache: Path
) -> None:
    """The lines of a signed, authenticated bundle with a tenant, an adapter and an answer, as they are, from elsewhere."""
    pem, _ = new_key()
    (tmp_path / "key.pem").write_bytes(pem)
    (tmp_path / "hmac").write_bytes(b"k" * 32)
    (tmp_path / "secret").write_bytes(b"s" * 32)
    adapter = kit.adapter(tmp_path / "adapter", kit.small(), 3)
    code, out, _, _ = build(
        [{"prompt": some_tokens(40), "adapter": "de"}],
        *("--sign-key", tmp_path / "key.pem", "--hmac-key-file", tmp_path / "hmac", "--adapter", f"de={adapter}"),
        *("--namespace", "tenant", "--namespace-secret-file", tmp_path / "secret", "--completions", 2),
    )
    assert code == 0
    check, use = out.partition("Check it:  kite bundle ")[2].split("\nUse it:    ")
    assert kite_bundle(*shlex.split(check)[:2], *shlex.split(check)[2:], "--threads", 1)[0] == 0
    call = f"    gen = await engine.generate({some_tokens(40)}, max_tokens=2, adapter='de')"
    program = [
        "import asyncio",
        "from pathlib import Path",
        "from kitelib import KiteEngine, PoolConfig, ReusePolicy",
        "async def main():",
        *(f"    {line.removeprefix(' ' * 11)}" for line in use.rstrip().split("\n")),
        f"    {call}",
        "        print(gen.reuse.completion, engine.stats()['steps'])",
        "asyncio.run(main())",
    ]
    (tmp_path / "elsewhere").mkdir()
    environment = {**os.environ, "XDG_CACHE_HOME": str(model_cache)}
    done = subprocess.run(  # noqa: PLW1510, its output is in the message
        [sys.executable, "-c", "\n".join(program)],
        cwd=tmp_path / "elsewhere",
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True 0\n"


def test_the_time_of_making_may_come_from_outside(build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    blobs = [build([some_tokens(40)], "--completions", 2)[3].read_bytes() for _ in range(2)]
    assert blobs[0] == blobs[1]
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    code, _, err, _ = build([some_tokens(40)])
    assert (code, "SOURCE_DATE_EPOCH is 'yesterday'; give seconds" in err) == (2, True)
