"""This computer: versions, limits, clock, memory, devices."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from pdd_runtime.cli.doctor.check import Check, Status, first_line
from pdd_runtime.plugins import PluginManager

_FILES_FEW, _FILES_GOOD = 256, 4096
"""Open files a process may have: a frontend needs one for each client, and a few for each worker."""
_SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")
_NVIDIA_SMI = 10.0
"""Seconds it may take: the first call wakes the driver."""


def host(plugins: PluginManager) -> Iterator[Check]:
    yield from _versions(plugins)
    yield _files()
    yield _clock()
    yield _memory()
    yield gpus()
    yield _rdma()


def _versions(plugins: PluginManager) -> Iterator[Check]:
    system = f"{platform.system()} {platform.release()}, {os.cpu_count() or '?'} CPUs"
    yield Check("host", "system", "ok", system)
    yield Check("host", "python", "ok", f"Python {platform.python_version()}")
    distributions = {entry.origin.distribution: entry.origin.version for entry in plugins.registered}
    for name, number in sorted(distributions.items()):
        yield Check("host", name, "ok", ", ".join([number, *_needs(name)]))
    for problem in plugins.problems:
        why = f": {problem.why}" if problem.why else ""
        yield Check("host", "plugins", "fail", f"{problem.what}{why}", problem.fix)


def _needs(distribution: str) -> Iterator[str]:
    """What a distribution is built on, as it is installed here."""
    for requirement in requires(distribution) or ():
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        if "extra ==" not in requirement and not name.startswith("pdd"):
            with suppress(PackageNotFoundError):
                yield f"{name} {version(name)}"


def _files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    status: Status = "ok" if unlimited or soft >= _FILES_GOOD else "warn" if soft >= _FILES_FEW else "fail"
    fix = "" if status == "ok" else f"ulimit -n {min(65536, hard) if hard != resource.RLIM_INFINITY else 65536}"
    found = "a process may open any number" if unlimited else f"a process may open {soft}"
    return Check("host", "open files", status, found, fix)


def _clock() -> Check:
    source = first_line("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    cost = min(_reading() for _ in range(10))
    found = f"{source or 'source unknown'}, {cost * 1e9:.0f} ns a reading, steps of "
    found += f"{time.get_clock_info('monotonic').resolution * 1e9:.0f} ns"
    if source in _SLOW_CLOCKS:
        fix = "boot with a TSC that the kernel trusts: every token reads the clock"
        return Check("host", "clock", "warn", found, fix)
    return Check("host", "clock", "ok", found)


def _reading() -> float:
    """Seconds that one look at the clock takes."""
    begun = time.perf_counter()
    for _ in range(100):
        time.monotonic()
    return (time.perf_counter() - begun) / 100


def available_memory() -> int | None:
    """Bytes that processes here can still get; None: not known."""
    found: list[int] = []
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) << 10)
    except (OSError, KeyError, ValueError, IndexError):
        pass
    limit, used = first_line("/sys/fs/cgroup/memory.max"), first_line("/sys/fs/cgroup/memory.current")
    if limit.isdecimal() and used.isdecimal():
        found.append(max(0, int(limit) - int(used)))
    return min(found) if found else None


def _memory() -> Check:
    free = available_memory()
    if free is None:
        return Check("host", "memory", "ok", "how much is free is not known here")
    return Check("host", "memory", "ok", f"{size(free)} free")


def size(count: float) -> str:
    """Bytes to three figures."""
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def gpus() -> Check:
    devices = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    if not devices and not Path("/dev/kfd").exists():
        return Check("host", "GPUs", "ok", "none: engines compute on the CPU")
    if devices and shutil.which("nvidia-smi"):
        try:
            done = subprocess.run(
                ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"],
                capture_output=True, text=True, timeout=_NVIDIA_SMI, check=True,
            )  # fmt: skip
            return Check("host", "GPUs", "ok", "; ".join(done.stdout.strip().splitlines()))
        except (OSError, subprocess.SubprocessError) as error:
            fix = "see whether the driver is loaded, and whether this user may use it"
            return Check("host", "GPUs", "warn", f"{', '.join(devices)}, but nvidia-smi failed: {error}", fix)
    return Check("host", "GPUs", "ok", ", ".join(devices) or "an AMD GPU (/dev/kfd)")


def _rdma() -> Check:
    try:
        devices = sorted(path.name for path in Path("/sys/class/infiniband").iterdir())
    except OSError:
        devices = []
    usable = f"{', '.join(devices)}: edges may have transport rdma"
    return Check("host", "RDMA", "ok", usable if devices else "no device: KV goes over TCP")
