"""A graph with API keys, HTTPS and a port for operators, by the commands of who runs it and by its users."""

from __future__ import annotations

import json
import subprocess
import sys

import httpx
import pytest

from tests.cli.shell import GRAPH, Cli, until
from tests.waiting import PATIENCE

DOORS = GRAPH.replace("{plugin: scripted}", "{plugin: scripted, config: {token_time: 0.01}}").replace(
    "frontend: {port: 0}",
    "frontend: {port: 0, keys: keys.jsonl, admin: {}, tls: {cert: certs/dc-a.pem, key: certs/dc-a.key}}",
)


@pytest.fixture(scope="module")
def keys(cli: Cli) -> dict[str, str]:
    """A graph is up; its keys by their owners."""
    made = {}
    for name, *limits in (["alice"], ["ops", "--admin"]):
        done = cli("keys", "add", name, *limits, "--format", "json")
        made[name] = str(json.loads(done.out)["key"])
    assert cli("certs", "init", "--name", "demo", "--cluster", "dc-a").code == 0
    done = cli("up", cli.write(DOORS), "-d", "--wait")
    assert done.code == 0, done.err
    assert "$PDD_API_KEY" in done.out
    return made


def client(url: str, key: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=url, headers=headers, verify=False, timeout=PATIENCE)


@pytest.fixture(scope="module")
def urls(cli: Cli, keys: dict[str, str]) -> tuple[str, str]:
    """Of users and of operators."""
    head, operators, *_ = cli("ps").out.splitlines()
    return next(word for word in head.split() if word.startswith("https://")), operators.split()[-1]


def test_its_own_commands_need_no_key(cli: Cli, keys: dict[str, str]) -> None:
    asked = json.loads(cli("ask", "Why?", "--max-tokens", "5", "--format", "json").out)
    assert asked["timeline"]["finish_reason"] == "length"
    shown = json.loads(cli("timeline", asked["timeline"]["id"], "--format", "json").out)
    assert shown["id"] == asked["timeline"]["id"]
    checks = json.loads(cli("doctor", "demo", "--format", "json").out)["checks"]
    assert {check["status"] for check in checks if check["group"] == "running"} == {"ok"}


def test_users_and_operators_each_have_their_port(cli: Cli, keys: dict[str, str], urls: tuple[str, str]) -> None:
    users, operators = urls
    assert users != operators
    with client(users, keys["alice"]) as alice, client(operators, keys["ops"]) as ops:
        body = {"prompt": "x", "max_tokens": 2}
        assert alice.post("/v1/completions", json=body).status_code == 200
        assert [alice.get(path).status_code for path in ("/metrics", "/pdd/requests")] == [403, 403]
        assert [ops.get(path).status_code for path in ("/metrics", "/pdd/requests", "/ready")] == [200, 200, 200]
        assert ops.get("/pdd/requests").json()["requests"][0]["key"] == "alice"
    with client(operators, keys["alice"]) as alice:
        assert alice.post("/v1/completions", json=body).status_code == 404
    with client(users, keys["ops"]) as ops:
        assert ops.post("/v1/completions", json=body).status_code == 403
        assert ops.get("/metrics").status_code == 404


def test_cancel_ends_a_request(cli: Cli, keys: dict[str, str], urls: tuple[str, str]) -> None:
    users, operators = urls
    code = (
        "import httpx,sys;"
        f"r=httpx.post('{users}/v1/completions',json={{'prompt':'x','max_tokens':6000}},timeout=60,verify=False,"
        f"headers={{'authorization':'Bearer {keys['alice']}'}});"
        "print(r.status_code,r.json()['error']['code'])"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as user:
        with client(operators, keys["ops"]) as ops:

            def running() -> list[str]:
                listed = ops.get("/pdd/requests").json()["requests"]
                return [line["id"] for line in listed if line["status"] is None]

            until(running)
            (id,) = running()
            assert json.loads(cli("cancel", id, "--format", "json").out) == {"id": id, "cancelled": True}
        assert user.communicate()[0].split() == ["499", "cancelled_by_operator"]
    assert "(operator)" in json.loads(cli("timeline", id, "--format", "json").out)["error"]
    again = cli("cancel", id)
    assert (again.code, "it has ended" in again.err) == (1, True)


def test_a_removed_key_soon_opens_nothing_and_a_new_one_does(cli: Cli, urls: tuple[str, str]) -> None:
    users, _ = urls
    bob = json.loads(cli("keys", "add", "bob", "--format", "json").out)["key"]
    with client(users, bob) as http:
        until(lambda: http.get("/v1/models").status_code == 200)
        assert cli("keys", "remove", "bob").code == 0
        until(lambda: http.get("/v1/models").status_code == 401)
    names = [key["name"] for key in json.loads(cli("keys", "show", "--format", "json").out)]
    assert names == ["alice", "ops"]


def test_no_key_is_written_anywhere(cli: Cli, keys: dict[str, str], urls: tuple[str, str]) -> None:
    users, _ = urls
    with client(users, "pdd-wrong-key") as http:
        assert http.get("/v1/models").status_code == 401
    said = (
        cli("logs").out + cli("ps").out + cli("ps", "--format", "json").out + (cli.directory / "keys.jsonl").read_text()
    )
    for secret in (*keys.values(), "pdd-wrong-key", "pdd-operator-", cli.launcher()["secret"]):
        assert secret not in said
    assert "this API key is not known" in said


def test_a_file_of_keys_that_is_not_there_is_named(cli: Cli) -> None:
    name = cli.write(DOORS.replace("keys.jsonl", "no-such.jsonl").replace("demo", "other"), "other.yaml")
    done = cli("up", name, "-d", "--wait")
    assert done.code != 0
    assert "no-such.jsonl" in done.err
    assert "pdd-runtime keys add" in done.err
