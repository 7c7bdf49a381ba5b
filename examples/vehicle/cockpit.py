"""What the assistant is asked with: the same messages for every command, and the command last.

Run: python examples/vehicle/cockpit.py > prompts.jsonl      (what `kite bundle build --prompts` takes)

Whatever stands before the command is the same in every request, so it is computed once, when the bundle is built. Things
that change, such as the speed or the battery's charge, belong behind it, into the last message.
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
MAX_TOKENS = 48  # of an answer


def lines(name: str) -> list[dict]:
    return [json.loads(line) for line in (HERE / name).read_text(encoding="utf-8").splitlines() if line.strip()]


def commands() -> list[str]:
    """The frequent commands, 20 in English and 20 in Chinese."""
    return [line["command"] for line in lines("commands.jsonl")]


def messages(command: str) -> list[dict]:
    """The chat that is sent for a command."""
    chat = [{"role": "system", "content": (HERE / "system_prompt.txt").read_text(encoding="utf-8").strip()}]
    for line in lines("examples.jsonl"):
        chat.append({"role": "user", "content": line["command"]})
        chat.append({"role": "assistant", "content": line["answer"]})
    # The same command from a recognizer or a keyboard: one space between words, none around.
    return [*chat, {"role": "user", "content": " ".join(command.split())}]


def prompts(every: int = 1) -> list[dict]:
    """Lines of `prompts.jsonl`: the template of all commands, and each `every`th frequent one with its answer."""
    frequent = lines("commands.jsonl")
    template = {"template": messages("{{command}}"), "hits": sum(line["hits"] for line in frequent)}
    known = [
        {"messages": messages(line["command"]), "hits": line["hits"], "completion": MAX_TOKENS}
        for line in frequent[::every]
    ]
    return [template, *known]


if __name__ == "__main__":
    for prompt in prompts(int(sys.argv[1]) if len(sys.argv) > 1 else 1):
        sys.stdout.buffer.write(json.dumps(prompt, ensure_ascii=False).encode() + b"\n")
