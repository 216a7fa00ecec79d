"""Assignment 9: the prefix cache."""
