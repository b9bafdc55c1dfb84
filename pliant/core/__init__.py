"""The data types and the errors. No torch."""
