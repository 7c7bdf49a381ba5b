"""`kite bundle`: make, look at, check, sign and combine bundles, the files that carry units to where no network is."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Final

from kitelib.cli.bundle_build import add_build_options
from kitelib.cli.bundle_export import add_export_options
from kitelib.cli.bundle_options import add_trust_options, add_write_options
from kitelib.cli.bundle_verify import add_verify_options
from kitelib.errors import ConfigError

__all__ = ["add_parser"]

_OPTIONS: Final = {
    "hmac_key": "--hmac-key-file",
    "max_bytes": "--max-bytes",
    "min_hits": "--min-hits",
    "namespace_secret": "--namespace-secret-file",
    "require_signature": "--require-signature",
    "trusted_keys": "--trusted-key",
}
"""What the functions behind the commands call an argument -> the option that gives it."""
_ARGUMENT: Final = re.compile(rf"(?<![\w./(\\'\"-])({'|'.join(_OPTIONS)})(?:=(\d+))?(?![\w./'\"-])")

_EXAMPLES = """\
examples:
  kite bundle build model.gguf --prompts prompts.jsonl -o cockpit.kite
  kite bundle inspect cockpit.kite --units
  kite bundle verify cockpit.kite --model model.gguf
  kite bundle keygen fleet.pem
  kite bundle sign cockpit.kite --key fleet.pem
  kite bundle build --help                          all options of a subcommand"""

_BUILD_DESCRIPTION = """\
Compute prompts with a model and write what they leave behind to a bundle. An engine that preloads it answers such
prompts as if it had been asked them before."""

_BUILD_EXAMPLES = """\
examples:
  kite bundle build model.gguf --prompts prompts.jsonl -o cockpit.kite
  kite bundle build smollm2 --prompts prompts.jsonl -o cockpit.kite --max-bytes 200M --sign-key fleet.pem

The environment variable SOURCE_DATE_EPOCH (seconds since 1970) is stated as the time of making, if it is set, so that
the same model and prompts give the same bundle on the same machine.

Exit codes: 0 written, 1 the model failed, 2 a wrong option or prompt, or no such file; 130 Ctrl-C, and nothing is written."""

_EXPORT_DESCRIPTION = """\
Write the units of a running fleet's pool that are used most to a bundle. They keep the numerics of the engines that
computed them: engines of a fleet that is to make bundles for other machines are opened with
ReusePolicy(numerics="standard"). Units of bitwise engines fit only machines and options exactly like theirs."""

_EXPORT_EXAMPLES = """\
examples:
  kite bundle export --from-pool redis://cache:6379 --top 200 --min-hits 100 -o hot.kite
  kite bundle export --from-pool /var/cache/kite --max-bytes 200M -o hot.kite

Exit codes: 0 written, 1 the pool could not be read, 2 a wrong option, or no unit that fits what was asked for."""

_VERIFY_DESCRIPTION = """\
Read every unit of a bundle and check all that can be checked. With a model, compute the prompts cold as well, and
prove that what the bundle gives is what the model computes. Nothing that is read is ever run.

With a model every prompt is computed in full, though a build computes what prompts share only once, so this takes
longer than the build: several times as long where all begin with the same instructions."""

_VERIFY_EXAMPLES = """\
examples:
  kite bundle verify cockpit.kite
  kite bundle verify cockpit.kite --trusted-key fleet.pub
  kite bundle verify cockpit.kite --model model.gguf

With --model there is a row for each prompt:
  tokens      its length; of a template, what is kept of it
  cached      tokens that a request took from the bundle; `must be` is what that has to be
  KV differs  largest difference of the KV from a cold run's, as a share of its norm
  log-probs   largest difference of a log-probability between a request with the bundle and a cold one
  logits      the same of the stored logits; - if none are stored
  answer      tokens of a stored answer that were checked

Exit codes: 0 good, 1 damaged, not trusted or not what the model computes, 2 a wrong option, or no such file."""

_INSPECT_DESCRIPTION = """\
Say what a bundle holds and for which model. Only its header is read, so this is quick, and no payload is checked:
`kite bundle verify` does that."""

_INSPECT_EXAMPLES = """\
examples:
  kite bundle inspect cockpit.kite
  kite bundle inspect cockpit.kite --units
  kite bundle inspect cockpit.kite --json | jq .model.model_state
  kite bundle inspect cockpit.kite --trusted-key fleet.pub

Exit codes: 0 done, 1 no bundle, damaged or not trusted, 2 a wrong option, or no such file."""

_SIGN_DESCRIPTION = """\
Sign a bundle with an Ed25519 private key; needs the package `cryptography`: `pip install '.[sign]'` in a clone. A
signature that is there is replaced. Units and digest stay as they are."""

_SIGN_EXAMPLES = """\
examples:
  kite bundle sign cockpit.kite --key fleet.pem
  kite bundle sign cockpit.kite --key fleet.pem -o signed.kite

Exit codes: 0 signed, 1 no bundle or damaged, 2 a wrong option or key, or no such file."""

_KEYGEN_DESCRIPTION = """\
Make an Ed25519 key pair: the private key is written to a new file that only you can read, and the public key, which
engines take as a trusted key, is printed. Needs the package `cryptography`: `pip install '.[sign]'` in a clone."""

_KEYGEN_EXAMPLES = """\
examples:
  kite bundle keygen fleet.pem
  kite bundle keygen fleet.pem > fleet.pub
  kite bundle keygen --public fleet.pem > fleet.pub     the public key of a private key that is there

