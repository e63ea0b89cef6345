"""What `pdd-runtime plugins check pdd-trtllm` runs: the engine's conformance suite on the stand-in for trtllm-serve,
and on a real one where there is one.

A server takes a while to start. So each test attaches engines of its own to servers that run all the time, as a
restarted worker does.
"""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from pdd_runtime.plugins.engine import Engine, ModelSpec
from pdd_runtime.testing.engine_kv_suite import KvConformance
from pdd_runtime.testing.engine_suite import EngineConformance
from pdd_runtime.testing.native_suite import NativeConformance
from pdd_runtime.testing.tiny_model import write_tiny_model
from pdd_trtllm.config import TrtllmConfig
from pdd_trtllm.engine import TrtllmEngine
from pdd_trtllm.testing import standin

URL, SOCKET, MODEL = "TRTLLM_URL", "TRTLLM_SOCKET", "TRTLLM_MODEL"
"""Environment variables: a real server, the socket that its connector was given, and the directory of its model."""
NATIVE_URLS = "TRTLLM_NATIVE_URLS"
"""The same: two servers with data_plane: native, one that prefills and one that reads, with a comma between."""
SMALL = {"kv_memory": "2MiB", "context_length": 512, "batch_limit": 2, "token_budget": 64, "start_timeout": "5min"}
NATIVE = {
    **{name: value for name, value in SMALL.items() if name != "kv_memory"},
    "data_plane": "native",
    "batch_limit": 8,
}


class Fresh:
    """The servers remember the prompts of other tests: each test has others."""

    vocabulary: ClassVar[range]

    @pytest.fixture(autouse=True)
    def _fresh(self, request: pytest.FixtureRequest) -> None:
        self._test = request.node.nodeid

    def prompt(self, n: int, which: int = 0) -> tuple[int, ...]:
        return tuple(random.Random(f"{self._test} {which}").choices(self.vocabulary, k=n))


class Tiny:
    """A model for stand-ins."""

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls, tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
        return ModelSpec(source=str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")))


class TrtllmConformance(Fresh, Tiny, EngineConformance):
    plugin = TrtllmEngine
    settings: ClassVar[dict[str, Any]] = {"block_size": 16}

    @pytest.fixture(scope="class")
    @classmethod
    def attaching(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[type[TrtllmEngine]]:
        """To servers that run as long as the class."""
        with standin.attaching(tmp_path_factory.mktemp("servers")) as engine:
            yield engine

    @pytest.fixture
    def engine(self, attaching: type[TrtllmEngine], model: ModelSpec) -> Engine:
        return attaching(TrtllmConfig(**SMALL, **self.settings), model)


class TestOverlapped(TrtllmConformance):
    """As it is by default."""


class TestOneByOne(TrtllmConformance):
    """Each pass begins when the one before it is over, and each layer's heads are on two ranks."""

    settings: ClassVar[dict[str, Any]] = {"block_size": 8, "overlap": False, "tp": 2, "attention": "FLASHINFER"}


class TestNative(Fresh, Tiny, NativeConformance):
    """TensorRT-LLM's own transfers. The reader's passes overlap, the giver's cannot."""

    frees_at_once: ClassVar[bool] = False
    settings: ClassVar[dict[str, Any]] = {"block_size": 16}

    @pytest.fixture(scope="class")
    @classmethod
    def givers(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[type[TrtllmEngine]]:
        with standin.attaching(tmp_path_factory.mktemp("givers"), "prefill") as engine:
            yield engine

    @pytest.fixture(scope="class")
    @classmethod
    def readers(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[type[TrtllmEngine]]:
        with standin.attaching(tmp_path_factory.mktemp("readers"), "main") as engine:
            yield engine

    @pytest.fixture
    def giver(self, givers: type[TrtllmEngine], model: ModelSpec) -> Engine:
        return givers(TrtllmConfig(**NATIVE, block_size=16, transfer_timeout="60s"), model)

    @pytest.fixture
    def reader(self, readers: type[TrtllmEngine], model: ModelSpec) -> Engine:
        """Who waits for what was read waits as long as it may."""
        return readers(TrtllmConfig(**NATIVE, **self.settings, transfer_timeout="5s"), model)


class TestNativeRanks(TestNative):
    """The reader has two ranks, and passes that do not overlap either."""

    settings: ClassVar[dict[str, Any]] = {"block_size": 16, "tp": 2, "overlap": False}


class TestRealServer(TrtllmConformance):
    """trtllm-serve itself, where one runs, or can be started."""

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls) -> ModelSpec:
        if MODEL not in os.environ:
            pytest.skip(f"no real server: set {MODEL} to a model's directory, and {URL} and {SOCKET} to attach")
        return ModelSpec(source=os.environ[MODEL], dtype="bfloat16")

    @pytest.fixture
    def engine(self, request: pytest.FixtureRequest, model: ModelSpec) -> Engine:
        two = hasattr(KvConformance, request.function.__name__)
        if URL in os.environ and not two:
            attached = {"url": os.environ[URL], "socket": os.environ[SOCKET]}
            return TrtllmEngine(TrtllmConfig(kv_memory=SMALL["kv_memory"], **attached), model)
        if importlib.util.find_spec("tensorrt_llm") is None:
            pytest.skip("tensorrt_llm is not installed here")
        return TrtllmEngine(TrtllmConfig(kv_memory="64MiB", context_length=512, engine_kv_memory="1GiB"), model)


class TestRealNative(Fresh, NativeConformance):
    """Two of trtllm-serve, where they run, that move KV themselves."""

    frees_at_once: ClassVar[bool] = False

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls) -> ModelSpec:
        if not {MODEL, NATIVE_URLS} <= os.environ.keys():
            pytest.skip(f"no real servers: set {MODEL} to a model's directory, and {NATIVE_URLS} to two addresses")
        return ModelSpec(source=os.environ[MODEL], dtype="bfloat16")

    @pytest.fixture
    def giver(self, model: ModelSpec) -> Engine:
        return TrtllmEngine(TrtllmConfig(data_plane="native", url=os.environ[NATIVE_URLS].split(",")[0]), model)

    @pytest.fixture
    def reader(self, model: ModelSpec) -> Engine:
        return TrtllmEngine(TrtllmConfig(data_plane="native", url=os.environ[NATIVE_URLS].split(",")[1]), model)
