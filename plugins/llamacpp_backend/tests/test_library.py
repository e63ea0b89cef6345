from __future__ import annotations

import ctypes
import logging
from importlib import metadata

import pytest
from pdd_llamacpp import library as module
from pdd_llamacpp.library import RELEASE, ContextParams, ModelParams, library
from pdd_llamacpp.log import complaints, receive

from pdd_runtime.errors import EngineError

load = library.__wrapped__
"""Without what an earlier test has loaded."""


def test_the_pinned_release_has_the_structs_that_are_known() -> None:
    api = load()
    assert api.llama_context_default_params().n_ctx == 512


def test_another_release_is_refused_with_both_versions_and_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "version", lambda name: "2027.1.1")
    with pytest.raises(EngineError, match=rf"xllamacpp 2027\.1\.1 is installed.* knows {RELEASE}") as caught:
        load()
    assert caught.value.fix == f"pip install xllamacpp=={RELEASE}"


def test_a_build_for_an_accelerator_is_the_same_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "version", lambda name: f"{RELEASE}+cu124")
    load()


def test_none_is_told_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(module, "version", missing)
    with pytest.raises(EngineError, match="not installed") as caught:
        load()
    assert caught.value.fix == f"pip install xllamacpp=={RELEASE}"


@pytest.mark.parametrize("name", [name for name, _ in ModelParams._fields_])
def test_a_default_that_moved_in_the_model_s_struct_is_noticed(name: str) -> None:
    check_notices(module.library().llama_model_default_params(), module._MODEL_DEFAULTS, name)


@pytest.mark.parametrize("name", [name for name, _ in ContextParams._fields_])
def test_a_default_that_moved_in_the_context_s_struct_is_noticed(name: str) -> None:
    check_notices(module.library().llama_context_default_params(), module._CONTEXT_DEFAULTS, name)


def check_notices(params: ctypes.Structure, defaults: dict[str, object], name: str) -> None:
    module._check(params, defaults)
    value = getattr(params, name)
    if isinstance(value, ctypes.Array):
        value[1] = 1
    else:
        setattr(params, name, not value if isinstance(value, bool) else (value or 0) + 7)
    with pytest.raises(EngineError, match=rf"{type(params).__name__}\.{name} is .* by default"):
        module._check(params, defaults)


def test_its_chatter_is_quiet_and_its_errors_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "pdd_llamacpp"), complaints() as lines:
        receive(2, b"llama_model_loader: - tensor 0\n", None)
        receive(5, b".", None)
        receive(4, b"it is \xff broken\n", None)
    assert lines == ["it is � broken"]
    levels = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert levels == [(logging.DEBUG, "llama_model_loader: - tensor 0"), (logging.ERROR, "it is � broken")]
