from __future__ import annotations

import pytest

from pdd_runtime.errors import EngineError
from pdd_runtime.server.version import check_tried


@pytest.mark.parametrize("version", ["1.2.0", "1.2.7.post1"])
def test_what_was_tried_is_driven(version: str) -> None:
    check_tried("toy", version, ("1.1.", "1.2."), "here")


@pytest.mark.parametrize("version", ["1.20.0", "0.1.2.", ""])
def test_any_other_is_refused_by_name(version: str) -> None:
    with pytest.raises(EngineError, match=f"toy {version or 'of an unknown version'} was not tried"):
        check_tried("toy", version, ("1.1.", "1.2."), "here")
