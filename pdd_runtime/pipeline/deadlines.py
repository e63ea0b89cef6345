"""How long a session waits for what, in seconds. Generous: a slow CPU on a long prompt is no fault."""

from __future__ import annotations

PREFILL = 600.0
"""For the next part of a prompt to be prefilled, time in the worker's queue included."""
FETCH = 600.0
"""For the prompt's KV to be somewhere else, time in which prefill makes it included."""
EXTEND = 600.0
"""For known tokens to be extended before a decode; the whole prompt where its KV could not be moved."""
TOKEN = 120.0
"""From one token to the next."""
CHANGE = 660.0
"""For anything at all to change in a session that waits for its other parts. Above all of theirs: theirs say more."""
NOTICED = 5.0
"""For an engine to notice that what it offered was read; the offer is closed then."""
DEATH = 1.0
"""For a worker's death to be told by its connection, where one who read from it has told already that it stopped."""
CALL = 10.0
"""For a short answer, such as to a seal."""
CONNECT = 5.0
"""For a worker to take a connection."""
WORKER = 600.0
"""For a first worker to be there, with its model loaded."""
LOOK = 0.1
"""Between two looks at a worker that is silent, and at who could take its place."""
FIRST_PAUSE, LAST_PAUSE = 0.1, 2.0
"""Before a session asks a worker again that has failed it; doubled with every failure."""
