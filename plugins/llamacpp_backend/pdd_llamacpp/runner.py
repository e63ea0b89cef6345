"""The model in its thread: blocks in, one batch through llama.cpp, blocks out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pdd_llamacpp.config import LlamaCppConfig
from pdd_llamacpp.context import Context, Logits, Model, Part
from pdd_llamacpp.state import StateFormat
from pdd_runtime.errors import EngineError
from pdd_runtime.inprocess import Chunk, Runner, fingerprint
from pdd_runtime.kv import KvLayout
from pdd_runtime.kv.layout import DTYPE_BYTES
from pdd_runtime.models.gguf_file import GgufFile
from pdd_runtime.models.source import find_model, hash_files
from pdd_runtime.models.tokenizer import from_gguf
from pdd_runtime.plugins.engine import ModelSpec

_KINDS = {"float32": 0, "float16": 1, "bfloat16": 30}
"""ggml's numbers of number formats."""
_PIECE = 512
"""Tokens copied into llama.cpp at once: what a copy needs of memory besides."""


class Held(NamedTuple):
    """A sequence in the cells."""

    number: int
    """Its name there."""
    tokens: int
    """How many, from its beginning."""


class LlamaCppRunner(Runner):
    """Blocks are the truth. llama.cpp's cells hold a copy of the KV of the sequences that are being computed."""

    def __init__(self, config: LlamaCppConfig, spec: ModelSpec) -> None:
        self._config = config
        self.name, path = find_model(spec.source)
        if path.is_dir():
            raise EngineError(
                f"{path} is a directory",
                why="llama.cpp reads models in GGUF files",
                fix="name a .gguf file in spec.model.source, or use another engine",
            )
        self.tokenizer = from_gguf(GgufFile(path).metadata, str(path))
        self.fingerprint = fingerprint(hash_files([path]), spec, "llamacpp")
        self._model = Model(path)
        self.vocab = self._model.vocab
        self.context = min(self._model.context, config.context_length or self._model.context)
        self._format = self._probe()
        self.layout = KvLayout(
            layers=self._format.layers,
            kv_heads=self._model.kv_heads,
            head_dim=self._format.row // DTYPE_BYTES[config.kv_dtype] // self._model.kv_heads,
            dtype=config.kv_dtype,
            block_size=config.block_size,
            rope=self._model.rope,
        )
        self._context: Context | None = None
        self._held: dict[int, Held] = {}
        """What is in the cells, by sequence; the one used longest ago comes first."""
        self._numbers = list(range(config.batch_limit))
        """Those that no sequence has."""
        self._transit = config.batch_limit
        """The number of what is on its way between cells and blocks."""

    def open(self, memory: memoryview) -> None:
        layout = self.layout
        shape = (-1, layout.layers, 2, layout.block_size, self._format.row)
        self._blocks = np.frombuffer(memory, np.uint8).reshape(shape)
        longest = min(self.context, len(self._blocks) * layout.block_size)
        self._cells = self._config.cells or longest
        if self._cells < longest:
            raise EngineError(
                f"cells: {self._cells} are too few",
                why=f"a sequence may have {longest} tokens",
                fix="raise cells, or lower context_length",
            )
        self._context = self._new_context(self._cells, self._config.token_budget)

    def step(self, chunks: Sequence[Chunk]) -> list[Logits | None]:
        results: list[Logits | None] = []
        for group in self._groups(chunks):
            results += self._compute(group)
        return results

    def forget(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            held = self._held.pop(sequence, None)
            if held is not None:
                self._open_context.forget(held.number)
                self._numbers.append(held.number)

    def close(self) -> None:
        if self._context is not None:
            self._context.close()
        self._model.close()

    @property
    def _open_context(self) -> Context:
        assert self._context is not None, "open comes before step"
        return self._context

    def _new_context(self, cells: int, batch: int) -> Context:
        return Context(
            self._model,
            cells=cells,
            batch=batch,
            sequences=self._config.batch_limit + 1,
            kind=_KINDS[self._config.kv_dtype],
            threads=self._config.threads,
        )

    def _probe(self) -> StateFormat:
        """How this model's states look, by one of a single token."""
        context = self._new_context(1, 1)
        try:
            context.decode([Part(0, (0,), 0, samples=False)])
            return StateFormat.of(context.read(0))
        finally:
            context.close()

    def _groups(self, chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
        """In order, as many at once as the cells hold."""
        group: list[Chunk] = []
        for chunk in chunks:
            if group and sum(other.end for other in group) + chunk.end > self._cells:
                yield group
                group = []
            group.append(chunk)
        yield group

    def _compute(self, chunks: Sequence[Chunk]) -> list[Logits | None]:
        self._make_room(chunks)
        try:
            parts = [Part(self.bring(chunk), chunk.tokens, chunk.start, chunk.samples) for chunk in chunks]
            logits = self._open_context.decode(parts)
            for chunk, part in zip(chunks, parts, strict=True):
                self.save(chunk, part.sequence)
        except Exception:
            self.forget([chunk.sequence for chunk in chunks])
            self._open_context.forget(self._transit)
            raise
        return [None if row is None else row.copy() for row in logits]

    def _make_room(self, chunks: Sequence[Chunk]) -> None:
        """What is not computed now gives its cells back, the one used longest ago first, until the chunks fit."""
        ours = {chunk.sequence for chunk in chunks}
        others = {sequence: held.tokens for sequence, held in self._held.items() if sequence not in ours}
        room = self._cells - sum(chunk.end for chunk in chunks) - sum(others.values())
        for sequence, tokens in others.items():
            if room >= 0:
                return
            self.forget([sequence])
            room += tokens

    def bring(self, chunk: Chunk) -> int:
        """Have the KV before a chunk in the cells; returns the number it has there."""
        held = self._held.get(chunk.sequence)
        if held is not None and held.tokens == chunk.start:
            return held.number
        self.forget([chunk.sequence])
        number = self._numbers.pop()
        self._held[chunk.sequence] = Held(number, chunk.start)
        for start in range(0, chunk.start, _PIECE):
            state = self._format.pack(self._blocks, chunk.blocks, start, min(start + _PIECE, chunk.start))
            self._open_context.write(self._transit, state)
            self._open_context.share(self._transit, number)
            self._open_context.forget(self._transit)
        return number

    def save(self, chunk: Chunk, number: int) -> None:
        """Write the KV of a chunk into its blocks."""
        self._open_context.share(number, self._transit, chunk.start, chunk.end)
        state = self._open_context.read(self._transit)
        self._open_context.forget(self._transit)
        self._format.unpack(state, self._blocks, chunk.blocks, chunk.start, chunk.end)
        self._held.pop(chunk.sequence)
        self._held[chunk.sequence] = Held(number, chunk.end)
