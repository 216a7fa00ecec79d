"""A run, reconstructed from its events alone.

state.py      the engine's state after any number of events: queues, block tables, reference counts, tokens
timeline.py   the events of a run, with steps forward and back
teller.py     descriptions of an event and its reason: a line for a live display, or sentences for a page
recorded.py   a run that was written to a file

Everything that shows a run uses this package. It never calls an engine, and it is plain Python.
"""
