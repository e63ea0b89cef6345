from __future__ import annotations

from pathlib import Path

import pytest

from pdd_runtime.cli.ask import question
from pdd_runtime.errors import RequestError


def test_a_question_is_the_text_itself() -> None:
    assert question("Why? @home") == "Why? @home"


def test_a_question_behind_an_at_sign_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "q.txt"
    path.write_text("Warum?\nDarum: 漢字\n", encoding="utf-8")
    assert question(f"@{path}") == "Warum?\nDarum: 漢字"


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "q.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RequestError) as told:
        question(f"@{path}")
    assert told.value.where == str(path)
    assert told.value.why
    assert "UTF-8" in told.value.fix
