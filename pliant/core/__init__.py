"""The nouns and the errors. No torch."""
