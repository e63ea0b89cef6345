"""What a request's variant goes by, and what a frontend counts and says of variants."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from pdd_runtime.errors import NoRoute, RequestError
from pdd_runtime.frontend.app import create_app
from pdd_runtime.frontend.experiment import Experiment
from pdd_runtime.frontend.requests import ChatRequest, CompletionRequest
from pdd_runtime.frontend.service import Service
from pdd_runtime.frontend.sticky import BEGINNING, sticky_key
from pdd_runtime.graph import Graph, loads
from pdd_runtime.observe import Timeline, Timelines
from pdd_runtime.observe.pace import Pace
from pdd_runtime.pipeline import Driver, Finish, SessionRequest
from pdd_runtime.pipeline.decisions import Journal
from pdd_runtime.plugins.engine import Sampling
from tests.frontend.conftest import GivenDriver

TEXT = """
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {name: split}
spec:
  model: {source: toy}
  clusters: {dc: {}}
  pools: {a: {role: aggregated, cluster: dc, engine: {plugin: scripted}}}
  variants: {a: {weight: 1}, b: {weight: 1}}
  experiment: {guardrails: {requests: 10}}
"""
SYSTEM = {"role": "system", "content": "Be terse."}


def graph(*overrides: str) -> Graph:
    return loads(TEXT, list(overrides)).graph


def session(tokens: int = 300, tenant: str = "", id: str = "req-1") -> SessionRequest:
    return SessionRequest(id=id, tokens=tuple(range(1, tokens + 1)), max_tokens=4, sampling=Sampling(), tenant=tenant)


def chat(*turns: str, **more: Any) -> ChatRequest:
    roles = ("user", "assistant")
    messages = [SYSTEM, *({"role": roles[i % 2], "content": text} for i, text in enumerate(turns))]
    return ChatRequest.model_validate({"messages": messages, **more})


def key(*sticky: str, asked: Any = None, tenant: str = "", headers: tuple[tuple[bytes, bytes], ...] = ()) -> str:
    return sticky_key(sticky, asked or chat("hi"), session(tenant=tenant), headers)


def test_every_turn_of_a_conversation_has_the_same_key() -> None:
    first, second = chat("hi"), chat("hi", "hello", "how are you?")
    assert key("conversation", asked=first) == key("conversation", asked=second)
    assert key("conversation", asked=first) != key("conversation", asked=chat("ho"))


def test_of_a_plain_prompt_the_beginning_counts() -> None:
    asked = CompletionRequest.model_validate({"prompt": "x"})

    def of(tokens: int) -> str:
        return sticky_key(("conversation",), asked, session(tokens), ())

    assert of(BEGINNING) == of(BEGINNING + 100) != of(BEGINNING - 1)


def test_the_first_that_a_request_has_counts() -> None:
    headers = ((b"x-session", b"s1"),)
    order = ("header X-Session", "user", "key", "conversation")
    assert key(*order, asked=chat("hi", user="u"), tenant="t", headers=headers) == "header X-Session\0t\0s1"
    assert key(*order, asked=chat("hi", user="u"), tenant="t") == "user\0t\0u"
    assert key(*order, tenant="t") == "key\0t\0t"
    assert key(*order).startswith("conversation\0\0")


def test_users_of_different_tenants_are_different() -> None:
    assert key("user", asked=chat("hi", user="u"), tenant="t") != key("user", asked=chat("hi", user="u"), tenant="v")


def test_one_that_has_nothing_to_go_by_goes_by_itself() -> None:
    assert key("user", "key") == "req-1"
    assert sticky_key((), chat("hi"), session(id="req-2"), ()) == "req-2"


def ended(experiment: Experiment, variant: str, count: int, status: int = 200, elsewhere: str = "") -> None:
    for _ in range(count):
        timeline, pace = Timeline("r", "split", 7, variant=variant), Pace(0.0)
        if elsewhere:
            error = NoRoute("none") if elsewhere == "failed" else RequestError("cannot")
            timeline.leaves_variant(error, "a")
        pace.sent(1, 0.5)
        experiment.ended(timeline, status, 1.0, pace)


def test_what_others_served_counts_as_failed_unless_it_could_never_have_been_served() -> None:
    experiment = Experiment(graph(), Journal())
    ended(experiment, "b", 3)
    ended(experiment, "b", 2, elsewhere="failed")
    ended(experiment, "b", 4, elsewhere="incapable")
    tally = experiment.seen()["b"].whole.whole()
    assert (tally.requests, tally.failed, tally.elsewhere, tally.ttft.count) == (5, 2, 2, 3)


def test_a_guardrail_names_the_variant_and_not_the_control_nor_one_that_is_out() -> None:
    experiment = Experiment(graph(), Journal())
    ended(experiment, "a", 50)
    ended(experiment, "b", 50, status=500)
    assert [name for name, _ in experiment.worse(experiment.seen())] == ["b"]
    experiment.decide("rollback", ("b",), "guardrail", "bad")
    assert list(experiment.worse(experiment.seen())) == []
    control = Experiment(graph("spec.experiment.control=b"), Journal())
    ended(control, "a", 50)
    ended(control, "b", 50, status=500)
    assert list(control.worse(control.seen())) == []


def test_what_was_bad_before_a_variant_is_resumed_does_not_count_again() -> None:
    experiment = Experiment(graph(), Journal())
    ended(experiment, "a", 50)
    ended(experiment, "b", 50, status=500)
    experiment.decide("abort", ("b",), "operator")
    experiment.decide("resume", ("b",), "operator")
    assert list(experiment.worse(experiment.seen())) == []
    assert experiment.seen()["b"].whole.whole().failed == 50


def test_a_second_process_rolls_back_nothing_that_is_out_already(tmp_path: Path) -> None:
    one, other = Experiment(graph(), Journal(tmp_path / "v")), Experiment(graph(), Journal(tmp_path / "v"))
    assert len(one.decide("rollback", ("b",), "guardrail")) == 1
    assert other.decide("rollback", ("b",), "guardrail") == ()
    assert other.weights == one.weights == {"a": 1.0, "b": 0.0}


def test_a_process_that_starts_says_what_is_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Experiment.of(graph(), tmp_path)
    assert first is not None
    first.decide("rollback", ("b",), "guardrail", "it was slow")
    with caplog.at_level(logging.WARNING):
        second = Experiment.of(graph(), tmp_path)
    assert second is not None
    assert second.share("a") == 1.0
    assert "variant b: rolled back" in caplog.text
    assert "it was slow" in caplog.text
    # With other settings it is another variant.
    third = Experiment.of(graph("spec.variants.b.handoff={plugin: one-shot}"), tmp_path)
    assert third is not None
    assert third.share("a") == 0.5


def test_a_graph_without_variants_has_no_experiment(tmp_path: Path) -> None:
    assert Experiment.of(graph("spec.variants={}", "spec.experiment={}"), tmp_path) is None


def http(experiment: Experiment | None, *script: object) -> httpx.AsyncClient:
    service = Service(cast(Driver, GivenDriver(*script)), Timelines(), None, experiment)
    return httpx.AsyncClient(transport=httpx.ASGITransport(create_app(service)), base_url="http://here")


async def test_an_answer_says_its_variant_also_when_it_is_an_error() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    experiment = Experiment(graph(), Journal())
    async with http(experiment, b"ab", Finish("length", 0)) as client:
        answer = await client.post("/v1/chat/completions", json=body | {"n": 3})
        assert answer.status_code == 200
        assert answer.headers["x-pdd-variant"] in ("a", "b")
    async with http(experiment, NoRoute("nobody")) as client:
        refused = await client.post("/v1/chat/completions", json=body)
        assert refused.status_code == 503
        assert refused.headers["x-pdd-variant"] == answer.headers["x-pdd-variant"]


async def test_a_graph_without_variants_says_nothing_of_them() -> None:
    async with http(None, b"ab", Finish("length", 0)) as client:
        answer = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
        assert answer.status_code == 200
        assert "x-pdd-variant" not in answer.headers
        assert (await client.get("/pdd/variants")).status_code == 404
        assert "variant" not in (await client.get("/metrics")).text


async def test_operators_see_the_numbers_and_what_is_wrong_with_the_comparison() -> None:
    experiment = Experiment(graph(), Journal())
    ended(experiment, "a", 120)
    async with http(experiment) as client:
        body = (await client.get("/pdd/variants")).json()
        a, b = body["variants"]
        assert (a["requests"], a["share"], a["against_control"]) == (120, 0.5, None)
        assert a["ttft"]["p90"] == pytest.approx(0.5, rel=0.01)
        assert b["against_control"] == dict.fromkeys(("failed", "ttft_p90", "tpot_p90", "gap_p90", "e2e_p90"))
        assert body["notes"] == [
            "b has had none of the last 120 requests, and 50% of the weight: they are all alike in what the split goes "
            "by (conversation)"
        ]
        body = (await client.post("/pdd/variants", json={"do": "promote", "variant": "b", "why": "so"})).json()
        assert [each["share"] for each in body["variants"]] == [0.0, 1.0]
        assert body["decisions"][0]["why"] == "so"
        assert "no guardrail acts" in json.dumps(body["notes"])
