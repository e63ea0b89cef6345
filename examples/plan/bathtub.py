"""What a prefill worker earns an hour, by the hit rate of its prompts: `python examples/plan/bathtub.py`.

Of 64,000 tokens, in chunks of 16,384, on four nodes of eight H100, cached input billed at a tenth. Shares of what it
earns when nothing is cached."""

from __future__ import annotations

from pdd_runtime.planner.latency import Roofline, RooflineConfig
from pdd_runtime.planner.pool_model import PoolModel
from pdd_runtime.planner.prices import Tariff
from pdd_runtime.planner.revenue import bathtub

MODELS = ("deepseek-v3", "glm-5", "deepseek-v4-pro")
HITS = [percent / 100 for percent in range(100)]
SHOWN = (0, 20, 22, 23, 24, 40, 47, 48, 49, 60, 73, 74, 75, 80, 90, 95, 99)


def main() -> None:
    print("| cached | " + " | ".join(MODELS) + " |")
    print("|---" * (len(MODELS) + 1) + "|")
    hours = []
    for model in MODELS:
        latency = Roofline(RooflineConfig(hardware="4x8xh100", model=model))
        worker = PoolModel(latency, 64, 16384, 10**9, 64, latency.kv_constant, latency.kv_token)
        hours.append([each.per_hour.low for each in bathtub(worker, Tariff(cached=0.1), 64000, HITS)])
    for percent in SHOWN:
        print(f"| {percent} % | " + " | ".join(f"{hour[percent] / hour[0]:.3f}" for hour in hours) + " |")


if __name__ == "__main__":
    main()
