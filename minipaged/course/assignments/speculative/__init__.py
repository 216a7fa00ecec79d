"""Assignment 12: drafted tokens are verified, and refused ones are rolled back."""
