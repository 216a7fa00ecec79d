"""The assignments, a folder each, with underscores in its name.

checks.py       the check of each test, and the `ASSIGNMENT`
session.py      the student's part, call by call, beside what is right; or
cases.py        single calls, and what is right for them
worker.py       what runs in the worker beside the student's part
mutants.py      bugs on purpose

This file and those of the folders are empty of code: the worker loads them on its way to `worker.py`.
"""
