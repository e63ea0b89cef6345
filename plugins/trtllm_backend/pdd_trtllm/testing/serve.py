"""The stand-in's command: it starts as `trtllm-serve serve MODEL …` does."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import uvicorn

from pdd_runtime.models.directory import read_config
from pdd_runtime.server.geometry import read_geometry
from pdd_trtllm.testing.arguments import LlmArgs, Serve, parse
from pdd_trtllm.testing.driver import ConnectorDriver
from pdd_trtllm.testing.events import Events
from pdd_trtllm.testing.executor import Executor, Limits
from pdd_trtllm.testing.model import PagedModel
from pdd_trtllm.testing.pages import PageCache
from pdd_trtllm.testing.server import Api
from pdd_trtllm.testing.transceiver import TIMEOUT

PAUSE = "PDD_STANDIN_PAUSE"
"""An environment variable: seconds that each pass takes at least."""
_PAGES = 512
"""Of the cache, where the configuration does not say."""


def main(argv: list[str] | None = None) -> None:
    try:
        serve = parse(sys.argv[1:] if argv is None else argv)
    except (OSError, ValueError) as error:
        sys.exit(f"trtllm-serve: {error}")
    level = {"verbose": "DEBUG", "trace": "DEBUG", "internal_error": "CRITICAL"}.get(serve.log_level, serve.log_level)
    logging.basicConfig(level=level.upper(), format="[TRT-LLM] %(levelname)s %(message)s")
    executor, api = build(serve.args)
    _listen(serve, api)
    executor.stop()


def build(args: LlmArgs) -> tuple[Executor, Api]:
    """Raises what the connector raises."""
    import tensorrt_llm  # type: ignore[import-not-found, unused-ignore]

    executor, events = execute(args)
    return executor, Api(executor, args, events, tensorrt_llm.__version__)


def execute(args: LlmArgs) -> tuple[Executor, Events | None]:
    """The same without HTTP."""
    directory = Path(args.model)
    config = read_config(directory)
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "float32") if args.dtype == "auto" else args.dtype
    cache, page = args.kv_cache_config, args.kv_cache_config.tokens_per_block
    layout = read_geometry(directory, dtype=dtype, block_size=page, tp=args.tensor_parallel_size)  # type: ignore[arg-type]
    pages = _PAGES if cache.max_tokens is None else max(1, cache.max_tokens // page)
    if cache.max_gpu_total_bytes:
        pages = min(pages, max(1, cache.max_gpu_total_bytes * args.tensor_parallel_size // layout.block_bytes))
    context = args.max_seq_len or int(config["max_position_embeddings"])
    events = Events(cache.event_buffer_max_size, pages=pages, window=context) if cache.event_buffer_max_size else None
    model = PagedModel(directory, layout, pages=pages)
    limits = Limits(
        batch=args.max_batch_size,
        pass_tokens=max(args.max_num_tokens, page),
        chunked=args.enable_chunked_prefill,
        overlap=not args.disable_overlap_scheduler,
        pause=float(os.environ.get(PAUSE, 0)),
    )
    driver = None
    if (connector := args.kv_connector_config) is not None:
        names = (connector.connector_module, connector.connector_scheduler_class, connector.connector_worker_class)
        driver = ConnectorDriver(*names, args, model.caches())
    transceiver, transfers = args.cache_transceiver_config, None
    if transceiver is not None and transceiver.backend is not None:
        transfers = TIMEOUT if transceiver.kv_transfer_timeout_ms is None else transceiver.kv_transfer_timeout_ms / 1000
    reused = PageCache(pages, page, copy=model.copy if cache.enable_partial_reuse else None, events=events)
    return Executor(model, reused, limits, driver, transfers), events


def _listen(serve: Serve, api: Api) -> None:
    config = uvicorn.Config(api.app, host=serve.host, port=serve.port, log_level="warning", timeout_keep_alive=5)
    uvicorn.Server(config).run()
