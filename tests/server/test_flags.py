from __future__ import annotations

import argparse

import pytest

from pdd_runtime.server.flags import flag_of

FLAGS = ("--port", "--block-size", "--kv-transfer-config", "-tp")


@pytest.mark.parametrize(
    ("word", "flag"),
    [
        ("--port", "--port"),
        ("--port=80", "--port"),
        ("--por", "--port"),
        ("--p=80", "--port"),
        ("--block_size", "--block-size"),
        ("--block_s=16", "--block-size"),
        ("--kv-transfer-config.kv_role", "--kv-transfer-config"),
        ("--kv_transfer_config.extra.a=1.5", "--kv-transfer-config"),
        ("-tp", "-tp"),
        ("-tp=2", "-tp"),
        ("-t", "-tp"),
    ],
)
def test_a_flag_is_known_however_it_is_written(word: str, flag: str) -> None:
    assert flag_of(word, FLAGS) == flag


@pytest.mark.parametrize(
    "word", ["--portal", "--seed=--port", "--", "-", "", "port", "8000", "-1", '{"--port": 1}', "-tpx", "--no-port"]
)
def test_another_flag_or_a_value_is_none_of_them(word: str) -> None:
    assert flag_of(word, FLAGS) is None


@pytest.mark.parametrize("word", ["--port", "--por", "--p", "--block-s"])
def test_argparse_takes_what_is_known_for_the_same(word: str) -> None:
    parser = argparse.ArgumentParser()
    for flag in FLAGS:
        parser.add_argument(flag)
    flag = flag_of(word, FLAGS)
    assert flag is not None
    assert parser.parse_args([word, "1"]) == parser.parse_args([flag, "1"])
