"""Text: a plain word tokenizer that needs no vocabulary, and tokenizers of Hugging Face models."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from pliant.apps.data.errors import DataError
from pliant.apps.models.small import BUCKETS
from pliant.apps.optional import needed

_WORD = re.compile(r"\w+|[^\w\s]")


def word_ids(text: str) -> list[int]:
    """Words and punctuation marks in lower case, each hashed to an id from 1 to BUCKETS − 1, the same on every machine.

    >>> word_ids("Good, good") == word_ids("good , GOOD")
    True
    """
    return [1 + zlib.crc32(word.encode("utf-8", "surrogatepass")) % (BUCKETS - 1) for word in _WORD.findall(text.lower())]


@lru_cache(maxsize=4)
def tokenizer(content: str) -> Any:
    """A tokenizer of the package `tokenizers` from its JSON text."""
    package = needed("tokenizers", "hf", "this tokenizer")
    try:
        made: Any = package.Tokenizer.from_str(content)
    except Exception as error:  # the package raises no kind of its own
        raise DataError(f"the tokenizer of this model cannot be read: {error}. Copy its weight file again.") from error
    made.no_padding()
    return made


def token_ids(texts: Sequence[str], content: str, length: int | None) -> list[list[int]]:
    """The ids of each text with the model's own special tokens, at most `length` of them."""
    made = tokenizer(content)
    if length is None:
        made.no_truncation()
    else:
        made.enable_truncation(length)
    return [encoded.ids for encoded in made.encode_batch(list(texts))]
