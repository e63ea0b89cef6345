"""Sends a workload with `aiperf`, and reads its records as if we had sent it ourselves.

It gets the same token ids, lengths and times. Its stopwatch then says what the answers took, so that our figures can be
held against the field's own tool.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from pdd_runtime.clock import now
from pdd_runtime.errors import PddError
from pdd_runtime.experiments.client import API_KEY, Client
from pdd_runtime.experiments.outcome import Outcome
from pdd_runtime.experiments.prompts import Prompts
from pdd_runtime.planner import Session, Workload

COMMAND = "PDD_AIPERF"
"""Environment: where it is, if not on PATH."""
_PATIENCE = 120.0
"""Seconds for it to start and to write its records."""
_RECORDS = "profile_export_raw.jsonl"
_KNOWN = "0.13.0"
"""The version that this was tried with."""


class AiperfError(PddError):
    """It is not there, or does not do as it should."""

    code = "aiperf"


def require_aiperf(sessions: Sequence[Session]) -> str:
    """The command. Raises `AiperfError` where it cannot send these: before a measurement, not behind it."""
    command = shutil.which(os.environ.get(COMMAND, "aiperf"))
    if command is None:
        raise AiperfError(
            "aiperf is not installed",
            where=os.environ.get(COMMAND, "PATH"),
            fix=f"pip install aiperf=={_KNOWN} in a virtual environment of its own, and name its aiperf by {COMMAND}",
        )
    if any(len(session.turns) > 1 for session in sessions):
        raise AiperfError(
            "aiperf cannot send sessions of several turns",
            why="a later turn follows the end of the one before, and has its answer in its prompt",
            fix="a workload of single requests (turns=1), or the own driver",
        )
    return command


class Aiperf:
    """One graph's; each `run` is a run of the command, and takes some ten seconds beside what is measured."""

    def __init__(
        self,
        command: str,
        url: str,
        workload: Workload,
        prompts: Prompts,
        client: Client,
        on_end: Callable[[Outcome], None],
    ) -> None:
        self._command, self._url, self._workload = command, url, workload
        self._prompts, self._client, self._on_end = prompts, client, on_end

    async def run(self, sessions: Sequence[Session]) -> list[Outcome]:
        """Raises `AiperfError`."""
        wanted = {
            str(session.number): Outcome(session.number, 0, session.turns[0].prompt, 0.0, 0.0) for session in sessions
        }
        with TemporaryDirectory(prefix="pdd-aiperf-", ignore_cleanup_errors=True) as name:
            directory = Path(name)
            (directory / "requests.jsonl").write_text("\n".join(self._lines(sessions)))
            _write_tokenizer(directory / "tokenizer")
            said = await self._call(directory, len(wanted))
            records = directory / "out" / _RECORDS
            if not records.exists():
                raise AiperfError("aiperf has written no records", where=self._command, why=said)
            # Its records have wall-clock times, and spans on a clock of its own.
            offset = now() - time.time()
            with records.open("rb") as file:
                for line in file:
                    record = msgspec.json.decode(line)
                    outcome = wanted.get(str(record["metadata"]["conversation_id"]))
                    if outcome is not None:
                        read_record(record, outcome, offset)
        for outcome in wanted.values():
            if not outcome.ended:
                outcome.error = "aiperf has no record of it"
            if outcome.request_id:
                await self._client.follow(outcome)
            self._on_end(outcome)
        return list(wanted.values())

    def _lines(self, sessions: Sequence[Session]) -> Iterator[str]:
        for session in sessions:
            planned = session.turns[0]
            body = msgspec.json.decode(self._client.body(self._prompts.prompt(session, 0, ()), planned.output))
            del body["model"], body["stream"], body["max_tokens"]
            yield json.dumps(
                {
                    "session_id": str(session.number),
                    "text": "-",
                    "output_length": planned.output,
                    # Stands in the request as it is, and the prompt's token ids in place of the text.
                    "extra": body,
                    **({} if session.start is None else {"timestamp": 1000 * session.start}),
                }
            )

    async def _call(self, directory: Path, requests: int) -> str:
        """Returns the end of what it said."""
        # Every user of this host can read what stands in arguments; this file says where the key is, not what it is.
        (directory / "run.json").write_text(json.dumps(self._settings(directory, requests)))
        process = await asyncio.create_subprocess_exec(
            *(self._command, "profile", "--config", str(directory / "run.json")),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=directory,
            # The tokenizer is a folder, which it looks for on the hub all the same where it is told to be offline.
            env={name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"},
        )
        try:
            async with asyncio.timeout(_PATIENCE + requests * self._workload.timeout):
                said, _ = await process.communicate()
        except TimeoutError:
            raise AiperfError("aiperf does not come to an end", where=self._command) from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return said.decode(errors="replace")[-2000:]

    def _settings(self, directory: Path, requests: int) -> dict[str, Any]:
        """As a file of its `--config` has them."""
        users = self._workload.users
        load: dict[str, Any] = {"type": "fixed_schedule", "auto_offset": True}
        if users:
            load = {"type": "concurrency", "concurrency": min(users, requests)}
        # It puts the environment's variable in, where it reads the file; as an `api_key` digits would be a number.
        key = {"headers": {"Authorization": f"Bearer ${{{API_KEY}}}"}} if os.environ.get(API_KEY) else {}
        return {
            "benchmark": {
                "models": {"items": [{"name": self._client.model}]},
                "endpoint": {
                    "urls": [self._url],
                    "type": "completions",
                    "streaming": True,
                    "use_server_token_count": True,
                    "connection_reuse": "never",
                    "timeout": self._workload.timeout,
                    **key,
                },
                "datasets": [
                    {
                        "name": "main",
                        "type": "file",
                        "path": str(directory / "requests.jsonl"),
                        "format": "single_turn",
                        "sampling": "sequential",
                        "entries": requests,
                    }
                ],
                "phases": [{"name": "profiling", "kind": "profiling", "requests": requests, **load}],
                "tokenizer": {"name": str(directory / "tokenizer")},
                "artifacts": {"dir": str(directory / "out"), "records": ["jsonl"], "raw": True, "auto_plot": False},
                "gpu_telemetry": {"enabled": False},
                "server_metrics": {"enabled": False},
                "network_latency": {"enabled": False},
                "runtime": {"ui": "none"},
            }
        }


def read_record(record: Mapping[str, Any], outcome: Outcome, offset: float) -> None:
    """Write a line of its raw records into `outcome`; `offset`: our clock less the wall's, in seconds."""
    told, begun = record["metadata"], record["start_perf_ns"]
    # A request is due when it is sent: aiperf's own times begin there.
    outcome.due = outcome.sent = told["request_start_ns"] / 1e9 + offset
    outcome.ended = told["request_end_ns"] / 1e9 + offset
    for response in record.get("responses") or ():
        at = outcome.due + (response["perf_ns"] - begun) / 1e9
        for packet in response.get("packets", ()):
            if packet["name"] != "data" or not packet["value"].startswith("{"):
                continue
            chunk = msgspec.json.decode(packet["value"])
            outcome.request_id = f"req-{str(chunk.get('id', '')).rpartition('-')[2]}"
            for choice in chunk.get("choices", ()):
                tokens = choice.get("token_ids") or ()
                outcome.tokens += tokens
                outcome.stamps += [at] * len(tokens)
                if tokens:
                    outcome.ended = at
    error = record.get("error")
    if error:
        outcome.error = str(error.get("message") if isinstance(error, dict) else error)
    elif not outcome.tokens:
        outcome.error = f"{record.get('status')}: the answer has no tokens"


def _write_tokenizer(directory: Path) -> None:
    """It wants one, though the server counts tokens: of one word."""
    directory.mkdir()
    Tokenizer(WordLevel({"-": 0}, unk_token="-")).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
