"""vLLM's own interfaces, as far as connector and engine lean on them: read out of the package that is installed."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from pdd_vllm.engine import TRIED

from plugins.vllm_backend.tests.package import told

READER = """
import dataclasses, inspect, json
from vllm.version import __version__
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponseStreamChoice
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request
from vllm.v1.worker import kv_connector_model_runner_mixin, gpu_model_runner
from vllm.v1.worker.gpu import kv_connector as second_runner
from vllm.config import ParallelConfig

def parameters(function):
    return list(inspect.signature(function).parameters)

def fields(kind):
    return [field.name for field in dataclasses.fields(kind)]

base = KVConnectorBase_V1
print(json.dumps({
    "version": __version__,
    "methods": {name: parameters(value) for name, value in vars(base).items() if inspect.isfunction(value)},
    "abstract": sorted(base.__abstractmethods__),
    "properties": [name for name, value in vars(base).items() if isinstance(value, property)],
    "roles": [role.name for role in KVConnectorRole],
    "sources": [source.name for source in CacheHitSource],
    "request": sorted(set(inspect.getsource(Request).split())),
    "request_text": inspect.getsource(Request),
    "new": fields(NewRequestData), "cached": fields(CachedRequestData), "output": fields(SchedulerOutput),
    "spec": fields(FullAttentionSpec), "cache": fields(KVCacheConfig), "parallel": fields(ParallelConfig),
    "completion": list(CompletionRequest.model_fields), "choice": list(CompletionResponseStreamChoice.model_fields),
    "update": parameters(CPUAttentionBackendImpl.do_kv_cache_update),
    "layer": parameters(extract_layer_index),
    "evict": parameters(BlockPool.evict_blocks), "said": fields(KVConnectorOutput),
    "first_runner": inspect.getsource(gpu_model_runner.GPUModelRunner.execute_model),
    "second_runner": inspect.getsource(second_runner.ActiveKVConnector.pre_forward),
    "around": inspect.getsource(kv_connector_model_runner_mixin.KVConnectorModelRunnerMixin._get_kv_connector_output),
}))
"""


@cache
def installed() -> dict[str, Any]:
    return told(READER)


pytestmark = pytest.mark.timeout(1000)


def test_the_version_is_one_that_was_tried() -> None:
    assert installed()["version"].startswith(TRIED)


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("__init__", ["self", "vllm_config", "role", "kv_cache_config"]),
        ("get_num_new_matched_tokens", ["self", "request", "num_computed_tokens"]),
        ("update_state_after_alloc", ["self", "request", "blocks", "num_external_tokens"]),
        ("build_connector_meta", ["self", "scheduler_output"]),
        ("request_finished", ["self", "request", "block_ids"]),
        ("register_kv_caches", ["self", "kv_caches"]),
        ("handle_preemptions", ["self", "kv_connector_metadata"]),
        ("start_load_kv", ["self", "forward_context", "kwargs"]),
        ("wait_for_layer_load", ["self", "layer_name"]),
        ("save_kv_layer", ["self", "layer_name", "kv_layer", "attn_metadata", "kwargs"]),
        ("wait_for_save", ["self"]),
        ("get_block_ids_with_load_errors", ["self"]),
        ("bind_gpu_block_pool", ["self", "gpu_block_pool"]),
        ("update_connector_output", ["self", "connector_output"]),
        ("_get_connector_metadata", ["self"]),
        ("shutdown", ["self"]),
    ],
)
def test_a_method_of_the_base_class_takes_what_ours_does(method: str, parameters: list[str]) -> None:
    assert installed()["methods"][method] == parameters


def test_the_base_class_asks_for_nothing_that_we_do_not_have() -> None:
    """A new abstract method is a new duty."""
    assert installed()["abstract"] == [
        *("build_connector_meta", "get_num_new_matched_tokens", "save_kv_layer", "start_load_kv"),
        *("update_state_after_alloc", "wait_for_layer_load", "wait_for_save"),
    ]
    assert "requires_kv_delivery" in installed()["properties"]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("new", {"req_id", "block_ids", "num_computed_tokens"}),
        ("cached", {"req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"}),
        ("output", {"scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "has_sync_kv_loads"}),
        ("output", {"scheduled_spec_decode_tokens", "finished_req_ids"}),
        ("spec", {"sliding_window", "attention_chunk_size", "block_size"}),
        ("cache", {"num_blocks", "kv_cache_groups"}),
        ("parallel", {"pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size"}),
        ("parallel", {"tensor_parallel_size"}),
        ("completion", {"kv_transfer_params", "cache_salt", "return_token_ids", "return_tokens_as_token_ids"}),
        ("completion", {"ignore_eos", "stop_token_ids", "min_tokens", "logit_bias", "min_p", "top_k", "seed"}),
        ("choice", {"token_ids", "logprobs", "finish_reason"}),
        ("sources", {"HOST"}),
        ("said", {"invalid_block_ids"}),
        ("roles", {"SCHEDULER", "WORKER"}),
    ],
)
def test_what_we_read_and_send_is_there(kind: str, names: set[str]) -> None:
    assert names <= set(installed()[kind])


@pytest.mark.parametrize("name", ["kv_transfer_params", "num_computed_tokens", "num_tokens", "request_id"])
def test_a_request_has_what_the_scheduler_s_part_reads(name: str) -> None:
    text = installed()["request_text"]
    assert f"self.{name}" in text or f"def {name}" in text


def test_pages_are_written_by_an_operation_that_can_be_called() -> None:
    assert installed()["update"] == ["self", "layer", "key", "value", "kv_cache", "slot_mapping"]


def test_pages_that_are_not_right_can_be_taken_out_of_the_prefix_cache() -> None:
    assert installed()["evict"] == ["self", "block_ids"]


def test_the_hook_before_a_step_comes_in_every_step_and_before_the_loads() -> None:
    """Both model runners call it before anything else, also where nothing is computed: pages of finished requests are
    copied there, before others write them."""
    first, second, around = (installed()[name] for name in ("first_runner", "second_runner", "around"))
    assert first.index("handle_preemptions") < first.index("if not num_scheduled_tokens")
    assert first.index("handle_preemptions") < first.index("maybe_get_kv_connector_output")
    assert second.index("handle_preemptions") < second.index("_start_load_kv")
    assert around.index("start_load_kv") < around.index("yield output") < around.index("wait_for_save")
