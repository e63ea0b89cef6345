"""What is done with the package's answers: others stand in for them, but in one test that needs it."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from pdd_runtime.planner.figures import FigureError
from pdd_runtime.planner.latency import Aiconfigurator, AiconfiguratorConfig, Roofline, RooflineConfig, aiconfigurator
from pdd_runtime.planner.latency.grid_cache import ROOT

CONFIG = AiconfiguratorConfig(hardware="8xh200", model="deepseek-ai/DeepSeek-V3", kv_bits=8)
TRUTH = Roofline(RooflineConfig(hardware="8xh200", model="deepseek-v3", kv_bits=8))


class Kernels:
    """`wrong` changes what a roofline says of a step, or of a pass."""

    asked = 0

    def __init__(self, wrong: Callable[[str, int, int], float]) -> None:
        self._wrong = wrong

    def predict_prefill_latency(self, bs: int, isl: int, prefix: int = 0) -> float:
        Kernels.asked += 1
        return 1e3 * TRUTH.prefill(isl - prefix, prefix) * self._wrong("pass", isl - prefix, prefix)

    def predict_decode_latency(self, bs: int, isl: int, osl: int = 2) -> float:
        Kernels.asked += 1
        return 1e3 * TRUTH.decode(bs, isl) * self._wrong("step", bs, isl)


Stand = Callable[[Callable[[str, int, int], float]], None]


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stand:
    """Let a package answer that is wrong by these factors."""
    monkeypatch.setenv(ROOT, str(tmp_path))
    monkeypatch.setattr(aiconfigurator, "version", lambda package: "0.12.0")

    def take(wrong: Callable[[str, int, int], float]) -> None:
        monkeypatch.setattr(aiconfigurator, "compile_kernels", lambda config: Kernels(wrong))

    return take


def right(what: str, number: int, context: int) -> float:
    return 1.0


def test_its_answers_are_those_of_the_package(stand: Stand) -> None:
    stand(lambda what, number, context: 1.5)
    model = Aiconfigurator(CONFIG)
    assert model.prefill(1024, 4096) == pytest.approx(1.5 * TRUTH.prefill(1024, 4096))
    assert model.decode(64, 16_384) == pytest.approx(1.5 * TRUTH.decode(64, 16_384))
    assert (model.kv_constant, model.kv_token) == (0, 35136)
    assert model.capacity(1) == TRUTH.capacity(1)
    assert model.source == ("aiconfigurator-core 0.12.0: kernels of sglang, deepseek-ai/DeepSeek-V3 on 8xh200")


def test_a_grid_is_asked_for_once(stand: Stand, tmp_path: Path) -> None:
    stand(right)
    Kernels.asked = 0
    first = Aiconfigurator(CONFIG)
    asked = Kernels.asked
    assert asked > 0
    assert Aiconfigurator(CONFIG).decode(3, 999) == first.decode(3, 999)
    assert Kernels.asked == asked
    # Not where anything is set otherwise, nor where what was kept is damaged.
    Aiconfigurator(CONFIG.model_copy(update={"backend": "vllm"}))
    assert Kernels.asked == 2 * asked
    for file in (tmp_path / "latency").iterdir():
        file.write_text("{")
    Aiconfigurator(CONFIG)
    assert Kernels.asked == 3 * asked


def test_where_nothing_can_be_kept_it_is_asked_each_time(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(ROOT, str(tmp_path / "file"))
    stand(right)
    Kernels.asked = 0
    Aiconfigurator(CONFIG)
    asked = Kernels.asked
    Aiconfigurator(CONFIG)
    assert Kernels.asked == 2 * asked


@pytest.mark.parametrize(
    ("factor", "cell", "told"),
    [
        (14.0, ("step", 64, 65_536), "a step of 64 sequences of 65536 in "),
        (0.1, ("step", 256, 1024), "a step of 256 sequences of 1024 in "),
        (20.0, ("pass", 8192, 0), "a pass over 8192 tokens behind 0 in "),
    ],
)
def test_answers_that_no_roofline_believes_are_told(
    stand: Stand, factor: float, cell: tuple[str, int, int], told: str
) -> None:
    stand(lambda *asked: factor if asked == cell else 1.0)
    with pytest.raises(FigureError) as caught:
        Aiconfigurator(CONFIG)
    assert caught.value.what == (
        "1 of aiconfigurator-core's answers for deepseek-ai/DeepSeek-V3 on 8xh200 cannot be right"
    )
    assert caught.value.why.startswith(told)
    assert Aiconfigurator(CONFIG.model_copy(update={"trust": True})).decode(1, 0) > 0


def test_a_few_tokens_behind_many_take_at_least_a_step(stand: Stand) -> None:
    """As if no KV had to be read for them: what version 0.12 says of prefill."""
    stand(lambda what, number, context: 0.3 if (what, number, context) == ("pass", 1, 131_072) else 1.0)
    model = Aiconfigurator(CONFIG)
    assert model.prefill(1, 131_072) >= model.decode(1, 131_072) * (1 - 1e-9)


def test_weights_that_do_not_fit_are_told(stand: Stand) -> None:
    stand(right)
    with pytest.raises(FigureError, match="does not fit on 8xh100"):
        Aiconfigurator(AiconfiguratorConfig(hardware="8xh100", model="deepseek-ai/DeepSeek-V4-Pro"))


def test_a_chip_that_the_package_does_not_know_is_told() -> None:
    with pytest.raises(FigureError, match=r"aiconfigurator-core knows no mi300x\n.*\n.*take a roofline"):
        aiconfigurator.compile_kernels(AiconfiguratorConfig(hardware="8xmi300x", model="deepseek-ai/DeepSeek-V3"))


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(aiconfigurator, "version", none)
    with pytest.raises(FigureError) as caught:
        Aiconfigurator(CONFIG)
    assert "pip install 'pdd-runtime[aiconfigurator]'" in caught.value.fix


@pytest.mark.skipif(not aiconfigurator.installed(), reason="aiconfigurator-core is not installed")
def test_the_package_itself_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ROOT, str(tmp_path))
    model = Aiconfigurator(AiconfiguratorConfig(hardware="h100", model="meta-llama/Meta-Llama-3.1-8B", backend="vllm"))
    roofline = Roofline(RooflineConfig(hardware="h100", model="llama-3.1-8b"))
    assert model.prefill(8192, 0) == pytest.approx(roofline.prefill(8192, 0), rel=0.25)
    assert model.decode(64, 8192) == pytest.approx(roofline.decode(64, 8192), rel=0.25)
    with pytest.raises(FigureError, match="cannot tell of nobody/none on h100 with sglang"):
        aiconfigurator.compile_kernels(AiconfiguratorConfig(hardware="h100", model="nobody/none"))
