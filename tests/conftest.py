from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-identity",
        action="store_true",
        help="token identity on the real model for every prompt, strategy and handoff point (about an hour)",
    )
