"""API keys: what a file says, who is let in, and what they may use."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import suppress
from pathlib import Path

import pytest

from pdd_runtime.errors import GraphError
from pdd_runtime.frontend import keys as module
from pdd_runtime.frontend.errors import RateLimitError
from pdd_runtime.frontend.keys import Key, Keys, digest, new_key, operator_key, parse
from pdd_runtime.frontend.limits import Account, Bucket, Ledger, Used
from tests.waiting import until


def line(name: str, key: str, **limits: object) -> str:
    return json.dumps({"name": name, "sha256": digest(key.encode()), **limits}) + "\n"


@pytest.mark.parametrize(
    "wrong",
    [
        json.dumps({"name": "alice", "sha256": "pdd-secret"}),
        line("al ice", "x"),
        line("alice\n", "x"),
        line("alice", "x", admim=True),
        line("alice", "x", requests=0),
        "pdd-secret",
        "[" * 5000,
    ],
)
def test_a_line_that_is_no_key_is_named_by_its_number_and_not_shown(wrong: str) -> None:
    with pytest.raises(GraphError, match=r"keys\.jsonl:3: this is no API key") as raised:
        parse(f"{line('bob', 'b')}\n{wrong}\n", "keys.jsonl")
    assert "secret" not in str(raised.value)


def test_one_key_cannot_be_two_peoples() -> None:
    with pytest.raises(GraphError, match="twice"):
        parse(line("alice", "k") + line("bob", "k"), "keys.jsonl")


def test_an_owner_may_have_several_keys_and_the_operator_is_beside_them(tmp_path: Path) -> None:
    file = tmp_path / "keys.jsonl"
    old, new = new_key(), new_key()
    file.write_text(line("alice", old) + line("alice", new))
    operator = Key(name=module.OPERATOR, sha256=digest(operator_key("s").encode()), admin=True)
    keys = Keys(str(file), operator)
    found = [keys.find(key.encode()) for key in (old, new, operator_key("s"), operator_key("t"), old[:-1], "")]
    assert [key and key.name for key in found] == ["alice", "alice", module.OPERATOR, None, None, None]


def test_keys_may_be_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GraphError, match="the environment has no KEYS_OF_TEST"):
        Keys("${KEYS_OF_TEST}")
    monkeypatch.setenv("KEYS_OF_TEST", line("alice", "k"))
    assert Keys("${KEYS_OF_TEST}").find(b"k") is not None


async def test_what_changes_in_the_file_counts_and_what_breaks_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "EVERY", 0.01)
    caplog.set_level(logging.INFO)
    file = tmp_path / "keys.jsonl"

    def write(text: str) -> None:
        fresh = tmp_path / "fresh"
        fresh.write_text(text)
        fresh.replace(file)

    write(line("alice", "a"))
    keys = Keys(str(file))
    watching = asyncio.create_task(keys.watch())
    try:
        write(line("bob", "b"))
        await until(lambda: keys.find(b"b") is not None)
        assert keys.find(b"a") is None
        write("nonsense")
        await until(lambda: "stay as they were" in caplog.text)
        file.unlink()
        await until(lambda: "cannot be read" in caplog.text)
        assert keys.find(b"b") is not None
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


class Clock:
    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


def test_a_bucket_gives_a_minutes_worth_and_fills_evenly() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    bucket.take(60)
    assert bucket.wait(1) == pytest.approx(1.0)
    clock.at += 0.5
    assert bucket.wait(1) == pytest.approx(0.5)
    clock.at += 1000
    assert (bucket.left, bucket.full_in) == (60, 0)


def test_what_is_larger_than_the_bucket_waits_until_that_is_full_and_is_owed() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    assert bucket.wait(600) == 0
    bucket.take(600)
    assert bucket.wait(1) == pytest.approx(541)


def test_an_account_counts_what_runs_and_what_it_made() -> None:
    clock = Clock()
    account, key = Account(clock), Key(name="a", sha256="", requests=1, requests_per_minute=3, tokens_per_minute=100)
    account.begin(key)
    with pytest.raises(RateLimitError, match="1 requests of key a are running") as raised:
        account.begin(key)
    assert raised.value.retry_after > 0
    account.prompt(key, 60)
    account.end(100)
    account.begin(key)
    with pytest.raises(RateLimitError, match="100 tokens a minute") as raised:
        account.prompt(key, 10)
    assert raised.value.retry_after == pytest.approx(70 * 60 / 100)
    account.end(0)
    account.begin(key)
    account.end(0)
    with pytest.raises(RateLimitError, match="3 requests a minute") as raised:
        account.begin(key)
    assert raised.value.retry_after == pytest.approx(20)
    assert account.headers() == {
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "60.000s",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "96.000s",
    }


def test_what_is_used_in_another_process_counts_here_once_it_is_heard() -> None:
    key = Key(name="a", sha256="", requests=2, requests_per_minute=1000, tokens_per_minute=100)
    here, there = Ledger(), Ledger()
    there.account("a").begin(key)
    here.hear({1: there.used()})
    here.account("a").begin(key)
    with pytest.raises(RateLimitError, match="2 requests of key a are running"):
        here.account("a").begin(key)
    here.account("a").prompt(key, 50)
    there.account("a").end(200)
    here.hear({1: there.used()})
    here.account("a").begin(key)
    with pytest.raises(RateLimitError, match="100 tokens a minute"):
        here.account("a").prompt(key, 1)
    # Started again, it begins to count anew; what is unknown of the time before is not charged.
    here.hear({1: {"a": Used(0, 0, 0)}})
    here.hear({})
    assert here.account("a").elsewhere == 0


def test_who_has_keys_of_two_limits_gains_nothing_by_changing_between_them() -> None:
    account = Account(Clock())
    few, many = (Key(name="a", sha256="", requests_per_minute=limit) for limit in (2, 4))
    account.begin(few)
    account.begin(many)
    with pytest.raises(RateLimitError, match="2 requests a minute"):
        account.begin(few)
