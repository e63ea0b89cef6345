"""SGLang's own interfaces, as far as linker and engine lean on them: read out of the package that is installed."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pdd_connector import page_keys
from pdd_sglang import testing
from pdd_sglang.config import NOBODY
from pdd_sglang.engine import TRIED, SglangEngine

from pdd_runtime.plugins.engine import ModelSpec
from pdd_runtime.testing.tiny_model import write_tiny_model

READER = """
import dataclasses, inspect, json
from sglang.version import __version__
from sglang.srt.disaggregation import decode, kv_events, prefill
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST
from sglang.srt.environ import envs
from sglang.srt.managers import schedule_batch, scheduler, tokenizer_manager
from sglang.srt.managers.io_struct import AbortReq, GenerateReqInput
from sglang.srt.managers.scheduler_components import batch_result_processor
from sglang.srt.mem_cache import cache_init_params, hicache_storage, memory_pool, unified_radix_cache, utils
from sglang.srt.mem_cache.rust_tree_core import adapter
from sglang.srt.mem_cache.unified_cache import linker_config, linker_factory, unified_cache_linker, unified_tree_core
from sglang.srt.platforms import interface
from sglang.srt.sampling.sampling_params import SamplingParams

def parameters(function):
    return list(inspect.signature(function).parameters)

def fields(kind):
    return [field.name for field in dataclasses.fields(kind)]

