"""The report of an A/B test, as people read it on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdd_runtime.cli.bench import facts, warnings
from pdd_runtime.experiments.ab_report import AbReport, Answer, Comparison, Side
from pdd_runtime.experiments.html import seconds
from pdd_runtime.experiments.trial import Word

_STYLES = {Word.better: "green", Word.worse: "red", Word.same: "cyan", Word.open: "dim"}
_ALIKE = 0.9
"""Similarity of answers below which a word is due."""


def ab_tables(made: AbReport) -> RenderableType:
    """The verdicts first, then what they rest on."""
    parts: list[RenderableType] = []
    for name, found in made.comparisons.items():
        parts += [headline(made, name), Text(), _answers(made, name, found), Text()]
    table = facts(made.graphs)
    _worth(table, made, list(made.graphs.values()))
    parts += [table, Text(), Text(_method(made), "dim")]
    return Group(*parts)


def headline(made: AbReport, name: str) -> Text:
    """One line: what a user wanted to know."""
    found, side = made.comparisons[name], made.graphs[name]
    text = Text.assemble(
        (name, "bold"), f" ({side.source}) against ({made.graphs[made.baseline].source}) {made.baseline}: "
    )
    return text.append(conclusion(made, found), "bold " + _STYLES.get(found.verdict or Word.worse, ""))


def conclusion(made: AbReport, found: Comparison) -> str:
    """In words; which questions, and by how much."""
    better, worse = (
        ", ".join(
            f"{question} {change(answer)}" for question, answer in found.answers.items() if answer.verdict is word
        )
        for word in (Word.better, Word.worse)
    )
    if better and worse:
        return f"better in {better}; worse in {worse}"
    if better or worse:
        return f"{'better' if better else 'worse'}: {better or worse}"
    least = f"{made.minimum_effect:.3g}".rstrip()
    if found.verdict is Word.same:
        return f"no difference of {float(least):.1%} or more in anything"
    return str(Word.open)


def change(answer: Answer) -> str:
    """`-12.3 %`."""
    return "–" if answer.ratio is None else f"{100 * (answer.ratio - 1):+.1f} %"


def interval(answer: Answer) -> str:
    low, high = answer.ratio_interval
    return "–" if low is None or high is None else f"{100 * (low - 1):+.1f} … {100 * (high - 1):+.1f} %"


def _answers(made: AbReport, name: str, found: Comparison) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("", made.baseline, name, f"{name} to {made.baseline}", "interval", "verdict", "after"):
        table.add_column(title, justify="left" if title in ("", "verdict") else "right")
    for question, answer in found.answers.items():
        table.add_row(
            Text(question),
            seconds(answer.base),
            seconds(answer.other),
            change(answer),
            interval(answer),
            Text(answer.verdict, _STYLES[answer.verdict]),
            "" if answer.decided_at is None else str(answer.decided_at),
        )
    return table


def _worth(table: Table, made: AbReport, sides: Sequence[Side]) -> None:
    def row(title: str, cells: Sequence[str]) -> None:
        table.add_row(Text(title, "dim"), *cells)

    if any(made.promise.values()):
        limits = ", ".join(f"{key} ≤ {seconds(value)}" for key, value in made.promise.items() if value)
        row(f"kept {limits}", [f"{side.worth.good} of {side.requests}" for side in sides])
        row("goodput, requests/s", [_number(side.worth.goodput) for side in sides])
    if any(side.worth.cost for side in sides):
        row("cost", [f"{_range(side.worth.cost)} {side.worth.unit or ''}".strip() for side in sides])
        row("BCR", [_range(side.worth.bcr) for side in sides])
    for name, found in made.comparisons.items():
        texts = found.texts
        told = "–" if not texts.compared else f"{texts.equal} of {texts.compared} equal"
        if texts.similarity is not None and texts.similarity < 1:
            told += f", {texts.similarity:.0%} alike"
        row(f"answers of {name}", [told if side is made.graphs[name] else "" for side in sides])


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _range(value: tuple[float, float] | None) -> str:
    if value is None:
        return "–"
    low, high = value
    return f"{low:.4g}" if low == high else f"{low:.4g}–{high:.4g}"


def _method(made: AbReport) -> str:
    order = "all up at once" if made.together else "up in turn"
    asked = f"{made.requests} of {made.planned} requests" if made.stopped else f"{made.requests} requests"
    ended = f" ({made.stopped})" if made.stopped else ""
    looks = f"{len(made.looks)} look" + "s" * (len(made.looks) != 1)
    return (
        f"{asked}{ended}, {order}, in random order; sent by {'aiperf' if made.driver == 'aiperf' else 'pdd-runtime'}.\n"
        f"Intervals hold all at once, over every question and {looks}, with {1 - made.error:.1%} confidence. "
        f"Differences below {made.minimum_effect:.1%} do not count."
    )


def ab_warnings(made: AbReport) -> list[str]:
    """What may be wrong with the numbers, or with the graphs."""
    words = [word for name, side in made.graphs.items() for word in warnings(name, side)]
    if made.stopped and made.stopped not in ("interrupted", "every question has its verdict"):
        words.append(f"the test broke off: {made.stopped}")
    for name, found in made.comparisons.items():
        texts, failures = found.texts, found.failures
        if failures.p is not None and failures.p < made.error:
            which = name if failures.other_only > failures.base_only else made.baseline
            words.append(
                f"{which} fails more often: {failures.base_only} requests failed at {made.baseline} only, "
                f"{failures.other_only} at {name} only (p = {failures.p:.2g}); times are of those that both answered"
            )
        differ = texts.compared - texts.equal
        if texts.expected and differ:
            words.append(
                f"{differ} of {texts.compared} answers of {name} differ from {made.baseline}'s, from token "
                f"{texts.first_difference} on, though model and engines are the same"
            )
        elif texts.similarity is not None and texts.similarity < _ALIKE:
            words.append(
                f"{name} answers otherwise than {made.baseline}: {texts.equal} of {texts.compared} answers are equal, "
                f"{texts.similarity:.0%} of tokens alike; whether they are as good is another question"
            )
    return words
