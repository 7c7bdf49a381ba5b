"""Whether a bundle is of use to an engine, and if not, what exactly differs and what to do about it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from kitelib.fingerprint import Fingerprint, short
from kitelib.upcycle.bundle.manifest import BundleRoot, Manifest, ModelIdentity

__all__ = ["check_identity", "check_roots", "differences_text", "identity_differences", "mismatch_message"]

_ABSENT: Final = "none"
_MAX_CHARS: Final = 48  # of a value in a message
_MAX_FIELDS: Final = 24  # in a message
_NAME: Final = re.compile(r"[\w.+-]{1,64}", re.ASCII)
_DIGEST: Final = re.compile(r"[0-9a-f]{32,}")
# What only numerics="bitwise" has in an execution path, in any backend.
_BITWISE: Final = frozenset(
    {
        *("capability", "cpu", "cpu_model", "cuda", "device_name", "library", "native", "numerics", "rows", "system"),
        *("threads", "torch", "transformers", "triton"),
    }
)
_TO_STANDARD: Final = (
    "build the bundle with numerics='standard' and open the engine with ReusePolicy(numerics='standard'), so that "
    "neither depends on the machine"
)
_NUMERICS: Final[Mapping[str, str]] = {
    "standard": "open the engine with ReusePolicy(numerics='standard')",
    "bitwise": "open the engine with ReusePolicy(numerics='bitwise') if this is the same kind of machine, or build the "
    "bundle again with numerics='standard'",
}
_FROM_THREADS: Final = frozenset({"rows", "threads"})
_ANOTHER_MODEL: Final = "it is another model or another quantization: build a bundle with the model that runs here"
_SAME_OPTIONS: Final = "build the bundle with an engine that is opened as this one"
_SAME_DTYPE: Final = "open the engine with the dtype that the bundle was built with"
_REMEDIES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("block_bytes", "config", "model_state", "vocab_size", "weights"), _ANOTHER_MODEL),
    **dict.fromkeys(_BITWISE, _TO_STANDARD),
    # {0} is the bundle's value.
    "adapter": "open the engine with the adapter that the bundle was built with, at the same scale",
    "attention": "open the engine with the numerics that the bundle was built with",
    "backend": "open the engine with backend={0!r}",
    "block_tokens": "open the engine with block_tokens={0}",
    "device": "open the engine with device={0!r}",
    "kv_precision": "open the engine with PoolConfig(kv_precision={0!r})",
    "kv_type": _SAME_DTYPE,
    "layout": "build the bundle again with this release and these options, which lay KV out in another way",
    "namespace_secret": "open the engine with the PoolConfig(namespace_secret=) that the bundle was built with",
    "weights_type": _SAME_DTYPE,
}
_FROM_NUMERICS: Final = _BITWISE | {"attention", "layout"}
# An engine without kv_precision in its path has "exact" KV.
_DEFAULTS: Final = {"kv_precision": "exact"}


def check_identity(bundle: Manifest, model: ModelIdentity) -> dict[str, tuple[str, str]]:
    """What of a bundle's model differs from the engine's; empty if its units are of this very model.

    Returns:
        name of each field that differs -> (the bundle's, the engine's), as text. A differing model state is told by
        its parts ("weights", "kv_type", ...), or as "model_state" if the parts don't show it.
    """
    return identity_differences(bundle.model, model)


def identity_differences(first: ModelIdentity, second: ModelIdentity) -> dict[str, tuple[str, str]]:
    """As `check_identity`, of two bundles' models."""
    found: dict[str, tuple[str, str]] = {}
    if first.model_state != second.model_state:
        # The parts are for people: only the digest decides, and a bundle may say anything about them.
        found = _differences(first.state_parts, second.state_parts)
        found = found or {"model_state": (short(first.model_state), short(second.model_state))}
    for name in ("layout", "block_tokens", "vocab_size"):
        if getattr(first, name) != getattr(second, name):
            found[name] = (str(getattr(first, name)), str(getattr(second, name)))
    if not found and first.block_bytes != second.block_bytes:
        found["block_bytes"] = (str(first.block_bytes), str(second.block_bytes))
    return found


