"""The one clock: seconds, monotonic, never set back."""

from __future__ import annotations

import time

now = time.monotonic
