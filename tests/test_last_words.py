from __future__ import annotations

import pytest

from pdd_runtime.last_words import telling

ENGINE = """\
INFO 11-30 12:00:01 [api_server.py:10] starting
(EngineCore pid=7) ERROR [core:7] EngineCore failed to start.
(EngineCore pid=7) ERROR [core:7] Traceback (most recent call last):
(EngineCore pid=7) ERROR [core:7]   File "core.py", line 691, in run
(EngineCore pid=7) ERROR [core:7]     engine = Engine(config)
(EngineCore pid=7) ERROR [core:7] ValueError: no room for KV
(EngineCore pid=7) Process EngineCore:
(EngineCore pid=7) Traceback (most recent call last):
(EngineCore pid=7)   File "process.py", line 314, in _bootstrap
(EngineCore pid=7) ValueError: no room for KV
Traceback (most recent call last):
  File "api_server.py", line 9, in main
RuntimeError: Engine core initialization failed. See root cause above.
"""
CHAINED = """\
Traceback (most recent call last):
  File "a.py", line 1, in <module>
    b()
OSError: [Errno 28] No space left on device

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "a.py", line 3, in <module>
RuntimeError: cannot write
resource_tracker: there appear to be 1 leaked semaphores
"""
ABORTED = """\
loading
terminate called after throwing an instance of 'std::bad_alloc'
  what():  std::bad_alloc
"""
OURS = """\
12:00:00 ERROR pdd: a forward pass failed
Traceback (most recent call last):
  File "runner.py", line 3, in step
RuntimeError: lost
ERROR pdd: main/0 ends: 3 passes have failed
  why: RuntimeError: lost
  fix: see the log
"""
OURS_AND_MORE = """\
ERROR pdd: main/0 ends: it hangs
  why: in step
12:00:06 ERROR pdd: threads still run
"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (ENGINE, "(EngineCore pid=7) ERROR [core:7] ValueError: no room for KV"),
        (CHAINED, "OSError: [Errno 28] No space left on device"),
        (ABORTED, "terminate called after throwing an instance of 'std::bad_alloc'"),
        (OURS, "ERROR pdd: main/0 ends: 3 passes have failed — why: RuntimeError: lost — fix: see the log"),
        (OURS_AND_MORE, "ERROR pdd: main/0 ends: it hangs — why: in step"),
        ("loaded\n\nserving at 127.0.0.1:1\n", "serving at 127.0.0.1:1"),
        ("Traceback (most recent call last):\n  File", "File"),
        ("\n", ""),
    ],
    ids=["first of many processes", "cause of a chain", "C++", "ours", "ours and more", "no error", "cut", "nothing"],
)  # fmt: skip
def test_the_line_that_says_why_is_found(text: str, told: str) -> None:
    assert telling(text.splitlines()) == told
