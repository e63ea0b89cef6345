"""What the command prints with: two consoles, and errors as people read them."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pdd_runtime.errors import GraphError, LaunchError, PddError, PluginError

OK, FAILED, USAGE, NOT_RUNNING, ALREADY_RUNNING = 0, 1, 2, 3, 4
"""Exit codes; docs/cli.md explains them."""
# By the errors' codes: importing their classes, and all that launches graphs, would be felt at every TAB.
_CODES = {"not-running": NOT_RUNNING, "already-running": ALREADY_RUNNING}


_WIDTH = 160
"""Of what is no terminal."""


class SeveralGraphsError(LaunchError):
    """A command that means one graph found several."""

    code = "several-graphs"


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    if hasattr(stream, "reconfigure"):
        # A terminal that cannot show an arrow gets a question mark, not a crash.
        stream.reconfigure(errors="replace")
    # rich heeds NO_COLOR, FORCE_COLOR and TERM, and prints plain text where stdout is no terminal. Long lines are
    # left whole there: a log or a grep wants them so.
    tty = stream.isatty()
    return Console(stderr=stderr, highlight=False, soft_wrap=not tty, width=None if tty else _WIDTH)


class Consoles:
    """Made when a command runs, so that a redirected stream is the one used."""

    def __init__(self) -> None:
        self.out, self.err = _console(stderr=False), _console(stderr=True)

    def json(self, value: Any) -> None:
        self.out.out(json.dumps(value, indent=2, ensure_ascii=False), highlight=False)

    def error(self, error: PddError) -> None:
        for one in getattr(error, "errors", ()) or (error,):
            self.err.print(_told(one, "error", "bold red"))

    def warning(self, warning: PddError) -> None:
        self.err.print(_told(warning, "warning", "bold yellow"))

    @contextmanager
    def busy(self, doing: str) -> Iterator[None]:
        """On a terminal a spinner, so that nobody wonders; nothing elsewhere."""
        if self.err.is_terminal:
            with self.err.status(doing):
                yield
        else:
            yield


def exit_code(error: PddError) -> int:
    if error.code in _CODES:
        return _CODES[error.code]
    return USAGE if isinstance(error, (GraphError, PluginError, SeveralGraphsError)) else FAILED


def plain(text: str) -> str:
    """Text from a model or a log, without what could move a terminal's cursor or worse."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else "" for c in text)


def _told(error: PddError, kind: str, style: str) -> Text:
    text = Text()
    if error.where:
        text.append(f"{error.where}: ", "bold")
    text.append(f"{kind}: ", style).append(plain(error.what), "bold")
    text.append(_excerpt(error.where), "dim")
    for word, sentence in (("why", error.why), ("fix", error.fix)):
        if sentence:
            text.append(f"\n  {word}: ", "cyan" if word == "why" else "green").append(plain(sentence))
    return text


def _excerpt(where: str) -> str:
    """The line of the file that an error is about, with a caret; empty where `where` is something else."""
    name, _, column = where.rpartition(":")
    name, _, line = name.rpartition(":")
    if not (line.isdecimal() and column.isdecimal()):
        return ""
    try:
        shown = Path(name).read_text().splitlines()[int(line) - 1]
    except (OSError, ValueError, IndexError):
        return ""
    # Not above: importing what reads graphs would be felt at every TAB.
    from pdd_runtime.graph.secrets import in_line

    margin = f"{line:>5} | "
    return f"\n{margin}{in_line(plain(shown))}\n{' ' * (len(margin) - 2)}| {' ' * (int(column) - 1)}^"


def raise_first(errors: Sequence[PddError], consoles: Consoles) -> None:
    """Print all but the last, and raise that; nothing for none."""
    for error in errors[:-1]:
        consoles.error(error)
    if errors:
        raise errors[-1]
