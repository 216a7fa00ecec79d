"""Assignment 6: paged attention of single new tokens as a Triton kernel."""
