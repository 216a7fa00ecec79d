"""Quantizing weights: three methods that choose a matrix's codes, and the pass that gives them its inputs."""
