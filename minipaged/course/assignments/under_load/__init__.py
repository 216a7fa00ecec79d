"""Assignment 8: whose turn it is when more requests come than can be served in time."""
