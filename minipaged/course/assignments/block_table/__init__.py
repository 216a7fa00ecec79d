"""Assignment 2: block tables and slot mapping."""
