"""The fast tier on a GPU: is it right, and how close is it to what the card can do? See `__main__.py`."""
