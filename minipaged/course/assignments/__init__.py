"""The assignments, one folder each; its name has underscores.

checks.py       the check of each test, and the `ASSIGNMENT`
session.py      calls the student's part, and compares each answer with a model; or
cases.py        single calls, and their right results
worker.py       our code that runs in the worker with the student's part
mutants.py      seeded bugs

The `__init__.py` files contain no code, because the worker imports them together with `worker.py`.
"""
