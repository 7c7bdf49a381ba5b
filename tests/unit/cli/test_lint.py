"""`kite lint`: groups and figures against slow, obvious counts; what is found; what becomes of damaged files."""

from __future__ import annotations

import functools
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kitelib.cli import prompts as reading
from kitelib.cli.lint_groups import Groups, PrefixCache
from kitelib.cli.tokens import WordTokens
from kitelib.yoco.volatile import find_volatile, move_to_end

QUESTIONS = (Path(__file__).parents[2] / "data" / "banking77_extract.txt").read_text("utf-8").splitlines()
RULES = "You answer for a bank. Be brief and polite. " + " ".join(
    f"Rule {number}: ask for detail {number * 7} and check it against record {number * 3} first."
    for number in range(12)
)
SHOP = "This is the help desk of a shop. " + " ".join(
    f"For goods of kind {number}, look into drawer {number * 5} before you promise a refund." for number in range(9)
)
WORDS = ["card", "bank", "euro", "loan", "debt", "cash", "coin", "rate", "sale", "bill", "fund", "gold"]

GOLDEN = """\
27 prompts with 4,799 words, in blocks of 16: 2 templates, and 3 prompts like no other
2 lines could not be read:
  line 13 is not JSON: Expecting property name enclosed in double quotes, at column 2
  line 14 has neither 'prompt' nor 'messages', but 'question'

template     prompts  words each  common chars  reusable now  after moving  first volatile
-----------  -------  ----------  ------------  ------------  ------------  -------------------------
1 (line 1)        12         225           838          0.0%         78.1%  timestamp at character 22
2 (line 15)       12         172           675         77.5%         77.5%  -
no other           3          10             -          0.0%          0.0%  -
all               27         178             -         33.3%         77.3%

template 1, line 1, character 22: '2026-11-30T09:00:25Z' is a date with a time of day, in front of 816 characters that its 12 prompts share. Moved to the end of the prompt, 78.1% is reusable instead of 0.0%.
"""


@pytest.fixture
def run(kite_here: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, str, str]]:
    return functools.partial(kite_here, "lint")


