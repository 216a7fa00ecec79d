"""Assignment 3: online-softmax attention over blocks, in NumPy."""