base, wrapper = unified_cache_linker.UnifiedCacheLinker, unified_cache_linker.UnifiedCacheLinkerWrapper
tree = unified_radix_cache.UnifiedRadixCache
ids = list(range(1, 12)) + [4_000_000_000]
print(json.dumps({
    "version": __version__,
    "methods": {name: parameters(value) for name, value in vars(base).items() if inspect.isfunction(value)},
    "abstract": sorted(base.__abstractmethods__),
    "config": fields(linker_config.UnifiedCacheLinkerConfig),
    "transfer": fields(hicache_storage.PoolTransfer),
    "params": fields(cache_init_params.CacheInitParams),
    "pools": [name.name for name in hicache_storage.PoolName],
    "generate": fields(GenerateReqInput),
    "sampling": list(SamplingParams.__struct_fields__),
    "abort": list(AbortReq.__struct_fields__),
    "capabilities": list(interface.PlatformCapabilities.__struct_fields__),
    "keys": {size: utils.get_hash_str(ids, None, page_size=size) for size in (1, 4)},
    "salted": utils.get_hash_str(ids, utils.storage_namespace_seed(None, "tenant"), page_size=1),
    "seed": utils.storage_namespace_seed(None, "tenant"),
    "no seed": utils.storage_namespace_seed(None, None),
    "nobody": FAKE_BOOTSTRAP_HOST,
    "stored": list(kv_events.BlockStored.__struct_fields__),
    "publisher": list(kv_events.KVEventsConfig.model_fields),
    "times": [name for name in dir(envs) if name.startswith("SGLANG_DISAGGREGATION_")],
    "sources": {
        "request": inspect.getsource(schedule_batch.Req.__init__),
        "bootstrap": inspect.getsource(prefill.PrefillBootstrapQueue),
        "prefilled": inspect.getsource(prefill.SchedulerDisaggregationPrefillMixin),
        "preallocated": inspect.getsource(decode.DecodePreallocQueue),
        "publishing": inspect.getsource(kv_events.ZmqEventPublisher),
        "factory": inspect.getsource(linker_factory.create_unified_cache_linker),
        "match": inspect.getsource(wrapper.match),
        "restorable": inspect.getsource(wrapper._sync_restorable_prefix),
        "load_back": inspect.getsource(wrapper.load_back),
        "offload": inspect.getsource(wrapper._offload_node),
        "insert": inspect.getsource(tree.insert),
        "checkpoint": inspect.getsource(tree.checkpoint_into_tree),
        "chain": inspect.getsource(unified_tree_core.UnifiedTreeCore._build_backup_kv_action),
        "pool": inspect.getsource(memory_pool.MHATokenToKVPool),
        "cache": inspect.getsource(memory_pool.KVCache),
        "abort": inspect.getsource(scheduler.Scheduler.abort_request),
        "prefill": inspect.getsource(batch_result_processor),
        "stream": inspect.getsource(tokenizer_manager),
        "rust": inspect.getsource(adapter),
    },
}))
"""
CPU = {"SGLANG_PLATFORM": "pdd-cpu", "SGLANG_USE_CPU_ENGINE": "0", "HF_HUB_OFFLINE": "1"}

pytestmark = pytest.mark.timeout(1800)


def ask(*arguments: str) -> str:
    command = [str(testing.interpreter()), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, env={**os.environ, **CPU})
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def installed() -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(ask("-c", READER).splitlines()[-1])
    return facts


def source(name: str) -> str:
    text: str = installed()["sources"][name]
    return text


def test_the_version_is_one_that_was_tried() -> None:
    assert installed()["version"] in TRIED


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("lookup", ["self", "rid", "transfers"]),
        ("load", ["self", "rid", "transfers"]),
        ("start_layer_wise_loading", ["self"]),
        ("finish_layer_wise_loading", ["self", "counter_index"]),
        ("cancel_queued_load", ["self", "rid"]),
        ("offload", ["self", "transfers", "session_id"]),
        ("num_completed_offloads", ["self"]),
        ("pop_completed_offload", ["self"]),
        ("reset", ["self"]),
        ("close", ["self"]),
    ],
)
def test_a_method_of_the_base_class_takes_what_ours_does(method: str, parameters: list[str]) -> None:
    assert installed()["methods"][method] == parameters
    assert method in installed()["abstract"]


def test_the_base_class_asks_for_nothing_that_we_do_not_have() -> None:
    """A new abstract method is a new duty."""
    assert len(installed()["abstract"]) == 10


def test_the_linker_is_made_as_ours_expects() -> None:
    assert installed()["config"] == ["linker", "linker_module_path", "linker_extra_config"]
    for argument in ("server_args,", "params,", "components=components", "extra_config=", "forward_stream="):
        assert argument in source("factory")


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("transfer", {"name", "device_indices", "keys"}),
        ("params", {"page_size", "token_to_kv_pool_allocator", "tp_cache_group", "attn_tp_cache_group"}),
        ("params", {"pp_size", "attn_cp_size", "is_eagle"}),
        ("pools", {"KV"}),
        ("generate", {"rid", "session_id", "input_ids", "stream", "sampling_params", "cache_salt"}),
        ("generate", {"return_logprob", "top_logprobs_num"}),
        ("generate", {"bootstrap_host", "bootstrap_port", "bootstrap_room"}),
        ("stored", {"block_hashes", "parent_block_hash", "token_ids", "block_size", "cache_salt", "medium"}),
        ("publisher", {"publisher", "endpoint", "replay_endpoint"}),
        ("times", {"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT"}),
        ("sampling", {"max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop_token_ids", "ignore_eos"}),
        ("sampling", {"logit_bias"}),
        ("abort", {"rid"}),
        ("capabilities", {"supports_triton", "graph_capture"}),
    ],
)
def test_what_we_read_and_send_is_there(kind: str, names: set[str]) -> None:
    assert names <= set(installed()[kind])


def test_pages_are_named_as_the_connector_names_them() -> None:
    ids = [*range(1, 12), 4_000_000_000]
    for size in (1, 4):
        assert [key.hex() for key in page_keys(ids, size)] == installed()["keys"][str(size)]
    seed = bytes.fromhex(installed()["seed"])
    assert [key.hex() for key in page_keys(ids, 1, seed)] == installed()["salted"]
    assert installed()["no seed"] is None


def test_requests_are_known_to_lookup_by_rid_and_to_offload_by_session() -> None:
    assert "self.cache_linker.lookup(req.rid" in source("match")
    assert "self.cache_linker.load(" in source("load_back")
    assert "req.rid" in source("load_back")
    assert 'session_id=getattr(cache, "insert_session_id"' in source("offload")
    assert "self.insert_session_id = params.session_id" in source("insert")
    assert "session_id=req.session_id" in source("checkpoint")


def test_the_longest_restorable_prefix_is_taken_and_a_refused_load_is_recomputed() -> None:
    assert "common[-1]" in source("restorable")
    assert "if not queued:" in source("load_back")


def test_a_page_that_was_refused_is_shown_again_its_ancestors_first() -> None:
    """An offload that is not accepted leaves no mark on its node; and the chain begins at the root."""
    assert source("offload").index("if not queued:") < source("offload").index("mark_external_linker_offload_pending")
    assert "ancestor is not self.root_node" in source("chain")
    assert "chain.reverse()" in source("chain")
    assert "build_external_linker_offload_transfers" in source("rust")


def test_a_request_that_ends_is_put_into_the_tree_before_its_last_token_is_sent() -> None:
    text = source("prefill")
    prefill = text[text.index("def process_batch_result_prefill") :]
    assert 0 < prefill.index("release_kv_cache(") < prefill.index("stream_output(")
    decode = text[text.index("def process_batch_result_decode") :]
    assert 0 < decode.index("_handle_finish_state_updated_req(") < decode.index("stream_output(")
    ending = decode[decode.index("def _handle_finish_state_updated_req") :]
    assert "release_kv_cache(req, self.tree_cache, checkpoint=" in ending


def test_the_cache_has_rows_of_tokens() -> None:
    assert "self.k_buffer" in source("pool")
    assert 'self.kv_cache_layout = "nhd"' in source("pool")
    assert "self.size = size" in source("cache")


def test_an_abort_takes_every_request_whose_id_begins_so() -> None:
    """Ours have one length: none is the beginning of another."""
    assert "startswith(recv_req.rid)" in source("abort")


def test_a_request_without_a_reader_leaves_no_kv_and_one_whose_reader_is_late_does() -> None:
    """Why a prompt is computed for a reader who never comes before its first token is asked for."""
    assert installed()["nobody"] == NOBODY
    assert "self.skip_radix_cache_insert = (\n            bootstrap_host == FAKE_BOOTSTRAP_HOST" in source("request")
    assert "req.bootstrap_host == FAKE_BOOTSTRAP_HOST" in source("bootstrap")
    assert "req.prefill_attempt_count < get_disagg().optimistic_prefill_attempts" in source("bootstrap")
    prefilled = source("prefilled")
    done = prefilled[prefilled.index("def process_batch_result_disagg_prefill") :]
    assert 0 < done.index("self.checkpoint_disagg_prefill(req)") < done.index("if not req.pending_bootstrap:")


def test_events_are_published_at_a_path_of_ours() -> None:
    assert 'self._endpoint.startswith("ipc://")' in source("publishing")


@pytest.mark.parametrize("role", ["null", "prefill", "main"])
def test_the_server_knows_every_flag_of_ours(tmp_path: Path, role: str) -> None:
    settings = testing.settings() if role == "null" else testing.transfer_settings()
    engine = SglangEngine(settings, ModelSpec(source="tiny"))
    engine.role = "aggregated" if role == "null" else role  # type: ignore[assignment]
    argv = engine.launch(write_tiny_model(tmp_path / "tiny"), 1, "/run/agent").argv
    known = ask("-m", "sglang.launch_server", "--help")
    flags = [part for part in argv if part.startswith("--")]
    assert len(flags) > 15
    assert [flag for flag in flags if flag not in known] == []
