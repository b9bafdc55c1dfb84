"""Data for the command and the benchmarks: folders of images, packed sets, digits, and seeded batches."""

from pliant.apps.data.digits import Digits, Split, batches, digits
from pliant.runtime.sample_ids import ids_of, with_ids

__all__ = ["Digits", "Split", "batches", "digits", "ids_of", "with_ids"]
