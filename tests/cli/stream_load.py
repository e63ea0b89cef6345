"""Users who ask all the while, and notice every token that is not as it should be."""

from __future__ import annotations

import json
import threading
from types import TracebackType
from typing import Self

import httpx

from tests.waiting import PATIENCE


class StreamLoad:
    """Inside, `streams` users stream one answer after the other; `faults` has what any of them met. `counted` answers
    came whole, each token for token what it is where nothing is disturbed."""

    def __init__(self, url: str, streams: int = 6, tokens: int = 80) -> None:
        self.url, self.tokens = url, tokens
        self.faults: list[str] = []
        self.counted = 0
        self._prompts = [f"Question {number}: " + "why is the sky blue? " * (number + 1) for number in range(streams)]
        self._over = threading.Event()
        with self._client() as http:
            self._expected = [self._answer(http, prompt) for prompt in self._prompts]
        self._threads = [threading.Thread(target=self._user, args=(number,)) for number in range(streams)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=2 * PATIENCE, trust_env=False)

    def _user(self, number: int) -> None:
        with self._client() as http:
            while not self._over.is_set():
                try:
                    text = self._answer(http, self._prompts[number])
                except (httpx.HTTPError, AssertionError) as error:
                    self.faults.append(f"{type(error).__name__}: {error}")
                    continue
                if text != self._expected[number]:
                    self.faults.append(f"{text!r} instead of {self._expected[number]!r}")
                self.counted += 1

    def _answer(self, http: httpx.Client, prompt: str) -> str:
        body = {"model": "toy", "prompt": prompt, "max_tokens": self.tokens, "temperature": 0, "stream": True}
        text, done = "", False
        with http.stream("POST", "/v1/completions", json=body) as answer:
            if not answer.is_success:
                raise AssertionError(f"{answer.status_code}: {answer.read().decode()}")
            for line in answer.iter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    done = True
                elif data != line:
                    event = json.loads(data)
                    assert "error" not in event, event
                    text += "".join(choice["text"] for choice in event["choices"])
        assert done, "the stream broke off"
        return text
