"""Grading: one submission, or a student's own tests, from the file to the score.

assignment.py       the classes for assignments, tests, failures and grades
handouts.py         the files that students start from: handout, starter, first test
points.py           reads each test's points, meaning and hint from tests.toml
grading.py          runs the tests of one assignment on one submission, in order
search.py           searches for a counterexample with Hypothesis
session.py          the base class of sessions: calls the student's part, and reports its failures
counterexample.py   the scripts and messages of failures
serving.py          runs the real engine and SmolLM2 with a student's part in them
mutants.py          seeded bugs
student_tests.py    grades students' own tests by the bugs that they find; test_runner.py runs them in the worker
formats.py          results for terminals, Gradescope, PrairieLearn and JUnit
commands.py         the code behind the commands
autograder.py       the zip for Gradescope
"""
