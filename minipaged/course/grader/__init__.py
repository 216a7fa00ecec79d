"""Grading: one submission, or a student's own tests, from the file to the score.

assignment.py       what an assignment is: tests, points, invariants; what a grade is
handouts.py         what students begin with: handout, starter, first test
points.py           what is data of the tests: points, meanings, hints
grading.py          one submission through the tests of one assignment, in order
search.py           looking for a counterexample, with Hypothesis
session.py          what all sessions with a student's part have in common: asking, and telling how it failed
counterexample.py   the scripts and the words in which failures are told
serving.py          the real engine and SmolLM2 with a student's part in them
mutants.py          bugs on purpose
student_tests.py    the students' own tests, graded by the bugs that they find; test_runner.py: the worker's end of it
formats.py          results for terminals, Gradescope, PrairieLearn and JUnit
commands.py         what the commands do
autograder.py       the zip that Gradescope wants
"""
