"""The connector in each of TensorRT-LLM's ranks: loads before a pass, and what is published behind it."""

from __future__ import annotations

from typing import Any

from pdd_connector.client import AgentClient, Transfer
from pdd_connector.trtllm.pages import Pages
from pdd_connector.trtllm.publisher import Publisher
from pdd_connector.trtllm.step import Load, Step


class WorkerSide:
    """Called in the engine's thread, in the order of its passes."""

    def __init__(self, client: AgentClient, pages: Pages) -> None:
        self._client, self._pages = client, pages
        self._publisher = Publisher(client, pages)
        self._ending: list[int] = []
        self._mark: Any = None
        self._last: Step | None = None

    def wake(self, transfer: Transfer) -> None:
        """A transfer has changed; in any thread."""
        self._publisher.wake()

    def load(self, step: Step, stream: Any) -> None:
        """What was planned for this pass. The blocks are held by the first rank's scheduler."""
        for number in step.gone:
            self._publisher.drop(number)
        for load in step.loads:
            self._load(load, stream)
            self._client.loaded(load.transfer, load.tokens)

    def mark(self) -> None:
        """The pass was put on the current stream."""
        self._mark = self._pages.ready()

    def save(self, step: Step) -> None:
        """The pass was put on its stream: its KV can be published behind it."""
        if step is self._last:
            return
        self._last = step
        if self._mark is None:
            self._mark = self._pages.ready()
        for save in step.saves:
            self._publisher.saved(
                save.request, save.transfer, save.pages, ready=save.ready, computed=save.computed, mark=self._mark
            )
        self._mark = None

    def finished(self, ended: list[int]) -> list[int]:
        """Of the requests that have ended, by now or before, those whose pages are free."""
        for number in ended:
            self._publisher.end(number)
        self._ending += ended
        done = [number for number in self._ending if self._publisher.done(number)]
        self._ending = [number for number in self._ending if number not in done]
        return done

    def close(self) -> None:
        self._publisher.close()
        self._client.close()

    def _load(self, load: Load, stream: Any) -> None:
        blocks = [self._client.shard(block) for block in load.blocks]
        self._pages.write(load.pages, blocks, load.tokens, stream)
