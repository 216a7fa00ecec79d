"""Assignment 1: reference counts and copy-on-write."""
