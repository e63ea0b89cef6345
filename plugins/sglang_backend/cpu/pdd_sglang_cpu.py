"""A platform on which SGLang computes with PyTorch alone: slow, and right. Its own CPU platform needs kernels that its
wheel does not have."""

from __future__ import annotations

from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities


def activate() -> str:
    return f"{__name__}.{PlainCpu.__qualname__}"


class PlainCpu(CpuSRTPlatform):
    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_default_attention_backend(self) -> str:
        return "torch_native"
