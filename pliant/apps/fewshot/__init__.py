"""Learning from a few labelled images on a small device, in two stages (TinyTrain, arXiv 2307.09988).

Offline, `meta_train` prepares a backbone on one set of images. On the device, `adapt` takes a few images of new classes,
chooses what to train inside a budget of memory and MACs, and trains it.
"""

from pliant.apps.fewshot.adapt import Adapted, adapt
from pliant.apps.fewshot.episodes import Episode, Sampling
from pliant.apps.fewshot.meta import MetaTrained, meta_train
from pliant.apps.fewshot.prototypes import SCALE, Prototypes, scale_of
from pliant.apps.fewshot.rates import as_rate, rate_for
from pliant.apps.fewshot.views import Augment, pixel_stats_of

__all__ = [
    "SCALE",
    "Adapted",
    "Augment",
    "Episode",
    "MetaTrained",
    "Prototypes",
    "Sampling",
    "adapt",
    "as_rate",
    "meta_train",
    "pixel_stats_of",
    "rate_for",
    "scale_of",
]
