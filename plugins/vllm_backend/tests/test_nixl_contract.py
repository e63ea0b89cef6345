"""vLLM's own transfer and its cache's events, as far as the data plane leans on them: read out of the package that is
installed."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from pdd_vllm.nixl import LATE

from plugins.vllm_backend.tests.package import told

READER = """
import inspect, json
from vllm import envs
from vllm.config.kv_events import KVEventsConfig
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed import kv_events
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_scheduler, base_worker, pull_scheduler, stats
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.v1.core.sched.scheduler import Scheduler

def fields(kind):
    return list(kind.__struct_fields__)

finished = inspect.getsource(pull_scheduler.NixlPullConnectorScheduler.request_finished)
print(json.dumps({
    "batch": [fields(kv_events.EventBatch), kv_events.EventBatch.__struct_config__.array_like],
    "stored": fields(kv_events.BlockStored),
    "removed": fields(kv_events.BlockRemoved),
    "event": [kv_events.BlockStored.__struct_config__.tag, kv_events.BlockStored.__struct_config__.array_like],
    "cleared": kv_events.AllBlocksCleared.__struct_config__.tag,
    "medium": kv_events.MEDIUM_GPU,
    "end": kv_events.ZmqEventPublisher.END_SEQ.hex(),
    "replays": inspect.getsource(kv_events.ZmqEventPublisher._service_replay),
    "binds": kv_events.ZmqEventPublisher._is_bind_endpoint("ipc:///x"),
    "events": list(KVEventsConfig.__dataclass_fields__),
    "transfer": list(KVTransferConfig.__dataclass_fields__),
    "lease": "kv_lease_duration" in inspect.getsource(base_scheduler) + inspect.getsource(base_worker),
    "stats": inspect.getsource(stats),
    "side": [name for name in envs.environment_variables if name.startswith("VLLM_NIXL_SIDE")],
    "request": list(CompletionRequest.model_fields), "response": list(CompletionResponse.model_fields),
    "finished": finished,
    "received": inspect.getsource(Scheduler._update_from_kv_xfer_finished),
    "cached": inspect.getsource(Scheduler._update_waiting_for_remote_kv),
}))
"""


@cache
def installed() -> dict[str, Any]:
    return told(READER)


pytestmark = pytest.mark.timeout(1000)


def test_events_have_the_form_that_is_read() -> None:
    found = installed()
    assert found["batch"] == [["ts", "events", "data_parallel_rank"], True]
    assert found["event"] == ["BlockStored", False]
    assert found["cleared"] == "AllBlocksCleared"
    wanted = {"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "lora_name", "medium"}
    assert wanted | {"extra_keys", "group_idx"} <= set(found["stored"])
    assert {"block_hashes", "medium", "group_idx"} <= set(found["removed"])
    assert found["medium"] == "GPU"


def test_events_are_published_where_they_are_read_and_replayed_on_a_question() -> None:
    found = installed()
    assert found["binds"]
    assert {"enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint"} <= set(found["events"])
    assert found["end"] == "ff" * 8
    assert 'int.from_bytes(start_seq_bytes, "big")' in found["replays"]


def test_a_lease_can_be_set_and_late_reads_are_counted() -> None:
    found = installed()
    assert found["lease"]
    assert f'"{LATE.removesuffix("_total")}"' in found["stats"]
    assert found["side"] == ["VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"]
    assert {"kv_load_failure_policy", "kv_connector_extra_config", "kv_role"} <= set(found["transfer"])


def test_what_a_reader_needs_comes_with_an_answer_that_is_no_stream() -> None:
    found = installed()
    assert "kv_transfer_params" in found["request"]
    assert "kv_transfer_params" in found["response"]
    assert "remote_block_ids=block_ids" in found["finished"]


def test_a_read_whose_request_was_aborted_is_not_cached() -> None:
    """Pages are named when a request that waits for them goes on, and never where it has ended: they are freed."""
    found = installed()
    assert "is_finished(req.status)" in found["received"]
    assert "cache_blocks" not in found["received"]
    assert "cache_blocks" in found["cached"]
