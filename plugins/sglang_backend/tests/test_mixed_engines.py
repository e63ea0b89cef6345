"""Prefill and relay on SGLang, main on vLLM: one model's weights, and the tokens of one plain SGLang server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from . import sglang_graph
from .sglang_graph import PROMPTS, ROUTES, Fleet, ask

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    vllm = pytest.importorskip("pdd_vllm.testing")
    config = vllm.settings().model_dump(mode="json", exclude_unset=True)
    engines = {"prefill": sglang_graph.sglang(), "relay": sglang_graph.sglang()}
    engines["main"] = {"plugin": "vllm", "config": config}
    with sglang_graph.fleet(tmp_path_factory.mktemp("mixed"), engines) as fleet:
        yield fleet


@pytest.mark.parametrize("route", ROUTES)
async def test_vllm_goes_on_where_sglang_began(fleet: Fleet, route: str) -> None:
    loaded, computed = came(fleet, "external_kv_transfer"), came(fleet, "local_compute")
    async with fleet.stack.driver(*ROUTES[route]) as driver:
        answers = await asyncio.gather(*(ask(fleet, driver, prompt, route) for prompt in PROMPTS.values()))
    assert {n: answer.ids for n, answer in zip(PROMPTS, answers, strict=True)} == fleet.expected
    for answer in answers:
        assert answer.timeline["route"] == route.partition(",")[0], answer.timeline["reason"]
        assert answer.timeline["tokens"]["main"] > 0
    await fleet.stack.idle()
    assert came(fleet, "external_kv_transfer") - loaded >= sum(PROMPTS)
    known = sum(answer.timeline["tokens"]["prefill"] + answer.timeline["tokens"]["relay"] for answer in answers)
    # Between two extends vLLM keeps whole pages alone: each computes the last page's tokens anew.
    most = sum(PROMPTS) / 4 if "catch-up" in route else known
    assert came(fleet, "local_compute") - computed <= most, "vLLM computed what SGLang had computed"


def came(fleet: Fleet, source: str) -> float:
    """Tokens of prompts at main, by where their KV came from."""
    return fleet.count("main", "vllm:prompt_tokens_by_source_total", source=source)
