"""`kite bundle`: help, what is loaded for it, and the options its subcommands share."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from kitelib.cli.bundle import _with_options
from kitelib.cli.bundle_options import (
    add_trust_options,
    add_write_options,
    byte_count,
    clip,
    labels_of,
    read_key_file,
    summary_text,
    trusted_keys_of,
)
from kitelib.errors import ConfigError
from kitelib.upcycle.bundle import BundleSummary
from kitelib.upcycle.bundle.signing import new_key

Run = Callable[..., tuple[int, str, str]]
ACTIONS = ("build", "export", "inspect", "verify", "sign", "keygen", "diff", "merge")


@pytest.mark.parametrize("arguments", [["bundle"], *(["bundle", action] for action in ACTIONS)])
def test_help_has_examples_and_exit_codes(kite_here: Run, arguments: list[str]) -> None:
    code, out, err = kite_here(*arguments, "--help")
    assert (code, err) == (0, "")
    name = " ".join(["kite", *arguments])
    assert f"usage: {name} " in out
    assert name in out.partition("examples:")[2]
    assert len(arguments) == 1 or "Exit codes: 0" in out


def test_the_help_of_the_command_is_its_subcommands(kite_here: Run) -> None:
    assert {line.split()[0] for line in kite_here("bundle", "--help")[1].splitlines() if line.startswith("    ")} == {
        *ACTIONS
    }


def test_parsing_loads_no_library() -> None:
    """The options of every subcommand are there before numpy, safetensors or a key is touched."""
    code = (
        "import sys; from kitelib.cli.main import build_parser\n"
        "build_parser().parse_args(['bundle', 'merge', 'a', 'b', '-o', 'c'])\n"
        "names = ('numpy', 'safetensors', 'cryptography', 'kitelib.upcycle', 'kitelib.engine.engine')\n"
        "print([name for name in names if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_an_action_it_is_a_wrong_option(kite_here: Run) -> None:
    code, out, err = kite_here("bundle")
    assert (code, out) == (2, "")
    assert "ACTION" in err


@pytest.mark.parametrize(
    "command",
    [["inspect", "F"], ["diff", "F", "F"], ["merge", "F", "F", "-o", "out.kite"], ["sign", "F", "--key", "K"]],
)
def test_a_file_that_is_not_there_is_the_callers_mistake(kite_here: Run, tmp_path: Path, command: list[str]) -> None:
    missing = str(tmp_path / "gone.kite")
    code, out, err = kite_here("bundle", *(missing if each == "F" else each for each in command))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("200M", 200 * 2**20), ("200mb", 200 * 2**20), ("1.5GiB", 1536 * 2**20), ("64 K", 2**16), ("2G", 2**31)],
)
def test_sizes(text: str, size: int) -> None:
    assert byte_count(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "M", "1T", "1e9", "nan", "0.1", "9" * 16, "1.M"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="like 200M"):
        byte_count(text)


def write_options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_write_options(parser)
    return parser.parse_args(["-o", "out.kite", *arguments])


def test_labels() -> None:
    args = write_options("--label", "fleet=cockpit", "--label", "formula=a=b", "--label", "empty=", "--label", "empty=")
    assert labels_of(args) == {"fleet": "cockpit", "formula": "a=b", "empty": ""}


def test_a_label_with_two_texts_is_refused() -> None:
    with pytest.raises(ConfigError, match="fleet is given twice"):
        labels_of(write_options("--label", "fleet=a", "--label", "fleet=b"))


@pytest.mark.parametrize("text", ["fleet", "=cockpit", ""])
def test_no_label(capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit):
        write_options("--label", text)
    assert "give NAME=TEXT" in capsys.readouterr().err


def trust_options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_trust_options(parser)
    return parser.parse_args([*arguments])


def test_trusted_keys_are_digits_or_files(tmp_path: Path) -> None:
    pem, public = new_key()
    key = load_pem_private_key(pem, None).public_key()
    (tmp_path / "key.pub").write_text(f"{public}\n")
    (tmp_path / "key.pem").write_bytes(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    for text in (public, public.upper(), str(tmp_path / "key.pub"), str(tmp_path / "key.pem")):
        assert trusted_keys_of(trust_options("--trusted-key", text)) == (public,)
    other = new_key()[1]
    assert trusted_keys_of(trust_options("--trusted-key", public, "--trusted-key", other)) == (public, other)
    assert trusted_keys_of(trust_options()) == ()


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (None, "can't be read"),
        (b"", "is empty"),
        (b"\xff\xfe binary", "give an Ed25519 public key"),
        (b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", "holds no public key"),
        (new_key()[0], "is a private key"),
    ],
)
def test_a_trusted_key_that_is_none(tmp_path: Path, raw: bytes | None, words: str) -> None:
    file = tmp_path / "key.pem"
    if raw is not None:
        file.write_bytes(raw)
    with pytest.raises(ConfigError, match=words) as caught:
        trusted_keys_of(trust_options("--trusted-key", str(file)))
    assert raw is None or b"PRIVATE" not in raw or raw.decode().splitlines()[1] not in str(caught.value)


def test_hmac_key_files(tmp_path: Path) -> None:
    file = tmp_path / "key.bin"
    file.write_bytes(b"\x00\xffkey")
    assert read_key_file(str(file)) == b"\x00\xffkey"
    assert read_key_file(None) is None
    with pytest.raises(ConfigError, match="can't be read"):
        read_key_file(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [
        ("plain", 10, "plain"),
        ("plain", 5, "plain"),
        ("longer than that", 9, "longer..."),
        ("\x1b[2Jgone\r\n", 20, "?[2Jgone??"),
        ("a\u202eb\x9bc", 20, "a?b?c"),
        ("x" * 10**6, 8, "xxxxx..."),
        ("", 3, ""),
    ],
)
def test_texts_of_others_are_bounded_and_harmless(text: str, width: int, shown: str) -> None:
    assert clip(text, width) == shown


def test_a_summary_is_a_line_per_fact() -> None:
    summary = BundleSummary(
        path="out.kite",
        digest="d" * 64,
        num_bytes=2**20,
        header_bytes=2**10,
        data_bytes=2**21,
        units={"logits": 1, "kv": 1200},
        tokens=19200,
        left_out=3,
    )
    lines = dict(line.split(None, 1) for line in summary_text(summary).splitlines())
    assert lines["size"] == "1.0 MiB, header 1.0 KiB; 50% of the units' own 2.0 MiB"
    assert lines["units"] == "1,200 kv, 1 logits"
    assert lines["left"] == "out   3 units that did not fit"
    assert lines["digest"] == "d" * 64


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no unit fits into max_bytes=100", "no unit fits into --max-bytes 100"),
        ("the most is 22: lower min_hits, or look", "the most is 22: lower --min-hits, or look"),
        ("require_signature needs trusted_keys: the", "--require-signature needs --trusted-key: the"),
        ("is hmac_key that of the pool?", "is --hmac-key-file that of the pool?"),
        ("'max_bytes' /a/max_bytes PoolConfig(hmac_key=) PoolConfig.hmac_key", None),
    ],
)
def test_errors_name_the_options_of_the_command(text: str, shown: str | None) -> None:
    assert _with_options(text) == (shown or text)


def test_an_error_of_a_command_is_told_with_its_options(
    kite_here: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    code, out, err = kite_here("bundle", "verify", tmp_path / "none.kite", "--require-signature")
    assert (code, out) == (2, "")
    assert "--require-signature needs --trusted-key: the Ed25519 public keys" in err