Exit codes: 0 done, 2 a wrong option, the file is there already, or with --public is no private key."""

_DIFF_DESCRIPTION = """\
Compare what two bundles hold: model, roots, labels, and which units only one of them has or both have differently.
When and by what they were made is shown and is no difference; neither is a signature."""

_DIFF_EXAMPLES = """\
examples:
  kite bundle diff old.kite new.kite
  kite bundle diff old.kite new.kite --json

Exit codes: 0 the same content, 1 they differ or one is damaged, 2 a wrong option, or no such file."""

_MERGE_DESCRIPTION = """\
Write one bundle with the units of several, each once. All must be of the same model, layout and block size. What the
parts were signed with is not kept: sign the new one. A signature or an HMAC vouches for all that is in it, so give
--trusted-key with --sign-key, and --trusted-hmac-key-file with --hmac-key-file, unless you made the parts yourself."""

_MERGE_EXAMPLES = """\
examples:
  kite bundle merge german.kite english.kite -o all.kite
  kite bundle merge german.kite english.kite -o all.kite --max-bytes 200M --sign-key fleet.pem --label fleet=cockpit

Exit codes: 0 written, 1 the bundles do not fit together or one is damaged, 2 a wrong option, or no such file."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand, which has subcommands of its own, to the command line."""
    parser = commands.add_parser(
        "bundle",
        help="make, check and sign bundles: units in one portable file",
        description="Make, look at, check, sign and combine bundles: recyclable units in one portable file.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)

    build = _action(actions, "build", "compute prompts and bundle what they leave behind", _BUILD_DESCRIPTION)
    add_build_options(build)
    _finish(build, _BUILD_EXAMPLES, _build)

    export = _action(actions, "export", "bundle the units of a pool that are used most", _EXPORT_DESCRIPTION)
    add_export_options(export)
    _finish(export, _EXPORT_EXAMPLES, _export)

    inspect = _action(actions, "inspect", "say what a bundle holds", _INSPECT_DESCRIPTION)
    inspect.add_argument("file", metavar="FILE", help="the bundle")
    inspect.add_argument("--units", action="store_true", help="list the units too")
    _add_json(inspect)
    add_trust_options(inspect)
    _finish(inspect, _INSPECT_EXAMPLES, _inspect)

    verify = _action(actions, "verify", "read and check every unit", _VERIFY_DESCRIPTION)
    add_verify_options(verify)
    _finish(verify, _VERIFY_EXAMPLES, _verify)

    sign = _action(actions, "sign", "sign a bundle", _SIGN_DESCRIPTION)
    sign.add_argument("file", metavar="FILE", help="the bundle")
    sign.add_argument("--key", required=True, metavar="KEY.pem", help="the private key, see `kite bundle keygen`")
    sign.add_argument("-o", "--output", metavar="OUT", help="write the signed bundle here (default: replace FILE)")
    _finish(sign, _SIGN_EXAMPLES, _sign)

    keygen = _action(actions, "keygen", "make a key pair for signing", _KEYGEN_DESCRIPTION)
    keygen.add_argument("key", metavar="KEY.pem", help="new file for the private key")
    keygen.add_argument("--public", action="store_true", help="make no key: print the public key of the one in KEY.pem")
    _finish(keygen, _KEYGEN_EXAMPLES, _keygen)

    diff = _action(actions, "diff", "compare two bundles", _DIFF_DESCRIPTION)
    diff.add_argument("a", metavar="A", help="a bundle")
    diff.add_argument("b", metavar="B", help="another")
    _add_json(diff)
    _finish(diff, _DIFF_EXAMPLES, _diff)

    merge = _action(actions, "merge", "write one bundle with the units of several", _MERGE_DESCRIPTION)
    merge.add_argument("files", nargs="+", metavar="FILE", help="the bundles, two or more")
    _add_json(merge)
    add_write_options(merge)
    add_trust_options(merge, hmac="--trusted-hmac-key-file")
    _finish(merge, _MERGE_EXAMPLES, _merge)


def _action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str, description: str
) -> argparse.ArgumentParser:
    return actions.add_parser(
        name, help=summary, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def _finish(parser: argparse.ArgumentParser, examples: str, execute: Callable[[argparse.Namespace], int]) -> None:
    def run(args: argparse.Namespace) -> int:
        try:
            return execute(args)
        except ConfigError as error:
            error.args = (_with_options(str(error)),)
            raise

    parser.epilog = examples
    parser.set_defaults(execute=run)


def _with_options(text: str) -> str:
    """A message with the names of the command's options in it; names of files and of classes' fields stay."""
    return _ARGUMENT.sub(lambda match: " ".join(filter(None, (_OPTIONS[match[1]], match[2]))), text)


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


# Not imported above: showing the help needs no numpy.


def _build(args: argparse.Namespace) -> int:
    from kitelib.cli.bundle_build import run_build

    return run_build(args)


def _export(args: argparse.Namespace) -> int:
    from kitelib.cli.bundle_export import run_export

    return run_export(args)


def _inspect(args: argparse.Namespace) -> int:
    from kitelib.cli.bundle_show import run_inspect

    return run_inspect(args)


def _verify(args: argparse.Namespace) -> int:
    from kitelib.cli.bundle_verify import run_verify

    return run_verify(args)


def _sign(args: argparse.Namespace) -> int:
    from kitelib.cli.bundle_edit import run_sign

    return run_sign(args)


def _keygen(args: argparse.Namespace) -> int:
    from kitelib.cli.bundle_edit import run_keygen

    return run_keygen(args)


def _diff(args: argparse.Namespace) -> int:
    from kitelib.cli.bundle_show import run_diff

    return run_diff(args)


def _merge(args: argparse.Namespace) -> int:
    from kitelib.cli.bundle_edit import run_merge

    return run_merge(args)
