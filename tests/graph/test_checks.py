from __future__ import annotations

import pytest

from pdd_runtime.errors import GraphError
from pdd_runtime.graph import GraphErrors, loads


def faults(text: str) -> list[str]:
    with pytest.raises(GraphError) as caught:
        loads(text, [], "g.yaml")
    return [str(error) for error in getattr(caught.value, "errors", (caught.value,))]


EDGES = """\
    - {from: prefill, to: relay, carries: kv, transport: {plugin: wire}}
    - {from: prefill, to: main, carries: kv, transport: {plugin: wire}, link: wan}
    - {from: relay, to: main, carries: tokens, link: wan}
"""


@pytest.mark.parametrize(
    ("old", "new", "messages"),
    [
        (
            "relay, cluster: dc-a",
            "relay, cluster: dca",
            [
                'g.yaml:15:35: there is no cluster "dca"\n  why: the clusters are: dc-a, dc-b, dc-c\n'
                '  fix: did you mean "dc-a"?'
            ],
        ),
        (
            "between: [dc-a, dc-c]",
            "between: [dc-a, tokyo]",
            [
                'g.yaml:12:27: there is no cluster "tokyo"\n  why: the clusters are: dc-a, dc-b, dc-c\n'
                "  fix: add it below spec.clusters, or name one that is there"
            ],
        ),
        (
            "from: relay, to: main",
            "from: relai, to: mian",
            [
                'g.yaml:20:14: there is no pool "relai"\n  why: the pools are: prefill, relay, main\n'
                '  fix: did you mean "relay"?',
                'g.yaml:20:25: there is no pool "mian"\n  why: the pools are: prefill, relay, main\n'
                '  fix: did you mean "main"?',
            ],
        ),
        (
            "tokens, link: wan",
            "tokens, link: lan",
            ['g.yaml:20:54: there is no link "lan"\n  why: the links are: wan, far\n  fix: did you mean "wan"?'],
        ),
        (
            "between: [dc-a, dc-c]",
            "between: [dc-c, dc-c]",
            [
                'g.yaml:12:20: link "far" joins dc-c with itself\n  why: inside a cluster the network needs no link\n'
                "  fix: name two clusters"
            ],
        ),
        (
            "between: [dc-a, dc-c]",
            "between: [dc-b, dc-a]",
            [
                'g.yaml:12:20: links "wan" and "far" both join dc-b and dc-a\n'
                "  why: a pair of clusters has one link, which all their traffic shares\n  fix: remove one of them"
            ],
        ),
        (
            "{from: relay, to: main, carries: tokens, link: wan}",
            "{from: relay, to: main, carries: tokens}",
            [
                "g.yaml:20:7: edge relay → main crosses from dc-a to dc-b and has no link\n"
                "  why: traffic between clusters goes over a declared link\n  fix: add link: wan"
            ],
        ),
        (
            "{plugin: wire}, link: wan",
            "{plugin: wire}, link: far",
            [
                'g.yaml:19:79: edge prefill → main crosses from dc-a to dc-b, but link "far" joins dc-a and dc-c\n'
                "  why: an edge crosses the link between the clusters of its two pools\n  fix: use link: wan"
            ],
        ),
        (
            "to: relay, carries: kv, transport: {plugin: wire}",
            "to: relay, carries: kv, transport: {plugin: wire}, link: wan",
            [
                'g.yaml:18:80: edge prefill → relay has link "wan", but both pools are in dc-a\n'
                "  why: links lie between clusters\n  fix: remove the link, or move a pool"
            ],
        ),
        (
            "carries: tokens, link",
            "carries: tokens, transport: {plugin: wire}, link",
            [
                "g.yaml:20:59: edge relay → main carries tokens and has a transport\n"
                "  why: tokens go over the message plane; a transport moves kv\n  fix: remove the transport"
            ],
        ),
        (
            "from: relay, to: main, carries: tokens",
            "from: prefill, to: main, carries: tokens",
            [
                'g.yaml:15:12: relay pool "relay" is on no route\n'
                "  why: it hands off to no main pool, and every route ends on main\n"
                "  fix: add an edge {from: relay, to: MAIN, carries: tokens}",
                "g.yaml:20:7: edge prefill → main carries tokens from a prefill pool to a main pool\n"
                "  why: kv goes prefill → relay, prefill → main and relay → main; tokens go relay → main\n"
                "  fix: set carries: kv",
            ],
        ),
        (
            "{from: relay, to: main, carries: tokens, link: wan}",
            "{from: main, to: relay, carries: tokens, link: wan}",
            [
                'g.yaml:15:12: relay pool "relay" is on no route\n'
                "  why: it hands off to no main pool, and every route ends on main\n"
                "  fix: add an edge {from: relay, to: MAIN, carries: tokens}",
                "g.yaml:20:7: edge main → relay carries tokens from a main pool to a relay pool\n"
                "  why: kv goes prefill → relay, prefill → main and relay → main; tokens go relay → main\n"
                "  fix: turn it round: {from: relay, to: main, carries: tokens}",
            ],
        ),
        (
            "{from: relay, to: main, carries: tokens, link: wan}",
            "{from: relay, to: relay, carries: tokens}",
            [
                'g.yaml:15:12: relay pool "relay" is on no route\n'
                "  why: it hands off to no main pool, and every route ends on main\n"
                "  fix: add an edge {from: relay, to: MAIN, carries: tokens}",
                'g.yaml:20:7: pool "relay" feeds itself\n'
                "  why: what a pool has made is in it already\n  fix: remove the edge, or name another pool",
            ],
        ),
        (
            EDGES,
            EDGES + "    - {from: relay, to: main, carries: tokens, link: wan}\n",
            [
                "g.yaml:21:7: edge relay → main carrying tokens is there twice\n  why: spec.edges.2 says the same\n"
                "  fix: remove one of them"
            ],
        ),
        (
            "relay, cluster: dc-a",
            "relay, cluster: dc-c",
            [
                "g.yaml:18:7: edge prefill → relay crosses from dc-a to dc-c and has no link\n"
                "  why: traffic between clusters goes over a declared link\n  fix: add link: far",
                'g.yaml:18:7: relay pool "relay" is in dc-c, but its prefill pool "prefill" is in dc-a\n'
                "  why: a relay decodes while the KV crosses to main; behind the same link it would wait just as long\n"
                "  fix: put the relay pool into dc-a, or leave the relay out",
                'g.yaml:20:54: edge relay → main crosses from dc-c to dc-b, but link "wan" joins dc-a and dc-b\n'
                "  why: an edge crosses the link between the clusters of its two pools\n"
                "  fix: declare a link between dc-c and dc-b",
            ],
        ),
        (
            "    - {from: prefill, to: main, carries: kv, transport: {plugin: wire}, link: wan}\n",
            "",
            [
                "g.yaml:18:5: no request can be served: no whole route\n"
                "  why: a route is an aggregated pool, or a prefill pool that feeds a main pool with kv\n"
                "  fix: add an edge {from: PREFILL, to: MAIN, carries: kv, transport: …}"
            ],
        ),
        (
            "  edges:\n",
            "    spare: {role: main, cluster: dc-b, engine: {plugin: some}}\n  edges:\n",
            [
                'g.yaml:17:12: main pool "spare" is on no route\n  why: no prefill pool feeds it with kv\n'
                "  fix: add an edge {from: PREFILL, to: spare, carries: kv, transport: …}"
            ],
        ),
        (
            "  edges:\n",
            "    more: {role: prefill, cluster: dc-a, engine: {plugin: some}}\n  edges:\n",
            [
                'g.yaml:17:11: prefill pool "more" is on no route\n'
                "  why: it feeds no main pool with kv, and every route ends on main\n"
                "  fix: add an edge {from: more, to: MAIN, carries: kv, transport: …}"
            ],
        ),
        (
            "    - {from: prefill, to: relay, carries: kv, transport: {plugin: wire}}\n",
            "",
            [
                'g.yaml:15:12: relay pool "relay" is on no route\n  why: no prefill pool feeds it with kv\n'
                "  fix: add an edge {from: PREFILL, to: relay, carries: kv, transport: …}"
            ],
        ),
        (
            "  edges:\n",
            "    solo: {role: aggregated, cluster: dc-a, engine: {plugin: some}}\n  edges:\n"
            "    - {from: prefill, to: solo, carries: kv, transport: {plugin: wire}}\n",
            [
                "g.yaml:19:7: edge prefill → solo joins an aggregated pool\n"
                "  why: an aggregated pool prefills and decodes on its own; nothing feeds it, and it feeds nothing\n"
                "  fix: remove the edge, or change the pool's role"
            ],
        ),
        (
            "  edges:\n",
            "    frontend: {role: aggregated, cluster: dc-a, engine: {plugin: some}}\n  edges:\n",
            [
                'g.yaml:17:5: no pool can be called "frontend"\n'
                "  why: the frontend is a process of its own in every graph, listed beside the pools\n"
                "  fix: give the pool another name"
            ],
        ),
        (
            "  model: {source: tiny}\n",
            "  model: {source: tiny}\n  frontend: {cluster: dc-c}\n",
            [
                'g.yaml:17:11: no link joins dc-c, where the frontend stands, and dc-b, where pool "main" is\n'
                "  why: the frontend drives every session: it sends tokens to each pool\n"
                "  fix: declare that link, or move the frontend with spec.frontend.cluster"
            ],
        ),
        (
            "main: {role: main, cluster: dc-b, ",
            "main: {role: main, cluster: dc-b, model: {source: tiny, mode: exact}, ",
            [
                'g.yaml:16:67: pools "prefill" and "main" do not compute the same model: mode is fast and exact\n'
                "  why: kv of the one would mean something else to the other, which refuses it\n"
                "  fix: set spec.model for all pools; a pool's own `model` replaces it whole",
            ],
        ),
        (
            "relay: {role: relay, cluster: dc-a, ",
            "relay: {role: relay, cluster: dc-a, model: {source: small}, ",
            [
                'g.yaml:15:57: pools "prefill" and "relay" do not compute the same model: source is tiny and small\n'
                "  why: kv of the one would mean something else to the other, which refuses it\n"
                "  fix: set spec.model for all pools; a pool's own `model` replaces it whole",
            ],
        ),
    ],
)
def test_what_no_single_key_shows_is_found(pdd: str, old: str, new: str, messages: list[str]) -> None:
    assert pdd.count(old) == 1
    assert faults(pdd.replace(old, new)) == messages
    assert all("\n  why: " in message and "\n  fix: " in message for message in messages)


