"""Assignment 5: the beams that continue, the beams that have finished, and the end of the search."""
