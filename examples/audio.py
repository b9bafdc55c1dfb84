"""Sounds: a folder of WAV files per class, from nothing to predictions. Plain torch computes the log-mel features.

python examples/audio.py --data sounds/ --out runs/sounds
python examples/audio.py --quick      # tones that this file makes, in a temporary folder
"""

import argparse
import tempfile
import wave
from pathlib import Path

import numpy as np
from pliant.train import Options, train

import pliant


def write_tones(folder: Path, each: int = 12, rate: int = 8000) -> None:
    """Half a second each of low tones, high tones and noise."""
    random, t = np.random.default_rng(0), np.arange(rate // 2) / rate
    for i in range(each):
        sounds = {
            "low": np.sin(2 * np.pi * random.uniform(150, 300) * t),
            "high": np.sin(2 * np.pi * random.uniform(1500, 3000) * t),
            "noise": random.normal(0, 0.3, len(t)),
        }
        for name, sound in sounds.items():
            (folder / name).mkdir(parents=True, exist_ok=True)
            with wave.open(str(folder / name / f"{i}.wav"), "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(rate)
                file.writeframes((20000 * np.clip(sound, -1, 1)).astype("<i2").tobytes())


parser = argparse.ArgumentParser()
parser.add_argument("--data", help="folder with one folder of WAV files per class")
parser.add_argument("--out", default="runs/sounds")
parser.add_argument("--quick", action="store_true")
options = parser.parse_args()

with tempfile.TemporaryDirectory() as place:
    data, out = (Path(place, "sounds"), Path(place, "run")) if options.quick else (Path(options.data or "sounds"), options.out)
    if options.quick:
        write_tones(data)
    result = train(Options(data=str(data), out=str(out), epochs=4 if options.quick else 20, batch=8, device="cpu"))
    print(f"best accuracy {result.best.accuracy:.1%} at step {result.best.step}")
    some = sorted(data.glob("*/*.wav"))[:3]
    model = pliant.load(out)
    for file, guess in zip(some, model.predict(some), strict=True):
        print(file.relative_to(data), guess)
