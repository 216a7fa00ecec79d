"""A run, followed from its events alone: one fold of them into state, and one teller of what happened.

state.py      queues, block tables, reference counts, tokens: what the engine had after any number of events
timeline.py   the events of a run, and moving through them, forwards and back
teller.py     what an event did and why: as a line for who watches, as sentences for who reads
recorded.py   a run that was written to a file

Whoever shows a run takes it from here. Nothing asks an engine for anything, and all of it is plain Python.
"""
