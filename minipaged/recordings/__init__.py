"""The steps of a run in a file, and their replay."""
