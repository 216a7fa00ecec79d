"""Quantizes a checkpoint, and measures the model's perplexity before and after."""
