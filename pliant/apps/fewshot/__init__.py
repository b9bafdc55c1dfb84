"""Few labelled images and a small device, in two stages (TinyTrain, arXiv 2307.09988).

Offline, `meta_train` prepares a backbone on one set of images, so that few of another suffice later. On the device, `adapt`
takes the few there are, chooses what is worth training inside a budget of memory and MACs, and trains that.
"""

from pliant.apps.fewshot.adapt import Adapted, adapt
from pliant.apps.fewshot.episodes import Episode, Sampling
from pliant.apps.fewshot.meta import MetaTrained, meta_train
from pliant.apps.fewshot.prototypes import SCALE, Prototypes, scale_of
from pliant.apps.fewshot.rates import as_rate, rate_for
from pliant.apps.fewshot.views import Augment, norm_of

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
    "norm_of",
    "rate_for",
    "scale_of",
]
