from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from pdd_runtime.cli.doctor.host import size
from pdd_runtime.cli.doctor.network import network
from pdd_runtime.graph import Link
from tests.cli.shell import GRAPH, Cli, until

QUICKSTART = Path(__file__).parents[2] / "graphs" / "quickstart.yaml"
PDD = (
    QUICKSTART.read_text()
    .replace("plugin: llamacpp", "plugin: scripted")
    .replace("source: smollm2", "source: toy")
    .replace("port: 8000", "port: 0")
    .replace("{name: quickstart}", "{name: sick}")
)


def findings(out: str) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in json.loads(out)["checks"]}


def test_the_host_is_looked_at(cli: Cli) -> None:
    done = cli("doctor", "--format", "json")
    assert done.code == 0
    found = findings(done.out)
    assert {"system", "python", "pdd-runtime", "open files", "clock", "memory", "GPUs", "RDMA"} <= set(found)
    assert found["python"]["found"].startswith(f"Python {sys.version_info.major}.{sys.version_info.minor}.")
    assert re.match(r"\d+\.\d+\.\d+, fastapi \d", found["pdd-runtime"]["found"])
    assert {"MTU", "congestion control"} <= set(found)
    shown = cli("doctor")
    assert shown.code == 0
    assert "0 wrong" in shown.out.splitlines()[-1]


def test_a_broken_plugin_is_a_fault(cli: Cli) -> None:
    done = cli("doctor", "--format", "json", env={"PDD_PLUGINS": "scripted,none"})
    assert done.code == 1
    fault = next(check for check in json.loads(done.out)["checks"] if check["status"] == "fail")
    assert "not installed: none" in fault["found"]
    assert fault["fix"]


def test_a_graph_is_looked_at_before_it_runs(cli: Cli) -> None:
    done = cli("doctor", str(QUICKSTART), "--set", "spec.frontend.port=0", "--format", "json")
    assert done.code == 0
    found = findings(done.out)
    assert found["YAML"]["status"] == found["port"]["status"] == "ok"
    assert found["memory"]["found"].startswith("KV of up to 3 GiB (prefill 1 GiB, relay 1 GiB, main 1 GiB)")
    assert found["TCP buffers for wan"]["found"] == "200Mbit/s × 50ms, emulated: the sender paces itself"
    hungry = cli("doctor", str(QUICKSTART), "--set", "spec.pools.main.engine.config={kv_memory: 900TiB}")
    assert "fix: set a smaller kv_memory" in hungry.out
    native = cli("doctor", str(QUICKSTART.with_name("vllm-nixl.yaml")))
    assert "KV of up to" not in native.out, "it is in the servers alone"


def test_what_keeps_a_graph_from_running_is_told_with_its_place(cli: Cli) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = cli("doctor", cli.write(), "--set", f"spec.frontend.port={port}", "--format", "json")
    assert done.code == 1
    assert findings(done.out)["port"]["status"] == "fail"
    wrong = cli("doctor", "demo.yaml", "--set", "spec.pools.main.engine.plugin=scriptd", "--format", "json")
    assert wrong.code == 1
    assert findings(wrong.out)["--set spec.pools.main.engine.plugin=scriptd"]["status"] == "fail"
    assert cli("doctor", "demo.yaml", "--set", "spec.clusters={}").code == 2
    assert cli("doctor", "nobody").code == 3


def test_bytes_really_move_over_each_edge_of_a_running_graph(cli: Cli) -> None:
    assert cli("up", cli.write(PDD, "sick.yaml"), "--wait", "--format", "json").code == 0
    done = cli("doctor", "sick.yaml", "--format", "json")
    assert done.code == 0, done.out
    found = findings(done.out)
    assert found["probe"]["found"].startswith("route P-RLD-MD: ")
    for edge in ("prefill → relay (KV)", "prefill → main (KV)"):
        assert " crossed at " in found[edge]["found"]
    assert found["relay → main (tokens)"]["status"] == "ok"
    assert [found[name]["found"] for name in ("prefill/0", "relay/0", "main/0", "frontend/0")] == ["ready"] * 4
    # A process that is gone is found at once.
    relay = next(process for process in cli.ps("sick") if process["pool"] == "relay")
    os.kill(relay["pid"], signal.SIGKILL)
    until(lambda: next(p for p in cli.ps("sick") if p["pool"] == "relay")["epoch"] != relay["epoch"])
    found = findings(cli("doctor", "sick", "--no-probe", "--format", "json").out)
    assert "probe" not in found
    assert found["relay/0"]["status"] in ("warn", "fail")
    assert found["relay/0"]["fix"] == "pdd-runtime logs relay/0 -g sick"
    assert cli("down", "sick").code == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's settings")
def test_a_links_bandwidth_delay_product_is_held_against_the_kernels_buffers() -> None:
    def buffers(bandwidth: str, rtt: str) -> Any:
        link = Link.model_validate({"between": ["a", "b"], "bandwidth": bandwidth, "rtt": rtt})
        return next(check for check in network({"wan": link}) if check.name == "TCP buffers for wan")

    small = buffers("1Mbit/s", "1ms")
    assert (small.status, small.fix) == ("ok", "")
    large = buffers("400Gbit/s", "300ms")
    assert large.status == "warn"
    assert large.found.startswith("400Gbit/s × 0.3s is 14 GiB under way, 6.98 GiB of buffer for each of 4 streams; ")
    assert large.fix.startswith("sysctl -w net.ipv4.tcp_")


def test_sizes_have_three_figures() -> None:
    assert [size(count) for count in (0, 999, 1536, 40 * 2**20, 2.5 * 2**30)] == [
        *("0 B", "999 B", "1.5 KiB", "40 MiB", "2.5 GiB"),
    ]


def test_a_wrong_graph_has_no_doctor(cli: Cli) -> None:
    cli.write(GRAPH.replace("role: aggregated", "roll: aggregated"), "broken.yaml")
    assert cli("doctor", "broken.yaml").code == 2
