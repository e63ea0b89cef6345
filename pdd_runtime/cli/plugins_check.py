"""`pdd-runtime plugins check`."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from pdd_runtime.cli.console import FAILED, OK, Consoles, plain
from pdd_runtime.plugins import load_plugins
from pdd_runtime.testing.checking import Checked, Report, check
from pdd_runtime.testing.suite_run import Case


def plugins_check(distribution: str, as_json: bool, consoles: Consoles) -> int:
    """Run the conformance suites over what `distribution` registers, and report. Returns the exit code."""
    with consoles.err.status(f"checking {distribution}") as status:
        done = 0

        def show(checked: Checked, case: Case) -> None:
            nonlocal done
            done += 1
            status.update(f"checking {checked.entry.kind.noun} {checked.entry.name}: {done} tests run")

        report = check(distribution, load_plugins(), show)
    if as_json:
        consoles.json(_as_json(report))
    else:
        _print(report, consoles)
    return OK if report.ok else FAILED


def _print(report: Report, consoles: Consoles) -> None:
    consoles.out.print(Text(f"{report.distribution} {report.version}", "bold"))
    for problem in report.problems:
        consoles.error(problem)
    for checked in report.classes:
        consoles.out.print(_line(checked))
        if checked.not_run is not None:
            for word, sentence in (("why", checked.not_run.why), ("fix", checked.not_run.fix)):
                consoles.out.print(Text(f"    {word}: {sentence}", "dim"))
        for case in checked.cases:
            if case.outcome == "failed":
                consoles.out.print(Text(f"    failed: {case.test}", "red"))
                consoles.out.print(Text("".join(f"      {line}\n" for line in plain(case.why).splitlines()), end=""))
        for why in dict.fromkeys(case.why for case in checked.cases if case.outcome == "skipped"):
            tests = [case.test for case in checked.cases if case.outcome == "skipped" and case.why == why]
            consoles.out.print(Text(f"    skipped: {', '.join(tests)}: {plain(why)}", "dim"))
    verdict = "it keeps its contracts" if report.ok else "it does not pass"
    consoles.out.print(Text(f"{report.distribution}: {verdict}", "green" if report.ok else "bold red"))


def _line(checked: Checked) -> Text:
    entry = checked.entry
    mark, style = ("✓", "green") if checked.ok else ("?", "yellow") if checked.not_run is not None else ("✗", "red")
    text = Text(f"  {mark} ", style).append(f"{entry.kind.noun} {entry.name}", "default").append(": ", "default")
    if checked.not_run is not None:
        return text.append(f"not checked: {checked.not_run.what}", "default")
    counts = [f"{n} {outcome}" for outcome in ("passed", "failed", "skipped") if (n := checked.count(outcome))] or [
        "no test ran"
    ]
    seconds = sum(case.seconds for case in checked.cases)
    return text.append(f"{', '.join(counts)} in {seconds:.1f} s, with {checked.by}", "default")


def _as_json(report: Report) -> dict[str, Any]:
    return {
        "distribution": report.distribution,
        "version": report.version,
        "ok": report.ok,
        "problems": [problem.to_wire() for problem in report.problems],
        "classes": [
            {
                "kind": checked.entry.kind.noun,
                "name": checked.entry.name,
                "class": f"{checked.entry.cls.__module__}.{checked.entry.cls.__qualname__}",
                "ok": checked.ok,
                "by": checked.by,
                "not_run": None if checked.not_run is None else checked.not_run.to_wire(),
                **{outcome: checked.count(outcome) for outcome in ("passed", "failed", "skipped")},
                "tests": [
                    {"test": case.test, "outcome": case.outcome, "seconds": round(case.seconds, 3), "why": case.why}
                    for case in checked.cases
                ],
            }
            for checked in report.classes
        ],
    }
