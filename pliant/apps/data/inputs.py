"""What stands between a file and a network: how a sample is read and becomes numbers. Weight files carry it as JSON.

Each kind of input is a frozen dataclass. `read` gives one sample, `batch` what the network sees of several, and calling it does
both: `inputs(["a.jpg", "b.jpg"])`.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pliant.apps.data import audio, images
from pliant.apps.data.errors import DataError, Skipped
from pliant.apps.data.text import token_ids, tokenizer, word_ids
from pliant.apps.models.small import BUCKETS
from pliant.runtime.working import told

Source = Path | str | bytes
"""A file, the content of a file, or a text."""

_MOST = 1 << 28  # numbers of one sample: a file may ask for any size

FEATURES = ("log-mel", "mfcc", "wave")
_Read = TypeVar("_Read")


class _Inputs:
    """What all kinds of input share."""

    kind: ClassVar[str]

    def read(self, source: Source, what: str) -> Tensor:
        raise NotImplementedError

    def batch(self, samples: Tensor) -> Tensor:
        return samples

    def example(self, count: int) -> Tensor:
        """Random inputs of the right shape and type."""
        raise NotImplementedError

    def __call__(self, sources: Sequence[Source | os.PathLike[str]]) -> Tensor:
        """What the network sees of these files or texts."""
        as_given: list[Any] = [one if isinstance(one, bytes) or self.kind == "text" else Path(one) for one in sources]
        found, _, _ = read_all(as_given, None, self.read)
        return self.batch(torch.stack(found))

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, **asdict(self)}  # type: ignore[call-overload]

    def _check(self, *sizes: float) -> None:
        if not all(0 < size < _MOST for size in sizes) or not math.prod(sizes) < _MOST:
            raise ValueError(f"{self}: no input can be of this kind.")


@dataclass(frozen=True)
class ImageInputs(_Inputs):
    """Images turned upright, in RGB, squeezed to `size`×`size` pixels (bilinear, antialiased); then (x/255 − mean) / std."""

    size: int = 64
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    kind: ClassVar[str] = "images"

    def __post_init__(self) -> None:
        self._check(self.size, self.size, *map(abs, self.std))

    def read(self, source: Source, what: str) -> Tensor:
        """Bytes, 3×size×size."""
        return images.decoded(io.BytesIO(source) if isinstance(source, bytes) else Path(source), what, self.size)

    def batch(self, samples: Tensor) -> Tensor:
        mean, std = (torch.tensor(part, dtype=torch.float32).reshape(-1, 1, 1) for part in (self.mean, self.std))
        return (samples.float() / 255 - mean) / std

    def example(self, count: int) -> Tensor:
        return self.batch(torch.randint(256, (count, 3, self.size, self.size), dtype=torch.uint8))


@dataclass(frozen=True)
class TextInputs(_Inputs):
    """Texts as token ids, cut or padded to `length`. `tokenizer` is "words" (hashed words), or the JSON text of a tokenizer."""

    length: int = 128
    tokenizer: str = "words"
    pad: int = 0
    kind: ClassVar[str] = "text"

    def __post_init__(self) -> None:
        self._check(self.length, self.pad + 1)

    def read(self, source: Source, what: str) -> Tensor:
        text = source.decode() if isinstance(source, bytes) else str(source)
        if not text.strip():
            raise DataError(f"{what} is empty. Add its text, or remove it.")
        ids = self.ids([text], self.length)[0]
        return torch.tensor(ids + [self.pad] * (self.length - len(ids)))

    def ids(self, texts: Sequence[str], length: int | None) -> list[list[int]]:
        """The ids of each text, at most `length`."""
        if self.tokenizer == "words":
            return [word_ids(text)[:length] for text in texts]
        return token_ids(texts, self.tokenizer, length)

    def example(self, count: int) -> Tensor:
        most = BUCKETS if self.tokenizer == "words" else max(int(tokenizer(self.tokenizer).get_vocab_size()), 2)
        return torch.randint(1, most, (count, self.length))


@dataclass(frozen=True)
class AudioInputs(_Inputs):
    """Sounds of one rate and length as features (channels × bands × frames), then (x − mean) / std.

    Shorter sounds are padded with silence, longer ones cut at the end, and other sampling rates are resampled. With
    `features="wave"` the network sees the samples themselves, each sound with mean 0 and standard deviation 1.
    """

    rate: int = 16000
    seconds: float = 1.0
    features: str = "log-mel"
    bands: int = 40
    channels: int = 1
    mean: float = 0.0
    std: float = 1.0
    kind: ClassVar[str] = "audio"

    def __post_init__(self) -> None:
        self._check(self.rate, self.seconds, self.bands, self.channels, self.std)
        if self.features not in FEATURES:
            raise ValueError(f"features={self.features!r}: give one of {', '.join(FEATURES)}.")

    def read(self, source: Source, what: str) -> Tensor:
        return self.of_samples(*audio.read_wav(source if isinstance(source, bytes) else Path(source), what))

    def of_samples(self, samples: Tensor, rate: int) -> Tensor:
        count = max(round(self.seconds * self.rate), 1)
        same = audio.resampled(samples, rate, self.rate)[:count]
        same = F.pad(same, (0, count - len(same)))
        if self.features == "wave":
            return (same - same.mean()) / (same.std(correction=0) + 1e-7)
        found = (audio.mfcc if self.features == "mfcc" else audio.log_mel)(same, self.rate, self.bands)
        return found[None].expand(self.channels, -1, -1)

    def batch(self, samples: Tensor) -> Tensor:
        return samples if self.features == "wave" else (samples - self.mean) / self.std

    def example(self, count: int) -> Tensor:
        sounds = 0.1 * torch.randn(count, max(round(self.seconds * self.rate), 1))
        return self.batch(torch.stack([self.of_samples(one, self.rate) for one in sounds]))


@dataclass(frozen=True)
class ArrayInputs(_Inputs):
    """Arrays of one shape from .npy files, as float32."""

    shape: tuple[int, ...] = ()
    kind: ClassVar[str] = "arrays"

    def __post_init__(self) -> None:
        self._check(*self.shape)

    def read(self, source: Source, what: str) -> Tensor:
        try:
            held = np.load(io.BytesIO(source) if isinstance(source, bytes) else Path(source))
            found = torch.from_numpy(np.asarray(held, np.float32))
        except (OSError, ValueError, TypeError, EOFError, SyntaxError) as error:
            raise DataError(f"{what} cannot be read as an array (.npy): {error}. Replace or remove it.") from error
        if tuple(found.shape) != tuple(self.shape):
            raise DataError(f"{what} has shape {tuple(found.shape)}, but the model takes {tuple(self.shape)}.")
        if not bool(found.isfinite().all()):
            raise DataError(f"{what} holds numbers that are not finite. Replace or remove it.")
        return found

    def example(self, count: int) -> Tensor:
        return torch.randn(count, *self.shape)


Inputs = ImageInputs | TextInputs | AudioInputs | ArrayInputs
_KINDS: dict[str, type[Any]] = {each.kind: each for each in (ImageInputs, TextInputs, AudioInputs, ArrayInputs)}


def from_json(held: Any) -> Inputs:
    """The inputs that a weight file describes. Values that cannot be are a ValueError."""
    if not isinstance(held, dict) or held.get("kind") not in _KINDS:
        raise ValueError("it does not say what its network sees")
    kind = _KINDS[held["kind"]]
    given = {}
    for field in fields(kind):
        value, default = held.get(field.name, field.default), field.default
        if isinstance(default, tuple):
            fits = isinstance(value, (list, tuple)) and all(type(one) in (int, float) for one in value)
            value = tuple(value) if fits else value
        else:
            fits = type(value) is type(default) or (type(default) is float and type(value) is int)
        if not fits:
            raise ValueError(f"{field.name}={value!r} cannot be")
        given[field.name] = value
    made: Inputs = kind(**given)
    return made


def read_all(
    sources: Sequence[Source], names: Sequence[str] | None, read: Callable[[Any, str], _Read], skip: bool = False
) -> tuple[list[_Read], list[int], list[Skipped]]:
    """Each sample as `read` gives it, the positions of those that could be read, and the others.

    Without `skip`, the first that cannot be read is an error.
    """
    found, places, skipped = [], [], []
    for place, source in told("reading samples", list(enumerate(sources))):
        name = names[place] if names is not None else repr(os.fspath(source)) if isinstance(source, Path) else f"sample {place}"
        try:
            found.append(read(source, name))
            places.append(place)
        except DataError as error:
            if not skip:
                raise
            skipped.append(Skipped(name, str(error)))
    return found, places, skipped
