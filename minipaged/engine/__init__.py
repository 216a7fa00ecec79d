"""The serving engine around paged attention: tier-neutral, plain Python, no NumPy."""
