"""Grading: one submission, or a student's own tests, from the file to the score.

assignment.py       what an assignment is: tests, points, invariants; what a grade is
handouts.py         what students begin with: handout, starter, first test
grading.py          one submission through the tests of one assignment, in order
search.py           looking for a counterexample, with Hypothesis
counterexample.py   the scripts and the words in which failures are told
student_tests.py    the students' own tests, graded by the seeded bugs (mutants) that they find
formats.py          results for terminals, Gradescope, PrairieLearn and JUnit
commands.py         what the commands do
autograder.py       the zip that Gradescope wants
"""
