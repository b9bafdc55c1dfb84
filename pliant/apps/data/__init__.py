"""Data for the command and the benchmarks: image folders and packed sets, the digits inside scikit-learn, seeded batches."""

from pliant.apps.data.digits import Digits, Split, batches, digits
from pliant.runtime.sample_ids import ids_of, with_ids

__all__ = ["Digits", "Split", "batches", "digits", "ids_of", "with_ids"]
