"""The course: students swap in their own parts, and learn from what fails. `minipaged grade ASSIGNMENT FILE.py`.

grader/         what a test, a failure and a grade are; looking for counterexamples; results in all their forms
sandbox/        where student code runs, and what travels between it and the grader
assignments/    a folder each: its checks, what is right, what runs in the worker, seeded bugs
page.py         grading in a web page
museum.py       running what is in the bug museum

The handouts, and each test's points, meaning and hint, lie in the repository's own `assignments/`.
"""
