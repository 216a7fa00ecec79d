"""A checkpoint is quantized here, and the model's perplexity before and after is measured."""
