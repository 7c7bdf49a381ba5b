"""The cockpit assistant in examples/vehicle: its bundle is built, and answers offline."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kitelib.engine.bundle_prompts import read_prompts

EXAMPLE = Path(__file__).parents[3] / "examples" / "vehicle"
pytestmark = pytest.mark.timeout(600)  # about 20 seconds on an idle core
EVERY = 20  # of the 40 frequent commands: the first English and the first Chinese one

# Stands between Python and the program: it may not connect, nor write any file, create a folder, or rename.
GUARD = """
import os, runpy, sys
def refuse(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.bind", "os.mkdir", "os.rename", "os.truncate"):
        os.write(2, f"refused: {event} {args}\\n".encode())
        raise PermissionError(event)
    if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        if args[0] != os.devnull:
            os.write(2, f"refused: {event} {args}\\n".encode())
            raise PermissionError(event)
sys.addaudithook(refuse)
program = sys.argv[1]
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(program))
runpy.run_path(program, run_name="__main__")
"""


def build(folder: Path, model: Path, every: int, numerics: str) -> Path:
    """What build.sh makes of each `every`th command; returns the folder."""
    environment = {**os.environ, "EVERY": str(every)}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["sh", EXAMPLE / "build.sh", model, folder, "--threads", "1", "--numerics", numerics],
        env=environment, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    return build(tmp_path_factory.mktemp("vehicle"), smollm2, EVERY, "standard")


def command_of(model: Path, folder: Path, *options: object, bundle: Path | None = None) -> list[str]:
    files = ["--bundle", bundle or folder / "cockpit.kite", "--trusted-key", folder / "fleet.pub"]
    return [str(each) for each in (EXAMPLE / "assistant.py", "--model", model, "--threads", 1, *files, *options)]


def drive(arguments: list[str], said: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """The assistant, which hears these commands."""
    done = subprocess.run(
        [sys.executable, *arguments], input="".join(f"{line}\n" for line in said), capture_output=True, text=True,
        encoding="utf-8", env={**os.environ, "PYTHONIOENCODING": "utf-8", **environment}, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def frequent() -> list[dict]:
    return [json.loads(line) for line in (EXAMPLE / "commands.jsonl").read_text(encoding="utf-8").splitlines()]


def is_chinese(text: str) -> bool:
    return any("\u4e00" <= character <= "\u9fff" for character in text)


def test_there_are_twenty_commands_in_either_language(built: Path) -> None:
    texts = [line["command"] for line in frequent()]
    assert len(set(texts)) == 40
    assert sum(map(is_chinese, texts)) == 20
    template, *known = read_prompts(built / "prompts.jsonl")
    assert template.varying
    assert [prompt.messages[-1]["content"] for prompt in known] == texts[::EVERY]
    assert all(prompt.messages[:-1] == template.messages[:-1] for prompt in known)


def test_known_commands_take_no_step_and_new_ones_only_their_own_tokens(tmp_path: Path, smollm2: Path) -> None:
    """With bitwise numerics, under which the answers can be compared on any machine."""
    folder = build(tmp_path, smollm2, len(frequent()), "bitwise")
    done = drive(command_of(smollm2, folder, "--numerics", "bitwise", "--measure", 1), [])
    pattern = r"^(known|new) +[\d.]+ +\d+ +(\d+) +(\d+) +(\d+) +(\S+) +(.+)$"
    known, new = re.findall(pattern, done.stdout, re.MULTILINE)
    kind, cached, prompt, steps, answer, command = known
    assert (kind, steps, answer, command) == ("known", "0", "same", frequent()[0]["command"])
    assert int(cached) == int(prompt)
    kind, cached, prompt, steps, answer, _ = new
    assert (kind, answer) == ("new", "same")
    assert int(steps) > 0
    assert 600 < int(cached) < int(prompt) < int(cached) + 40


def test_it_drives_without_a_network_and_without_writing(built: Path, smollm2: Path) -> None:
    english, chinese = (line["command"] for line in frequent()[::EVERY])
    arguments = ["-c", GUARD, *command_of(smollm2, built)]
    done = drive(
        arguments,
        [english, "", f"  {english.replace(' ', '  ')} ", chinese, "I am freezing."],
        HOME="/dev/null",
        XDG_CACHE_HOME="/dev/null/x",
    )
    # The cache folder is all that it tried to make.
    assert all(re.match(r"refused: os.mkdir \('/dev/null/", line) for line in done.stderr.splitlines())
    loaded, *answers = re.findall(r"^\[(.*)\]$", done.stdout, re.MULTILINE)
    assert re.fullmatch(r"\d+ units mapped, [\d.]+ MB, signed by [0-9a-f]{8}", loaded)
    assert len(answers) == 4
    count, total = re.match(r"(\d+) of (\d+) prompt tokens reused", answers.pop()).groups()
    assert 600 < int(count) < int(total) < int(count) + 40
    for answer in answers:
        count, total = re.match(r"a known command, (\d+) of (\d+) prompt tokens reused", answer).groups()
        assert count == total


def test_updates_are_taken_and_bad_ones_are_not(built: Path, smollm2: Path, tmp_path: Path) -> None:
    """Starts without a bundle; then one arrives; then a damaged one."""
    bundle = tmp_path / "cockpit.kite"
    program = subprocess.Popen(
        [sys.executable, *command_of(smollm2, built, bundle=bundle)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )  # fmt: skip
    known = frequent()[0]["command"]

    def say(text: str, lines: int) -> list[str]:
        """What is in brackets, after a command."""
        program.stdin.write(f"{text}\n")
        program.stdin.flush()
        return told(lines)

    def told(lines: int) -> list[str]:
        found = []
        while len(found) < lines:
            line = program.stdout.readline()
            assert line, "the assistant ended"
            found += [line] if line.startswith("[") else []
        return found

    try:
        assert "[not loaded: " in told(1)[0]
        shutil.copy(built / "cockpit.kite", tmp_path / "new")
        (tmp_path / "new").replace(bundle)
        loaded, answer = say(known, 2)
        assert "units mapped" in loaded
        assert answer.startswith("[a known command")
        (tmp_path / "new").write_bytes((built / "cockpit.kite").read_bytes()[:-1])
        (tmp_path / "new").replace(bundle)
        refused, answer = say(known, 2)
        assert "[not loaded: " in refused
        assert answer.startswith("[a known command")
        (answer,) = say(known, 1)
        assert answer.startswith("[a known command")
        program.stdin.close()
        assert program.wait(60) == 0
    finally:
        program.kill()
        program.wait()
        program.stdout.close()


def test_another_fleets_bundle_is_not_loaded(built: Path, smollm2: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    from kitelib.upcycle.bundle.signing import new_key

    key = tmp_path / "other.pub"
    key.write_text(new_key()[1], encoding="ascii")
    done = drive([*command_of(smollm2, built), "--trusted-key", str(key)], [])
    assert "[not loaded: " in done.stdout
    assert "none of the 1 trusted keys" in done.stdout


def test_without_a_bundle_a_measurement_ends_with_one_sentence(smollm2: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, *command_of(smollm2, tmp_path, "--measure", 1)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(
        "nothing was measured, since there is no bundle to measure with: .*fleet.pub'", done.stderr.strip()
    )
