"""Assignment 8: the order of service when more requests arrive than can be served in time."""
