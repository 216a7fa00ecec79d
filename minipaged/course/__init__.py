"""The course: students swap in their own parts, and learn from what fails. `minipaged grade ASSIGNMENT FILE.py`.

assignment.py       what an assignment is: tests, points, invariants; what a grade is
handouts.py         what students begin with: handout, starter, first test
grading.py          one submission through the tests of one assignment, in order
isolation.py        the grader's end of the process in which student code runs
worker.py, wire.py  the other end, and what travels between them
counterexample.py   the scripts and the words in which failures are told
search.py           looking for a counterexample, with Hypothesis
block_allocator.py  assignment 1; each assignment is a file like it
block_table.py      assignment 2, with table_session.py (what its properties are made of) and table_worker.py
paged_attention.py  assignment 3, with attention_cases.py (inputs, what is right) and attention_worker.py
scheduler.py        assignment 4, with scheduler_scenes.py (what is asked about), scheduler_session.py (what is right);
                    engine/policy.py is what a student would hand in
beam_search.py      assignment 5
triton_decode.py    assignment 6, with decode_cases.py (inputs, what is right) and decode_worker.py (tensors, a clock)
quantize.py         assignment 7, with quantize_cases.py (inputs, what is right) and quantize_worker.py (whole matrices)
student_tests.py    the students' own tests, graded by the seeded bugs (mutants) that they find
formats.py          results for terminals, Gradescope, PrairieLearn and JUnit
autograder.py       the zip that Gradescope wants
content_runner.py   a model without weights that checks every read
workloads.py        random workloads on it, and what they must produce
museum.py           the same with a part exchanged for one of the bug museum
"""
