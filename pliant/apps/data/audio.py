"""Sound: WAV files as samples between −1 and 1, resampling, log-mel spectrograms and MFCCs, in plain PyTorch."""

from __future__ import annotations

import io
import math
import os
import warnings
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pliant.apps.data.errors import DataError

WINDOW_SECONDS, HOP_SECONDS = 0.025, 0.010  # of a spectrogram, as usual for speech
_FLOOR = 1e-6  # below this power a band counts as silent
_LOBES = 16  # zero crossings of the resampling filter on either side


def read_wav(source: Path | bytes, what: str) -> tuple[Tensor, int]:
    """The sound of a WAV file as one row of samples (the mean of its channels) and its sampling rate in Hz."""
    from scipy.io import wavfile

    try:
        content = source if isinstance(source, bytes) else Path(source).read_bytes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", wavfile.WavFileWarning)  # chunks of other programs, which hold no sound
            rate, held = wavfile.read(io.BytesIO(content))
    except (OSError, ValueError, EOFError, IndexError, MemoryError, ZeroDivisionError, UnboundLocalError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise DataError(f"{what} cannot be read as WAV: {why}. Convert it to WAV, replace it or remove it.") from error
    except Exception as error:  # a damaged header makes struct or numpy stumble in their own ways
        raise DataError(f"{what} cannot be read as WAV: {error!r}. Replace or remove it.") from error
    if held.dtype.kind == "u":
        samples = (held.astype(np.float32) - 128) / 128  # eight bits are unsigned in WAV
    elif held.dtype.kind == "i":
        samples = held.astype(np.float32) / float(np.iinfo(held.dtype).max + 1)
    else:
        samples = held.astype(np.float32)
    samples = samples.mean(1) if samples.ndim > 1 else samples
    if rate < 1 or not samples.size:
        raise DataError(f"{what} holds no sound. Replace or remove it.")
    if not np.isfinite(samples).all():
        raise DataError(f"{what} holds samples that are not finite numbers. Replace or remove it.")
    return torch.from_numpy(samples), int(rate)


def resampled(samples: Tensor, rate: int, to: int) -> Tensor:
    """The same sound at another sampling rate, by a windowed sinc filter that removes what the new rate cannot hold."""
    if rate == to:
        return samples
    shared = math.gcd(rate, to)
    step, phases = rate // shared, to // shared
    kernel = _sinc_filters(step, phases)
    reach = (kernel.shape[-1] - step) // 2
    padded = F.pad(samples.float()[None, None], (reach, reach + step))
    out = F.conv1d(padded, kernel.to(samples.device)[:, None], stride=step)[0].T.reshape(-1)
    return out[: math.ceil(len(samples) * to / rate)]


@lru_cache(maxsize=8)
def _sinc_filters(step: int, phases: int) -> Tensor:
    """One filter for each position of a new sample between two old ones."""
    cut = 0.99 * min(step, phases) / step  # relative to the old rate's highest frequency
    reach = math.ceil(_LOBES / cut)
    at = torch.arange(-reach, reach + step, dtype=torch.float64)
    shift = torch.arange(phases, dtype=torch.float64)[:, None] * step / phases
    x = ((at - shift) * cut).clamp(-_LOBES, _LOBES)
    window = torch.cos(math.pi * x / _LOBES / 2).square()
    return (torch.sinc(x) * window * cut).float()


def log_mel(samples: Tensor, rate: int, bands: int) -> Tensor:
    """The logarithm of the power in `bands` mel bands, by windows: bands × frames."""
    window, hop = max(round(WINDOW_SECONDS * rate), 2), max(round(HOP_SECONDS * rate), 1)
    size = 1 << (window - 1).bit_length()
    spectrum = torch.stft(
        samples, size, hop, window, torch.hann_window(window), center=True, pad_mode="constant", return_complex=True
    )
    return (_mel_bands(rate, size, bands) @ spectrum.abs().square() + _FLOOR).log()


def mfcc(samples: Tensor, rate: int, bands: int) -> Tensor:
    """Cepstral coefficients: the cosine transform of the log-mel bands, of which the lower half is kept."""
    mel = log_mel(samples, rate, bands)
    k, n = torch.arange(max(bands // 2, 1))[:, None], torch.arange(bands)[None]
    basis = torch.cos(math.pi / bands * (n + 0.5) * k) * math.sqrt(2 / bands)
    basis[0] /= math.sqrt(2)
    return basis @ mel


@lru_cache(maxsize=8)
def _mel_bands(rate: int, size: int, bands: int) -> Tensor:
    """Triangles over the frequencies of a spectrum, evenly spaced on the mel scale."""
    top = 2595 * math.log10(1 + rate / 2 / 700)
    edges = 700 * (10 ** (torch.linspace(0, top, bands + 2, dtype=torch.float64) / 2595) - 1)
    at = torch.linspace(0, rate / 2, size // 2 + 1, dtype=torch.float64)
    rising = (at[None] - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - at[None]) / (edges[2:] - edges[1:-1])[:, None]
    return torch.minimum(rising, falling).clamp(min=0).float()


def is_wav(file: str | os.PathLike[str]) -> bool:
    return os.fspath(file).lower().endswith((".wav", ".wave"))