def test_kv_of_another_dtype_is_converted_but_not_in_exact_mode(pdd: str) -> None:
    main = "main: {role: main, cluster: dc-b, "
    text = pdd.replace(main, f"{main}model: {{source: tiny, dtype: bfloat16}}, ")
    loads(text)
    (fault,) = faults(text.replace("model: {source: tiny", "model: {mode: exact, source: tiny"))
    assert "dtype is float32 and bfloat16" in fault


def test_a_relay_must_share_its_prefills_main(pdd: str) -> None:
    text = pdd.replace(
        "  edges:\n",
        "    other: {role: main, cluster: dc-b, engine: {plugin: some}}\n"
        "    source: {role: prefill, cluster: dc-a, engine: {plugin: some}}\n"
        "  edges:\n"
        "    - {from: source, to: other, carries: kv, transport: {plugin: wire}, link: wan}\n",
    ).replace("from: relay, to: main", "from: relay, to: other")
    assert faults(text) == [
        'g.yaml:15:12: relay pool "relay" is on no route\n'
        "  why: no prefill pool feeds both it and the main pool that it hands off to\n"
        "  fix: add an edge {from: prefill, to: other, carries: kv, transport: …}"
    ]


def test_an_aggregated_pool_alone_is_a_route(pdd: str) -> None:
    head, _, _ = pdd.partition("  pools:\n")
    graph = loads(head + "  pools:\n    solo: {role: aggregated, cluster: dc-b, engine: {plugin: some}}\n").graph
    assert graph.frontend_cluster == "dc-b"