def check_roots(
    manifest: Manifest,
    own_root: Callable[[str | None, tuple[bytes, float] | None], Fingerprint | None],
    execution_path: Mapping[str, str | int | bool],
) -> tuple[list[bool], dict[str, tuple[str, str]]]:
    """Which roots of a bundle an engine would start from itself.

    Call it for a bundle that passes `check_identity`: the model state enters the roots as well.

    Args:
        own_root: the engine's own root for a namespace and an adapter (content digest and scale; None without one);
            None if it doesn't have that adapter.
        execution_path: what enters the engine's roots.

    Returns:
        per root whether its units can be found here; and of those that can't, name of each field that differs ->
        (the bundle's, the engine's), as text. Where several roots differ in one field, the first one's values.
    """
    usable: list[bool] = []
    differences: dict[str, tuple[str, str]] = {}
    for root in manifest.roots:
        own = own_root(root.namespace, root.adapter)
        usable.append(own == root.root)
        if not usable[-1]:
            for name, values in _root_differences(root, own, execution_path).items():
                differences.setdefault(name, values)
    return usable, differences


def mismatch_message(path: str | os.PathLike[str], differences: Mapping[str, tuple[str, str]]) -> str:
    """One sentence for people: every field that differs with both values, and what to do.

    Args:
        path: the bundle's.
        differences: not empty; from `check_identity`, `check_roots` or both.
    """
    remedies = dict(_REMEDIES)
    follows: frozenset[str] = frozenset()
    if "numerics" in differences:
        # With other numerics come other attention, layout and library; the one remedy makes all of them alike.
        remedies["numerics"] = _NUMERICS.get(differences["numerics"][0], _TO_STANDARD)
        follows = _FROM_NUMERICS - {"numerics"}
    elif "threads" in differences and differences.keys() & _BITWISE <= _FROM_THREADS:
        remedies |= dict.fromkeys(_FROM_THREADS, "open the engine with threads=" + _cut(differences["threads"][0]))
    found = (
        remedies.get(name, _SAME_OPTIONS).format(pair[0][:_MAX_CHARS])
        for name, pair in _numerics_first(differences).items()
        if name not in follows
    )
    what = differences_text(differences, "here")
    return f"the bundle {os.fspath(path)!r} was made for something else: {what}; {_list(found, '; ')}"


def differences_text(differences: Mapping[str, tuple[str, str]], where: str) -> str:
    """Every field that differs with both values, for a message; `where` says where the second ones are from."""
    fields = []
    for name, pair in _numerics_first(differences).items():
        first, second = _shown(*pair)
        fields.append(f"{name if _NAME.fullmatch(name) else _cut(name)} is {first} in the bundle and {second} {where}")
    return _list(fields, ", ")


def _numerics_first(differences: Mapping[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """Other numerics are the reason for most of what differs besides."""
    return dict(sorted(differences.items(), key=lambda item: item[0] != "numerics"))


def _root_differences(
    root: BundleRoot, own: Fingerprint | None, execution_path: Mapping[str, str | int | bool]
) -> dict[str, tuple[str, str]]:
    found = _differences(_DEFAULTS | dict(root.execution_path), _DEFAULTS | dict(execution_path))
    if own is None and root.adapter is not None:
        digest, scale = root.adapter
        found["adapter"] = (f"{short(digest)} at scale {scale:g}", _ABSENT)
    # What is left that enters a root: it can't be shown, and the fingerprints alone tell that it differs.
    return found or {"namespace_secret": ("another", "this engine's")}


def _differences(
    first: Mapping[str, str | int | bool], second: Mapping[str, str | int | bool]
) -> dict[str, tuple[str, str]]:
    """Entries that differ in value or type (1, True and "1" give different fingerprints), as text."""
    found = {}
    for name in dict.fromkeys([*first, *second]):
        one, other = first.get(name, _ABSENT), second.get(name, _ABSENT)
        if type(one) is not type(other) or one != other:
            texts = str(one), str(other)
            found[name] = texts if texts[0] != texts[1] else (repr(one), repr(other))
    return found


def _shown(first: str, second: str) -> tuple[str, str]:
    """Both texts, shortened so that what differs is still to be seen."""
    start = 0
    if max(len(first), len(second)) > _MAX_CHARS:
        same = next((index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0)
        start = max(0, same - _MAX_CHARS // 2)
    return _cut(first, start), _cut(second, start)


def _cut(text: str, start: int = 0) -> str:
    """A part of a text for a message. What a bundle says is not trusted: no control characters, bounded length."""
    if _DIGEST.fullmatch(text):
        return text[:16]
    end = start + _MAX_CHARS
    shown = "..." * bool(start) + text[start:end] + "..." * (end < len(text))
    return shown if _NAME.fullmatch(shown) else repr(shown)


def _list(parts: Iterable[str], between: str) -> str:
    known = list(dict.fromkeys(parts))
    if len(known) > _MAX_FIELDS:
        known[_MAX_FIELDS:] = [f"{len(known) - _MAX_FIELDS} more"]
    return between.join(known)
