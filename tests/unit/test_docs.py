"""What README.md and docs/ show is true: links lead somewhere, snippets fit the API, commands and files are accepted."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import kitelib
from kitelib.cli.main import build_parser
from kitelib.cli.pool_evict import add_evict_options
from kitelib.config import KiteConfig, LifecycleSection, PoolConfig, PoolSection, TierThresholds, UnitTypeSection
from kitelib.upcycle import preheat_ru_pool

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCE: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK: Final = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING: Final = re.compile(r"^#+ (.*)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Block:
    page: Path
    language: str
    text: str
    number: int

    def __str__(self) -> str:
        return f"{self.page.name}-{self.number}"


BLOCKS: Final = [
    Block(page, match[1], match[2], number)
    for page in PAGES
    for number, match in enumerate(_FENCE.finditer(page.read_text("utf-8")), 1)
]
PYTHON: Final = [block for block in BLOCKS if block.language == "python"]
COMMANDS: Final = [
    line.strip()
    for block in BLOCKS
    if block.language in ("", "console")
    for line in block.text.splitlines()
    if line.startswith(("kite ", "kite-ru-pool-evict"))
]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them: lower case, punctuation gone, blanks to dashes."""
    text = _FENCE.sub("", page.read_text("utf-8"))
    return {
        re.sub(r"[^\w\- ]", "", title.replace("`", "").lower()).replace(" ", "-") for title in _HEADING.findall(text)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(_FENCE.sub("", page.read_text("utf-8"))):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    assert [page.name for page in PAGES[2:] if page.name != "index.md" and f"({page.name})" not in index] == []


def test_there_is_something_to_check() -> None:
    assert len(PYTHON) > 8
    assert len(COMMANDS) > 8
    assert any(block.language == "yaml" for block in BLOCKS)


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_fits_the_api(block: Block) -> None:
    tree = ast.parse(block.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kitelib"):
            module = importlib.import_module(str(node.module))
            assert [each.name for each in node.names if not hasattr(module, each.name)] == []
        elif isinstance(node, ast.Call):
            check_call(node)
        elif isinstance(node, ast.Attribute):
            check_report(node)


def check_call(node: ast.Call) -> None:
    """The call binds to the function or class that it means, and configurations can really be made."""
    kind = node.func
    if isinstance(kind, ast.Name) and kind.id in ("PoolConfig", "TierThresholds", "ReusePolicy"):
        values = {str(each.arg): value_of(each.value) for each in node.keywords}
        {"PoolConfig": PoolConfig, "TierThresholds": TierThresholds, "ReusePolicy": kitelib.ReusePolicy}[kind.id](
            **values
        )
    elif isinstance(kind, ast.Name) and kind.id == "preheat_ru_pool":
        bind(preheat_ru_pool, node)
    elif isinstance(kind, ast.Attribute) and isinstance(kind.value, ast.Name):
        owner = {"engine": kitelib.KiteEngine, "KiteEngine": kitelib.KiteEngine, "KiteConfig": KiteConfig}.get(
            kind.value.id
        )
        if owner is not None:
            assert hasattr(owner, kind.attr), f"{owner.__name__}.{kind.attr}"
            bind(getattr(owner, kind.attr), node, method=kind.value.id == "engine")


def check_report(node: ast.Attribute) -> None:
    """``gen.reuse.tiers``, ``gen.usage.cached_tokens`` and the like exist."""
    parts = ast.unparse(node).split(".")
    owner: Any = kitelib.Generation
    if parts[0] != "gen":
        return
    for part in parts[1:]:
        fields = {each.name: each.type for each in dataclasses.fields(owner)}
        assert part in fields, ast.unparse(node)
        owner = getattr(kitelib, str(fields[part]), None)
        if owner is None:
            return


def bind(function: Any, node: ast.Call, *, method: bool = False) -> None:
    given = {each.arg: None for each in node.keywords if each.arg is not None}
    positional = [None] * (len(node.args) + method)
    inspect.signature(function).bind(*positional, **given)


def value_of(node: ast.expr) -> Any:
    """What stands there: a constant, a product or power of some, a secret that is read from a file, or some name."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Pow)):
        left, right = value_of(node.left), value_of(node.right)
        return left * right if isinstance(node.op, ast.Mult) else left**right
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "read_bytes":
        return b"secret" * 8
    if isinstance(node, ast.Name):
        return "a name"
    if isinstance(node, ast.Call):
        check_call(node)
        return TierThresholds()
    return ast.literal_eval(node)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "yaml"], ids=str)
def test_configuration_files_are_accepted_and_name_every_key(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(block.text, encoding="utf-8")
    config = KiteConfig.from_yaml(file)
    assert config.to_pool_config().redis is not None
    assert config.to_pool_config().s3 is not None
    for section in (KiteConfig, PoolSection, LifecycleSection, UnitTypeSection):
        for field in dataclasses.fields(section):
            assert re.search(rf"\b{field.name}:", block.text), field.name


def test_the_archive_of_the_example_can_ever_get_a_unit(tmp_path: Path) -> None:
    """A unit that expires before it is cold is never archived."""
    (block,) = [block for block in BLOCKS if block.language == "yaml"]
    file = tmp_path / "config.yaml"
    file.write_text(block.text, encoding="utf-8")
    pool = KiteConfig.from_yaml(file).to_pool_config()
    assert pool.ttl_seconds is None or pool.ttl_seconds > pool.thresholds.cold_after_s


def test_every_option_of_the_pool_is_in_its_page() -> None:
    text = (ROOT / "docs" / "pool.md").read_text("utf-8")
    assert [each.name for each in dataclasses.fields(PoolConfig) if f"`{each.name}`" not in text] == []


def test_every_counter_of_a_tier_is_in_its_page() -> None:
    text = (ROOT / "docs" / "pool.md").read_text("utf-8")
    source = ast.parse((ROOT / "src" / "kitelib" / "stores" / "tier.py").read_text("utf-8"))
    (counters,) = [each for each in ast.walk(source) if isinstance(each, ast.FunctionDef) and each.name == "counters"]
    (table,) = [each for each in ast.walk(counters) if isinstance(each, ast.Dict)]
    names = [ast.literal_eval(key) for key in table.keys if key is not None]
    assert len(names) > 10
    assert [name for name in names if f"`{name}`" not in text] == []


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_are_accepted(line: str) -> None:
    words = shlex.split(re.split(r"\s{2,}", line)[0])
    if words[-1] == "--help":
        words.pop()
    parser = build_parser()
    if words[0] == "kite-ru-pool-evict":
        parser = argparse.ArgumentParser()
        add_evict_options(parser)
    assert parser.parse_args(words[1:]) is not None


def commands() -> Iterator[str]:
    """All that `kite` can do, in words."""
    yield from _commands(build_parser(), "kite")


def _commands(parser: argparse.ArgumentParser, so_far: str) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield f"{so_far} {name}"
                yield from _commands(child, f"{so_far} {name}")


@pytest.mark.parametrize("command", list(commands()))
def test_every_command_is_in_the_documentation(command: str) -> None:
    assert any(f"{command}" in page.read_text("utf-8") for page in PAGES)