def test_a_frontend_stands_in_each_of_its_clusters(pdd: str) -> None:
    def graph(clusters: str) -> str:
        return pdd.replace("  edges:\n", f"  frontend: {{replicas: 2, cluster: {clusters}}}\n  edges:\n")

    loaded = loads(graph("[dc-b, dc-a]")).graph
    assert loaded.frontend_clusters == ("dc-b", "dc-a")
    assert loaded.frontends == ("dc-b", "dc-b", "dc-a", "dc-a")
    assert loads(graph("dc-b")).graph.frontends == ("dc-b", "dc-b")
    (twice,) = faults(graph("[dc-a, dc-a]"))
    assert "the frontend stands in dc-a twice" in twice
    (nowhere,) = faults(graph("[dc-a, dc-x]"))
    assert 'there is no cluster "dc-x"' in nowhere
    (cut_off,) = faults(graph("[dc-a, dc-c]"))
    assert 'no link joins dc-c, where a frontend stands, and dc-b, where pool "main" is' in cut_off


def test_many_pools_of_a_role_feed_many(pdd: str) -> None:
    text = pdd.replace(
        "  edges:\n",
        "    main-2: {role: main, cluster: dc-c, engine: {plugin: some}}\n  edges:\n"
        "    - {from: prefill, to: main-2, carries: kv, transport: {plugin: wire}, link: far}\n"
        "    - {from: relay, to: main-2, carries: tokens, link: far}\n",
    )
    assert len(loads(text).graph.spec.edges) == 5


def test_names_are_told_before_what_builds_on_them(pdd: str) -> None:
    with pytest.raises(GraphErrors) as caught:
        loads(pdd.replace("cluster: dc-a", "cluster: dc-x"))
    assert all("there is no cluster" in error.what for error in caught.value.errors)


def test_two_engines_may_call_a_model_by_two_names(pdd: str) -> None:
    old = "main: {role: main, cluster: dc-b, engine: {plugin: some}}"
    assert old in pdd
    loads(pdd.replace(old, "main: {role: main, cluster: dc-b, engine: {plugin: other}, model: {source: tiny-hf}}"))
