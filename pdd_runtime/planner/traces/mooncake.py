"""Mooncake's traces: a JSON object a line with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, the
ids of the prompt's blocks of 512 tokens (FAST '25 release)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from pdd_runtime.planner.traces.chains import Chains
from pdd_runtime.planner.traces.lines import Count, decoded, lines
from pdd_runtime.planner.traces.recorded import Asked, Recorded

BLOCK = 512
_FORM = '{"timestamp": MS, "input_length": N, "output_length": N, "hash_ids": [ID, …]} on each line'


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Count
    output_length: Count
    hash_ids: list[int]


def read(path: Path) -> Iterator[Recorded]:
    """Each request is a session of its own."""
    decoder, chains = msgspec.json.Decoder(_Line), Chains(BLOCK)
    for number, text in enumerate(lines(path)):
        if not text.strip():
            continue
        line = decoded(decoder, text, f"{path}:{number + 1}", _FORM)
        prompt = max(1, line.input_length)
        spans = chains.spans(line.hash_ids, prompt, number)
        yield Recorded(line.timestamp / 1000, (Asked(prompt, max(1, line.output_length), 0.0, spans),))
