"""llama.cpp's C API, as the extension module of one xllamacpp wheel exports it: only the functions that are used.

Its structs change between releases without notice, so the release is pinned, and what it says of its own defaults is
compared with what this file knows before anything else is called.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Mapping
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int8, c_int32, c_size_t, c_uint32, c_void_p
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pdd_llamacpp.log import MESSAGE, receive
from pdd_runtime.errors import EngineError

RELEASE = "2026.10.11549"
"""The version of xllamacpp whose structs and sequence states this package knows."""
_FIX = f"pip install xllamacpp=={RELEASE}"


class ModelParams(ctypes.Structure):
    _fields_ = (
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int32),
        ("load_mode", c_int32),
        ("lazy_mode", c_int32),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    )


class ContextParams(ctypes.Structure):
    _fields_ = (
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("ctx_type", c_int32),
        ("rope_scaling_type", c_int32),
        ("pooling_type", c_int32),
        ("attention_type", c_int32),
        ("flash_attn_type", c_int32),
        ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float),
        ("yarn_ext_factor", c_float),
        ("yarn_attn_factor", c_float),
        ("yarn_beta_fast", c_float),
        ("yarn_beta_slow", c_float),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int32),
        ("type_v", c_int32),
        ("abort_callbacks", c_void_p * 3),
        ("embeddings", c_bool),
        ("offload_kqv", c_bool),
        ("no_perf", c_bool),
        ("op_offload", c_bool),
        ("swa_full", c_bool),
        ("kv_unified", c_bool),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    )


class Batch(ctypes.Structure):
    """Arrays of `n_tokens`; `seq_id` points to one array for each token."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", c_void_p),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(c_void_p)),
        ("logits", POINTER(c_int8)),
    )


_MODEL_DEFAULTS = {"n_gpu_layers": -1, "split_mode": 1, "load_mode": -1, "lazy_mode": 1, "use_extra_bufts": True}
_CONTEXT_DEFAULTS = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_outputs_max_per_seq": 1,
    "n_threads": 4,
    "n_threads_batch": 4,
    **dict.fromkeys(("rope_scaling_type", "pooling_type", "attention_type", "flash_attn_type"), -1),
    **dict.fromkeys(("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow", "defrag_thold"), -1.0),
    "type_k": 1,
    "type_v": 1,
    **dict.fromkeys(("offload_kqv", "no_perf", "op_offload", "swa_full"), True),
}

_HANDLE, _SEQUENCE, _POSITION = c_void_p, c_int32, c_int32
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    # name: (result, arguments…)
    "llama_log_set": (None, MESSAGE, c_void_p),
    "llama_backend_init": (None,),
    "llama_model_default_params": (ModelParams,),
    "llama_context_default_params": (ContextParams,),
    "llama_model_load_from_file": (_HANDLE, c_char_p, ModelParams),
    "llama_model_free": (None, _HANDLE),
    "llama_model_n_ctx_train": (c_int32, _HANDLE),
    "llama_model_n_head_kv": (c_int32, _HANDLE),
    "llama_model_n_swa": (c_int32, _HANDLE),
    "llama_model_is_recurrent": (c_bool, _HANDLE),
    "llama_model_is_hybrid": (c_bool, _HANDLE),
    "llama_model_has_encoder": (c_bool, _HANDLE),
    "llama_model_rope_type": (c_int32, _HANDLE),
    "llama_model_get_vocab": (_HANDLE, _HANDLE),
    "llama_vocab_n_tokens": (c_int32, _HANDLE),
    "llama_init_from_model": (_HANDLE, _HANDLE, ContextParams),
    "llama_free": (None, _HANDLE),
    "llama_get_memory": (_HANDLE, _HANDLE),
    "llama_decode": (c_int32, _HANDLE, Batch),
    "llama_get_logits_ith": (POINTER(c_float), _HANDLE, c_int32),
    "llama_memory_seq_rm": (c_bool, _HANDLE, _SEQUENCE, _POSITION, _POSITION),
    "llama_memory_seq_cp": (None, _HANDLE, _SEQUENCE, _SEQUENCE, _POSITION, _POSITION),
    "llama_state_seq_get_size": (c_size_t, _HANDLE, _SEQUENCE),
    "llama_state_seq_get_data": (c_size_t, _HANDLE, c_void_p, c_size_t, _SEQUENCE),
    "llama_state_seq_set_data": (c_size_t, _HANDLE, c_void_p, c_size_t, _SEQUENCE),
}


@cache
def library() -> ctypes.CDLL:
    """The API, ready to be called; its functions have the types of `_FUNCTIONS`. Raises `EngineError` where it is
    missing, or another release than the one known here."""
    try:
        found = version("xllamacpp").split("+")[0]  # behind the plus: which accelerator it is built for
    except PackageNotFoundError as error:
        raise EngineError("llama.cpp is not installed", why="there is no package xllamacpp", fix=_FIX) from error
    if found != RELEASE:
        raise _unknown(f"xllamacpp {found} is installed, and the engine llamacpp knows {RELEASE}")
    spec = importlib.util.find_spec("xllamacpp")
    folders = spec.submodule_search_locations if spec else None
    files = [path for folder in folders or () for path in sorted(Path(folder).glob("xllamacpp*.so"))]
    try:
        api = ctypes.CDLL(str(files[0]))
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(api, name)
            function.restype, function.argtypes = result, arguments
    except (IndexError, OSError, AttributeError) as error:
        raise EngineError("llama.cpp cannot be loaded", why=str(error), fix=f"{_FIX} --force-reinstall") from error
    _check(api.llama_model_default_params(), _MODEL_DEFAULTS)
    _check(api.llama_context_default_params(), _CONTEXT_DEFAULTS)
    api.llama_log_set(receive, None)
    api.llama_backend_init()
    return api


def _check(params: ctypes.Structure, defaults: Mapping[str, object]) -> None:
    """Every field must have its known default, which is zero where `defaults` has none."""
    for name, kind in params._fields_:  # type: ignore[misc]
        value = getattr(params, name)
        if issubclass(kind, ctypes.Array):
            value = any(value)
        if (value or 0) != defaults.get(name, 0):
            raise _unknown(
                f"{type(params).__name__}.{name} is {value} by default in the xllamacpp that is installed, "
                f"and {defaults.get(name, 0)} in the {RELEASE} that the engine llamacpp knows"
            )


def _unknown(what: str) -> EngineError:
    return EngineError(what, why="llama.cpp changes its structs from one release to the next", fix=_FIX)
