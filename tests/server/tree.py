"""A server of several processes, as engines are: `python tree.py PIDS_FILE [stubborn]`. One child shares its group, one
has a session of its own, and one is a daemon that nobody is the parent of."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def sleep(file: Path) -> None:
    with file.open("a") as pids:
        pids.write(f"{os.getpid()}\n")
    while True:
        time.sleep(60)


def main() -> None:
    file = Path(sys.argv[1])
    if "stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    if os.fork() == 0:
        sleep(file)
    if os.fork() == 0:
        os.setsid()
        sleep(file)
    if (between := os.fork()) == 0:
        if os.fork() == 0:
            os.setsid()
            sleep(file)
        os._exit(0)
    os.waitpid(between, 0)
    print("started", flush=True)
    sleep(file)


main()