def chat(system: str, question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def clock(index: int) -> str:
    return f"2026-11-30T09:{index:02d}:25Z"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Chats with a clock in front; two damaged lines; chats of a shop with nothing in front; three single prompts."""
    lines = [json.dumps({"messages": chat(f"Current time: {clock(at)}. {RULES}", QUESTIONS[at])}) for at in range(12)]
    lines += ["{damaged", '{"question": "x"}']
    lines += [json.dumps({"custom_id": at, "body": {"messages": chat(SHOP, QUESTIONS[at])}}) for at in range(12, 24)]
    lines += [
        json.dumps(QUESTIONS[30]),
        "",
        json.dumps({"prompt": QUESTIONS[31]}),
        json.dumps(chat("x", QUESTIONS[32])),
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def written(path: Path, prompts: list[Any]) -> Path:
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), encoding="utf-8")
    return path


def test_the_report_of_a_log(run, log):
    code, out, err = run(log)
    assert (code, err) == (1, "")
    assert out == GOLDEN


def test_the_same_in_json(run, log):
    code, out, _ = run(log, "--json")
    found = json.loads(out)
    assert code == 1
    assert found["damaged_lines"]["count"] == 2
    assert [number for number, _ in found["damaged_lines"]["first"]] == [13, 14]
    assert [template["prompts"] for template in found["templates"]] == [12, 12]
    assert [template["line"] for template in found["templates"]] == [1, 15]
    assert found["no_other"]["prompts"] == 3
    (finding,) = found["findings"]
    assert (finding["template"], finding["line"], finding["kind"], finding["text"]) == (1, 1, "timestamp", clock(0))
    first, second = found["templates"][0]["gaps"]
    assert (first["volatile"], second["volatile"]) == (True, False)
    assert second["examples"][0] == QUESTIONS[0].rstrip("?") or QUESTIONS[0].startswith(second["examples"][0])


def reusable(prompts: list[str], size: int) -> int:
    """Words of all leading blocks that any earlier prompt had at the same place after the same text: by comparing."""
    words = [WordTokens().encode(text, chat=False)[0] for text in prompts]
    total = 0
    for index, own in enumerate(words):
        run = 0
        for earlier in words[:index]:
            common = 0
            while common < min(len(own), len(earlier)) and own[common] == earlier[common]:
                common += 1
            run = max(run, common // size * size)
        total += run
    return total


@pytest.mark.parametrize("size", [4, 16, 64])
def test_the_shares_are_those_of_a_slow_count(run, log, size):
    _, out, _ = run(log, "--json", "--block-tokens", size)
    found = json.loads(out)["total"]
    texts = [line.prompt.plain() for line, _ in reading.read_lines(str(log)) if isinstance(line, reading.Line)]
    assert found["prompts"] == len(texts)
    assert found["chars"] == sum(map(len, texts))
    assert found["reusable"] == reusable(texts, size)
    assert found["after_moving"] == reusable([move_to_end(text, find_volatile(text)) for text in texts], size)
    assert 0 < found["reusable"] < found["after_moving"] < found["tokens"]


def test_with_a_model_its_own_tokens_are_counted(run, log):
    code, out, _ = run(log, "--model", "smollm2", "--json")
    found = json.loads(out)
    assert code == 1
    assert (found["unit"], found["block_tokens"]) == ("tokens", 16)
    assert found["model"].endswith(".gguf")
    first = found["templates"][0]
    assert first["after_moving"] > first["reusable"]
    assert first["gaps"][0]["start"] == len("<|im_start|>system\nCurrent time: ")


def test_a_clean_log(run, tmp_path):
    path = written(
        tmp_path / "l.jsonl", [chat(RULES, f"{question} It is {clock(at)}.") for at, question in enumerate(QUESTIONS)]
    )
    code, out, _ = run(path)
    assert code == 0
    assert "Nothing volatile stands in front of text that prompts share." in out


def test_prompts_that_are_all_different_are_clean(run, tmp_path):
    code, out, _ = run(written(tmp_path / "l.jsonl", QUESTIONS))
    assert code == 0
    assert "0 templates" in out


def test_the_same_prompt_again_is_clean_whatever_it_holds(run, tmp_path):
    code, out, _ = run(written(tmp_path / "l.jsonl", [f"{clock(1)} {RULES}"] * 5), "--json")
    assert code == 0
    assert json.loads(out)["templates"][0]["common_chars"] == len(f"{clock(1)} {RULES}")


@pytest.mark.parametrize("size", [4, 16])
def test_a_clock_that_stands_still_is_remarked_and_moving_it_never_counts_as_a_loss(run, tmp_path, size):
    """Moved behind words that all differ, what was common is so no more: then it stays where it is."""
    prompts = [f"{clock(1)} Say in French, please, and in one line: {word}" for word in WORDS]
    path = written(tmp_path / "l.jsonl", prompts)
    code, out, _ = run(path, "--json", "--block-tokens", size)
    found = json.loads(out)
    (template,) = found["templates"]
    assert code == 0
    assert template["reusable"] == reusable(prompts, size) > 0
    assert reusable([move_to_end(text, find_volatile(text)) for text in prompts], size) < template["reusable"]
    assert template["after_moving"] == template["reusable"] == found["total"]["after_moving"]
    assert [(part["kind"], part["text"]) for part in template["constants"]] == [("timestamp", clock(1))]
    _, out, _ = run(path, "--block-tokens", size)
    assert f"character 0: '{clock(1)}' is a date with a time of day, but the same in all 12 prompts" in out
    assert "Nothing that changed from prompt to prompt stands in front of text that prompts share." in out


def test_moving_counts_where_a_template_gains_and_not_where_it_loses(run, tmp_path):
    moving = [f"Current time: {clock(at)}. {RULES} {QUESTIONS[at]}" for at in range(12)]
    still = [f"{clock(1)} Say in French, please, and in one line: {word}" for word in WORDS]
    code, out, _ = run(written(tmp_path / "l.jsonl", moving + still), "--json")
    found = json.loads(out)
    first, second = found["templates"]
    assert code == 1
    assert first["after_moving"] > first["reusable"]
    assert second["after_moving"] == second["reusable"] > 0
    assert found["total"]["after_moving"] == first["after_moving"] + second["after_moving"]


def test_conversations_that_grow_are_one_template_and_reuse_themselves(run, tmp_path):
    turns = chat(RULES, QUESTIONS[0])
    prompts = []
    for at in range(1, 6):
        prompts.append([*turns])
        turns += [{"role": "assistant", "content": f"Answer {at}."}, {"role": "user", "content": QUESTIONS[at]}]
    code, out, _ = run(written(tmp_path / "l.jsonl", prompts), "--json")
    found = json.loads(out)
    assert code == 0
    assert [template["prompts"] for template in found["templates"]] == [5]
    assert found["total"]["reusable"] > 0.7 * found["total"]["tokens"]


def test_an_unfilled_expression_is_found_also_in_a_single_prompt(run, tmp_path):
    code, out, _ = run(
        written(tmp_path / "l.jsonl", ["Today is {{ now() }}. Be brief.", "Explain ${x} in JavaScript."])
    )
    assert code == 1
    assert "line 1, character 9: '{{ now() }}' is a template expression that was not filled in" in out
    assert "${x}" not in out


def test_data_in_front_is_remarked_but_no_finding(run, tmp_path):
    code, out, _ = run(written(tmp_path / "l.jsonl", [f"{question}\n\n{RULES}" for question in QUESTIONS[:8]]))
    assert code == 0
    assert "what is common should come first" in out


def test_a_label_that_comes_and_goes_with_its_clock(run, tmp_path):
    prompts = [
        f"{f'Now: {clock(at)}. ' if at % 3 else ''}{RULES} {question}" for at, question in enumerate(QUESTIONS[:12])
    ]
    code, out, _ = run(written(tmp_path / "l.jsonl", prompts))
    assert code == 1
    assert "is a date with a time of day, in front of" in out


def test_tools_are_part_of_the_prompt(run, tmp_path):
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {"at": clock(1)}}}]
    code, out, _ = run(written(tmp_path / "l.jsonl", [{"messages": chat("x", "y"), "tools": tools}]), "--json")
    assert code == 0
    assert json.loads(out)["total"]["chars"] == len(json.dumps(tools)) + len("\nsystem: x\nuser: y")


def test_top_limits_what_is_shown_not_what_is_found(run, log):
    code, out, _ = run(log, "--top", 1)
    assert code == 1
    assert "1 smaller template not shown" in out
    assert "2 (line 15)" not in out


def test_many_findings_are_cut(run, tmp_path):
    code, out, _ = run(written(tmp_path / "l.jsonl", [f"{word} {{{{ now() }}}}" for word in QUESTIONS[:30]]))
    assert code == 1
    assert "... and 10 more; see --json." in out


def test_progress_is_told_once_where_nobody_watches(run, tmp_path):
    _, _, err = run(written(tmp_path / "l.jsonl", [*QUESTIONS, *QUESTIONS]))
    assert err == "  Reading l.jsonl ...\n"


# Bounded memory


def test_groups_are_bounded_and_a_template_among_strangers_is_found(monkeypatch):
    groups = Groups(WordTokens(), max_groups=8)
    for at in range(400):
        groups.add(2 * at, f"stranger {at} " + " ".join(str(at * 1000 + word) for word in range(20)), chat=False)
        groups.add(2 * at + 1, f"Now: {clock(at % 60)} {RULES} {QUESTIONS[at % 72]}", chat=False)
        assert len(groups._groups) <= 8
    (found,) = groups.found()
    assert (found.line, found.totals.prompts) == (1, 400)
    assert groups.others.prompts == 400
    assert groups._by_shingle.keys() == found.looked.sketch
    assert groups.total.prompts == groups.others.prompts + found.totals.prompts


@pytest.mark.parametrize("phrase", ["", " ".join(f"phrase{at}" for at in range(30))])
def test_the_work_grows_with_the_prompts_not_with_their_square(phrase):
    """Prompts that all are unlike, also where they have a phrase in common: a prompt meets no more than the groups."""

    def work(count: int) -> int:
        """Functions called, and groups met in the index."""
        groups, seen = Groups(WordTokens(), max_groups=16), [0]

        class Index(dict):
            def get(self, key, default=None):
                seen[0] += len(found := super().get(key, default))
                return found

        groups._by_shingle = Index()

        def note(_frame: object, event: str, _argument: object) -> None:
            seen[0] += event in ("call", "c_call")

        sys.setprofile(note)
        try:
            for at in range(count):
                own = [f"w{at * 997 + word}" for word in range(60)]
                groups.add(at, " ".join([*own[:30], phrase, *own[30:]]), chat=False)
        finally:
            sys.setprofile(None)
        assert groups.found() == []
        return seen[0]

    assert work(400) < 2.1 * work(200)


def test_the_cache_forgets_the_oldest_blocks():
    cache = PrefixCache(max_blocks=10)
    hot = [1, 2, 3, 4]
    assert cache.use(hot, 2) == 0
    for at in range(50):
        assert cache.use([100 + at, 0, 200 + at, 0], 2) == 0
        assert cache.use(hot, 2) == 4  # used again and again, so never among the oldest
        assert len(cache._young) + len(cache._old) <= 10
    assert cache.forgot
    assert cache.use([100, 0, 200, 0], 2) == 0


def test_forgotten_blocks_are_told(run, tmp_path, monkeypatch):
    monkeypatch.setattr(Groups.__init__, "__kwdefaults__", {"max_groups": 128, "max_blocks": 4})
    _, out, _ = run(written(tmp_path / "l.jsonl", [RULES, SHOP]))
    assert "more blocks than are remembered" in out


def test_very_long_lines_are_skipped_not_kept(monkeypatch):
    monkeypatch.setattr(reading, "_MAX_LINE_BYTES", 100)
    text = b'"' + b"x" * 1000 + b'"\n"short"\n' + b'"' + b"y" * 500 + b'"'
    lines = [line for line, _ in reading._lines(io.BytesIO(text), len(text))]
    assert [line.number for line in lines] == [1, 2, 3]
    assert [isinstance(line, reading.BadLine) for line in lines] == [True, False, True]
    assert "longer than" in lines[0].reason


# Files


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "is not JSON"),
        ("3", "has a int where a text or a list of messages should be"),
        ("null", "has a NoneType"),
        ('""', "has an empty prompt"),
        ("[]", "has an empty list of messages"),
        ('{"messages": [{"content": "x"}]}', "has a message without a role at index 0"),
        ('{"messages": [{"role": "user", "content": 3}]}', "has a message whose content is a int at index 0"),
        ('{"prompt": [1, 2, 3]}', "has token ids, whose text isn't known; give the text, or messages"),
        ('{"body": {"prompt": [[1, 2], [3]]}}', "has token ids, whose text isn't known"),
        ("[1, 2, 3]", "has token ids, whose text isn't known"),
        ('{"prompt": ["a b", "c"]}', "has a list of 2 texts where one prompt should be; give each by itself"),
        ('{"prompt": ["a b"]}', None),
        ('{"prompt": [""]}', "has an empty prompt"),
        ('{"prompt": [{"role": "user", "content": "x"}]}', None),
        ('{"messages": [1, 2, 3]}', "has a message without a role at index 0"),
        ('{"messages": "x", "tools": [3]}', None),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": 3}', "has tools that are no list of objects"),
        ('{"body": {"model": "m"}}', "has neither 'prompt' nor 'messages', but 'model'"),
        ("{}", "has neither 'prompt' nor 'messages', but nothing"),
        ("[" * 100_000, "is nested too deeply"),
        ("\udcff\udcfe", "is not UTF-8"),
    ],
)
def test_a_damaged_line_is_named_and_the_rest_counts(run, tmp_path, line, reason):
    path = tmp_path / "l.jsonl"
    path.write_bytes(f'\ufeff"first"\n\n{line}\n"last"'.encode(errors="surrogateescape"))
    code, out, _ = run(path)
    assert code == 0
    assert (f"line 3 {reason}" in out) == (reason is not None)
    assert ("1 line could not be read" in out) == (reason is not None)
    assert f"{2 if reason else 3} prompts with" in out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["does not exist", "one prompt a line"]),
        (b"", ["is empty", '{"prompt": "Hello"}']),
        (b"\n \n", ["is empty"]),
        (b"hello\n", ["holds no prompt in 1 line;", "line 1 is not JSON", '{"messages": ']),
        (b"\x1f\x8b\x08\x00\xff\xff\n", ["line 1 is not UTF-8"]),
    ],
)
def test_files_without_prompts(run, tmp_path, content, words):
    path = tmp_path / "l.jsonl"
    if content is not None:
        path.write_bytes(content)
    code, out, err = run(path)
    assert (code, out) == (2, "")
    assert err.startswith("kite: ")
    assert err.count("\n") == 1
    assert [word for word in words if word not in err] == []


def test_a_folder_or_a_missing_model_is_told_before_any_work(run, tmp_path, log):
    assert "is a folder" in run(tmp_path)[2]
    code, out, err = run(log, "--model", "nothing.gguf")
    assert (code, out) == (2, "")
    assert "there is no model at 'nothing.gguf'" in err


def test_standard_input_is_read_too(kite):
    done = kite("lint", "-", stdin="".join(json.dumps(f"{clock(at)} {RULES}") + "\n" for at in range(5)))
    assert done.returncode == 1
    assert "5 prompts" in done.stdout
    assert "timestamp at character 0" in done.stdout


def test_what_the_model_refuses_is_a_damaged_line(run, tmp_path):
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    code, out, _ = run(written(tmp_path / "l.jsonl", [image, "text"]), "--model", "smollm2")
    assert code == 0
    assert "line 1 messages[0] has a content part of type 'image_url'" in out


def test_help_has_examples(kite):
    done = kite("lint", "--help")
    assert done.returncode == 0
    assert "kite lint requests.jsonl" in done.stdout.partition("examples:")[2]
