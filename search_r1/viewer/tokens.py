"""The text of each token, such that the texts joined are the text of their segment."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from functools import lru_cache

from tokenizers import Tokenizer, decoders

_WINDOW = 6  # tokens before one that may change how it is decoded; longer runs of broken bytes are given out


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """One text for each of `ids`; a character that spans several tokens belongs to the last of them."""
    if isinstance(tokenizer.decoder, decoders.ByteLevel):
        return list(_by_bytes(tokenizer, ids))
    return list(_by_windows(tokenizer, ids))


def _by_bytes(tokenizer: Tokenizer, ids: Sequence[int]) -> Iterator[str]:
    """Byte-level BPE: a token is bytes, and bytes that are no character are decoded as U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    last = len(ids) - 1
    for position, token in enumerate(ids):
        yield decoder.decode(_bytes_of(tokenizer.id_to_token(token) or ""), final=position == last)


def _bytes_of(token: str) -> bytes:
    """A token with a character outside the byte alphabet is an added one, and stands for itself."""
    alphabet = _alphabet()
    try:
        return bytes(alphabet[letter] for letter in token)
    except KeyError:
        return token.encode("utf-8", "replace")


@lru_cache(maxsize=1)
def _alphabet() -> dict[str, int]:
    """Byte by character, as in GPT-2: printable characters are themselves, the other bytes follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def _by_windows(tokenizer: Tokenizer, ids: Sequence[int]) -> Iterator[str]:
    """Any other tokenizer: what a token adds to the decoding of the few before it."""
    start = read = 0
    for end in range(1, len(ids) + 1):
        before = tokenizer.decode(ids[start:read], skip_special_tokens=False)
        text = tokenizer.decode(ids[start:end], skip_special_tokens=False)
        whole = not text.endswith("\ufffd") or end == len(ids) or end - read > _WINDOW
        yield text[len(before) :] if whole else ""
        if whole:
            start, read = read, end
