"""Assignment 10: which block leaves a floor of the cache."""
