"""A tokenizer with a token per byte, for engines without a model."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from pdd_runtime.plugins.engine import TokenizerFiles

START, END = 256, 257
"""The special tokens' ids; a byte's id is the byte."""
SIZE = 258
_START, _END = "<|start|>", "<|end|>"
_TEMPLATE = (
    "{% for message in messages %}"
    "{{ bos_token }}{{ message['role'] }}\n{{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token }}assistant\n{% endif %}"
)


def byte_tokenizer() -> TokenizerFiles:
    """256 byte tokens, a start and an end token, and a chat template that uses both."""
    tokenizer = Tokenizer(BPE(vocab={letter: byte for byte, letter in enumerate(_letters())}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(_START, special=True), AddedToken(_END, special=True)])
    return TokenizerFiles(
        tokenizer_json=tokenizer.to_str(),
        chat_template=_TEMPLATE,
        eos_token_ids=(END,),
        special_tokens={"bos_token": _START, "eos_token": _END},
    )


def _letters() -> list[str]:
    """The character by which byte-level tokenizers spell each byte: itself where it is printable, else one of the
    characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    spelling = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}
    return [spelling[byte] for byte in range(256)]
