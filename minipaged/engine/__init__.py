"""The serving engine around paged attention: independent of the tier, plain Python, no NumPy."""
