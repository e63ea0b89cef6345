"""Twenty prompts of every kind a user sends: short, long, multi-turn, CJK, emoji, code."""

from __future__ import annotations

_STORY = (
    "The lighthouse keeper wrote down the weather every morning: wind, rain, the colour of the sea, and the names of "
    "the ships that passed. "
)
_CODE = '''def merge(left, right):
    """Merge two sorted lists."""
    out = []
    while left and right:
        out.append(left.pop(0) if left[0] <= right[0] else right.pop(0))
    return out + left + right
'''

Messages = list[dict[str, str]]


def _ask(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def _talk(*turns: str) -> Messages:
    return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


PROMPTS: dict[str, Messages] = {
    "one-word": _ask("Hi"),
    "one-letter": _ask("a"),
    "question": _ask("What is the capital of France?"),
    "sum": _ask("What is 17 + 25? Answer with the number only."),
    "list": _ask("Name five animals that live in the sea, one per line."),
    "long-story": _ask(_STORY * 6 + "What did the keeper write down?"),
    "longer-story": _ask(_STORY * 14 + "Summarise this in one sentence."),
    "long-numbers": _ask("Continue: " + ", ".join(str(n * n) for n in range(60))),
    "two-turns": _talk("My name is Ada.", "Nice to meet you, Ada.", "What is my name?"),
    "three-turns": _talk(
        "Pick a fruit.", "An apple.", "Now a colour.", "Green.", "Put both into one short sentence, please."
    ),
    "long-turns": _talk(_STORY * 4, "I see. The keeper is careful.", "Why do you think so?"),
    "system": [{"role": "system", "content": "You answer like a pirate."}, *_ask("How is the weather?")],
    "chinese": _ask("请用一句话介绍一下北京。"),
    "japanese": _ask("富士山の高さは何メートルですか。"),
    "korean": _ask("안녕하세요, 오늘 날씨가 어때요?"),
    "emoji": _ask("Translate into emoji: happy birthday, cat, fire 🎂🐈🔥👩‍👩‍👧‍👦"),
    "mixed": _ask("naïve café – Ünïcödé ✓ 漢字 😀 end. Repeat this line."),
    "code": _ask("What does this do?\n```python\n" + _CODE + "```"),
    "code-long": _ask("Write a test for it:\n" + _CODE * 4),
    "json": _ask('Fill in: {"name": "Ada", "born": 1815, "field": '),
}
