"""Assignment 5: which beams go on, which have finished, when the search is over."""
