"""`kite run` on the real model."""

from __future__ import annotations

import json

QUICK = ("--threads", "1", "--max-tokens", "6")


def test_run_prints_the_answer_and_the_figures_apart(kite):
    done = kite("run", "smollm2", "Name a colour.", *QUICK, "--json-stats")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    stats = json.loads(done.stderr)
    assert stats["usage"]["completion_tokens"] <= 6
    assert stats["usage"]["prompt_tokens"] > 4
    assert stats["finish_reason"] in ("stop", "length")
    assert stats["timing"]["ttft_s"] > 0
    assert stats["reuse"]["exactness"] in ("bitwise", "standard")


def test_prompt_from_standard_input_gives_the_same_answer(kite):
    # Greedy, so that two processes say the same.
    given = kite("run", "smollm2", "Name a colour.", *QUICK)
    read = kite("run", "smollm2", "-", *QUICK, stdin="Name a colour.")
    assert read.returncode == 0, read.stderr
    assert read.stdout == given.stdout
    assert read.stderr == ""


def test_a_second_process_starts_from_what_the_first_left_on_the_disk(kite, tmp_path):
    """B21: the same bits, without computing them again."""
    config = tmp_path / "kite.yaml"
    config.write_text(f"ru_pool: {{backend: disk, disk_path: {tmp_path / 'pool'}}}")
    command = ("run", "smollm2", "Name a colour. " * 12, *QUICK, "--json-stats")
    first = kite(*command, "--disk", str(tmp_path / "pool"))
    second = kite(*command, "--config", str(config))
    assert (first.returncode, second.returncode) == (0, 0), second.stderr
    assert json.loads(first.stderr)["usage"]["cached_tokens"] == 0
    assert json.loads(second.stderr)["reuse"]["tiers"]["disk"] > 0
    assert second.stdout == first.stdout


def test_a_tier_that_can_t_be_used_is_named_and_the_answer_comes_all_the_same(kite, tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    done = kite(
        "run", "smollm2", "Name a colour.", *QUICK, "--disk", str(tmp_path), "--redis", "redis://:s3cr3t@127.0.0.1:1"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    disk, redis = done.stderr.splitlines()
    assert disk.startswith("kite: without the disk tier: ")
    assert "give an empty or a new folder" in disk
    assert redis.startswith("kite: without the redis tier: ")
    assert "can't connect to 127.0.0.1:1" in redis
    assert "s3cr3t" not in done.stderr


def test_raw_continues_the_text(kite):
    done = kite("run", "smollm2", "One, two, three, four,", "--raw", *QUICK)
    assert done.returncode == 0, done.stderr
    assert "five" in done.stdout


def test_prompt_that_does_not_fit(kite):
    done = kite("run", "smollm2", "word " * 600, "--ctx", "256", *QUICK)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("kite: the prompt has ")
    assert done.stderr.count("\n") == 1


def test_damaged_model_file(kite, tmp_path):
    path = tmp_path / "damaged.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    done = kite("run", str(path), "Hello")
    assert done.returncode == 1
    assert done.stderr.startswith("kite: ")
    assert "damaged.gguf" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_bundle_answers_the_first_request(kite, tmp_path):
    bundle, prompts = tmp_path / "a.kite", tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": "Name a colour."}]}))
    built = kite("bundle", "build", "smollm2", "--prompts", str(prompts), "-o", str(bundle), "--threads", "1")
    assert built.returncode == 0, built.stderr
    command = ("run", "smollm2", "Name a colour.", *QUICK, "--json-stats", "--bundle", str(bundle))
    done = kite(*command, "--numerics", "standard")
    assert done.returncode == 0, done.stderr
    stats = json.loads(done.stderr)
    assert stats["reuse"]["tiers"] == {"bundle": stats["usage"]["prompt_tokens"]}
    other = kite(*command)
    assert other.returncode == 1
    assert "numerics" in other.stderr
