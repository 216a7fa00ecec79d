"""The course: students write parts of the engine, and the grader shows which tests fail and why.

The command is `minipaged grade ASSIGNMENT FILE.py`.

grader/         tests, failures and grades; the search for counterexamples; the result formats
sandbox/        the place where student code runs, and its messages to and from the grader
assignments/    one folder per assignment: its checks, expected results, worker code, seeded bugs
page.py         grading in a web page
museum.py       runs the exhibits of the bug museum

The handouts, and each test's points, meaning and hint, are in the repository's `assignments/`.
"""
