"""A model and a context of llama.cpp, as far as the runner needs them: arrays in, arrays out."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, c_int8, c_int32, c_void_p
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdd_llamacpp.library import Batch, library
from pdd_llamacpp.log import complaints
from pdd_llamacpp.state import Bytes
from pdd_runtime.errors import EngineError

Logits = NDArray[np.float32]

_FLASH_ATTENTION = 1
_NO_MEMORY = -2
"""What llama_decode returns where it could not allocate what a batch needs."""
_ROPES: dict[int, Literal["interleaved", "half"]] = {0: "interleaved", 2: "half"}
"""Which elements of K are turned together, by llama.cpp's number."""


class Model:
    """The weights of a GGUF file, mapped: processes share their pages."""

    def __init__(self, path: Path) -> None:
        """Raises `EngineError` where llama.cpp cannot load it, or its KV is not one key and one value a token."""
        self._api = api = library()
        with complaints() as why:
            self.handle = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
        if not self.handle:
            raise EngineError("llama.cpp cannot load the model", where=str(path), why="; ".join(why))
        self.vocab = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.handle)))
        self.context = int(api.llama_model_n_ctx_train(self.handle))
        self.kv_heads = int(api.llama_model_n_head_kv(self.handle))
        unusual = {
            "recurrent layers": api.llama_model_is_recurrent(self.handle) or api.llama_model_is_hybrid(self.handle),
            "sliding windows": api.llama_model_n_swa(self.handle) > 0,
            "an encoder": api.llama_model_has_encoder(self.handle),
            "rotary positions of another kind": api.llama_model_rope_type(self.handle) not in _ROPES,
        }
        if any(unusual.values()):
            self.close()
            raise EngineError(
                f"a model with {' and '.join(what for what, is_so in unusual.items() if is_so)} is not supported",
                where=str(path),
                why="blocks of KV hold one key and one value for every token and layer",
                fix="use another model",
            )
        self.rope = _ROPES[api.llama_model_rope_type(self.handle)]

    def close(self) -> None:
        """Idempotent; its contexts must be closed before."""
        handle, self.handle = self.handle, None
        self._api.llama_model_free(handle)


class Part(NamedTuple):
    """One sequence's tokens in a batch."""

    sequence: int
    tokens: Sequence[int]
    start: int
    """Position of the first."""
    samples: bool
    """Whether the logits behind the last one are wanted."""


class Context:
    """Cells that hold the KV of sequences, which are numbers below `sequences`. A cell may be in several."""

    def __init__(self, model: Model, *, cells: int, batch: int, sequences: int, kind: int, threads: int) -> None:
        """`batch`: tokens of the longest batch. `kind`: ggml's number of the number format of K and V. Raises
        `EngineError`."""
        self._api, self._vocab = model._api, model.vocab
        params = self._api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = cells, batch, batch
        params.n_seq_max = params.n_outputs_max = sequences
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = kind
        params.flash_attn_type, params.kv_unified = _FLASH_ATTENTION, True
        with complaints() as why:
            self._handle = self._api.llama_init_from_model(model.handle, params)
        if not self._handle:
            raise EngineError(f"llama.cpp cannot make a context of {cells} cells", why="; ".join(why))
        self._memory = self._api.llama_get_memory(self._handle)

    def decode(self, parts: Sequence[Part]) -> list[Logits | None]:
        """Compute the KV of all parts in one pass. Returns for each the logits behind its last token, `[vocab]`, which
        the next call overwrites. Raises `EngineError` and `MemoryError`; what the cells of these sequences hold is then
        unknown."""
        lengths = [len(part.tokens) for part in parts]
        last = np.cumsum(lengths) - 1
        tokens = np.concatenate([np.asarray(part.tokens, np.int32) for part in parts])
        starts = np.array([part.start for part in parts], np.int32)
        positions = np.arange(len(tokens), dtype=np.int32) + np.repeat(starts - (last + 1 - lengths), lengths)
        positions = positions.astype(np.int32)
        sequences = np.repeat(np.array([part.sequence for part in parts], np.int32), lengths)
        pointers = sequences.ctypes.data + 4 * np.arange(len(tokens), dtype=np.uintp)
        counts = np.ones(len(tokens), np.int32)
        wanted = np.zeros(len(tokens), np.int8)
        wanted[last] = [part.samples for part in parts]
        batch = Batch(
            n_tokens=len(tokens),
            token=tokens.ctypes.data_as(POINTER(c_int32)),
            pos=positions.ctypes.data_as(POINTER(c_int32)),
            n_seq_id=counts.ctypes.data_as(POINTER(c_int32)),
            seq_id=pointers.ctypes.data_as(POINTER(c_void_p)),
            logits=wanted.ctypes.data_as(POINTER(c_int8)),
        )
        with complaints() as why:
            status = self._api.llama_decode(self._handle, batch)
        if status == _NO_MEMORY:
            raise MemoryError("; ".join(("llama_decode found no memory", *why)))
        if status:
            raise EngineError(f"llama_decode returned {status}", why="; ".join(why))
        return [self._logits(at) if part.samples else None for at, part in zip(last.tolist(), parts, strict=True)]

    def _logits(self, at: int) -> Logits:
        return np.ctypeslib.as_array(self._api.llama_get_logits_ith(self._handle, at), (self._vocab,))

    def share(self, source: int, target: int, start: int = -1, end: int = -1) -> None:
        """The cells of `source` at positions [start, end), or all, are `target`'s as well."""
        self._api.llama_memory_seq_cp(self._memory, source, target, start, end)

    def forget(self, sequence: int) -> None:
        """A cell that is in no other sequence is free."""
        self._api.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def read(self, sequence: int) -> Bytes:
        """The state of a sequence."""
        state = np.empty(self._api.llama_state_seq_get_size(self._handle, sequence), np.uint8)
        if self._api.llama_state_seq_get_data(self._handle, state.ctypes.data, len(state), sequence) != len(state):
            raise EngineError("llama.cpp gave no sequence state")
        return state

    def write(self, sequence: int, state: Bytes) -> None:
        """Make this the state of the sequence, whatever it had before. Raises `EngineError`, and it has none."""
        with complaints() as why:
            taken = self._api.llama_state_seq_set_data(self._handle, state.ctypes.data, len(state), sequence)
        if taken != len(state):
            raise EngineError("llama.cpp takes a sequence state not", why="; ".join(why))

    def close(self) -> None:
        """Idempotent."""
        handle, self._handle = self._handle, None
        self._api.llama_free(handle)
