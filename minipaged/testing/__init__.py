"""What tests, fuzzing and the course's grader have in common: a model that checks every read, and work for it.

content_runner.py   a runner without weights that checks every read
fake_model.py       what it chooses tokens by, and
numpy_model.py      the same with arrays, or
plain_model.py      in plain Python, where there is no NumPy
workloads.py        random workloads on it, and what they must produce
"""
