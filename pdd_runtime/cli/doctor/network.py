"""Whether the kernel's TCP can fill the links of a graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from pdd_runtime.cli.doctor.check import Check, first_line
from pdd_runtime.cli.doctor.host import size
from pdd_runtime.graph import Link
from pdd_runtime.graph.units import write_bandwidth, write_duration

_IPV4 = "/proc/sys/net/ipv4"
_ETHERNET = 1500
_LARGEST = 2**31 - 1
"""Bytes that the kernel lets a buffer have."""
_FAR = 0.005
"""Seconds there and back from which on a link is a WAN here."""


def network(links: Mapping[str, Link]) -> Iterator[Check]:
    """`links` are those of the graph; an emulated one asks nothing of the kernel."""
    real = {name: link for name, link in links.items() if not link.emulate}
    yield _mtu(crossed=bool(real))
    yield _congestion(any(link.rtt >= _FAR for link in real.values()))
    if any(link.rtt >= _FAR for link in real.values()):
        yield _idle()
    for name, link in links.items():
        yield _buffers(name, link)


def _mtu(*, crossed: bool) -> Check:
    found: dict[str, int] = {}
    for path in sorted(Path("/sys/class/net").glob("*")):
        mtu, state = first_line(f"{path}/mtu"), first_line(f"{path}/operstate")
        if path.name != "lo" and state == "up" and mtu.isdecimal():
            found[path.name] = int(mtu)
    if not found:
        return Check("network", "MTU", "ok", "no interface is up but loopback")
    shown = ", ".join(f"{name} {mtu}" for name, mtu in found.items())
    small = [name for name, mtu in found.items() if mtu < _ETHERNET]
    if small and crossed:
        fix = f"ip link set {small[0]} mtu {_ETHERNET}, unless a tunnel needs it so"
        return Check("network", "MTU", "warn", shown, fix)
    return Check("network", "MTU", "ok", shown)


def _congestion(far: bool) -> Check:
    used = first_line(f"{_IPV4}/tcp_congestion_control")
    known = first_line(f"{_IPV4}/tcp_available_congestion_control").split()
    if not used:
        return Check("network", "congestion control", "ok", "not known on this system")
    found = f"{used} (here: {', '.join(known)})"
    if used == "bbr" or not far:
        return Check("network", "congestion control", "ok", found)
    load = "" if "bbr" in known else "modprobe tcp_bbr && "
    fix = f"{load}sysctl -w net.ipv4.tcp_congestion_control=bbr: with loss, {used} leaves most of a far link empty"
    return Check("network", "congestion control", "warn", found, fix)


def _idle() -> Check:
    if first_line(f"{_IPV4}/tcp_slow_start_after_idle") == "1":
        fix = "sysctl -w net.ipv4.tcp_slow_start_after_idle=0: KV comes in bursts, and each would begin slowly"
        return Check("network", "slow start after idle", "warn", "on", fix)
    return Check("network", "slow start after idle", "ok", "off")


def _buffers(name: str, link: Link) -> Check:
    """A connection has at most a buffer of bytes on its way. Of a receive buffer about half holds payload
    (`tcp_adv_win_scale`), so each of the link's streams wants twice its share of the bandwidth-delay product."""
    title = f"TCP buffers for {name}"
    about = f"{write_bandwidth(link.bandwidth)} × {write_duration(link.rtt)}"
    if link.emulate:
        return Check("network", title, "ok", f"{about}, emulated: the sender paces itself")
    product = link.bandwidth / 8 * link.rtt
    needed = 2 * product / link.streams
    limits = {kind: first_line(f"{_IPV4}/tcp_{kind}").split() for kind in ("rmem", "wmem")}
    most = {kind: int(words[2]) for kind, words in limits.items() if len(words) == 3}
    found = f"{about} is {size(product)} under way, {size(needed)} of buffer for each of {link.streams} streams"
    small = {kind: limit for kind, limit in most.items() if limit < needed}
    if not small:
        return Check("network", title, "ok", found)
    have = ", ".join(f"tcp_{kind} ends at {size(limit)}" for kind, limit in small.items())
    sysctls = " ".join(
        f'net.ipv4.tcp_{kind}="{limits[kind][0]} {limits[kind][1]} {min(int(needed), _LARGEST)}"' for kind in small
    )
    return Check("network", title, "warn", f"{found}; {have}", f"sysctl -w {sysctls}, or more streams on the link")
