"""Find a model by name, read its configuration, tokenizer and weights, and describe its shape."""
