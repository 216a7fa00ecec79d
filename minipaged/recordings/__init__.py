"""Files that record the steps of a run, and the replay of such files."""
