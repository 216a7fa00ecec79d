"""The common base of tests, fuzzing and the course's grader: a model that checks every read, and workloads for it.

content_runner.py   a runner without weights that checks every read
fake_model.py       the model by which it chooses tokens, implemented
numpy_model.py      with arrays, or
plain_model.py      in plain Python, where there is no NumPy
workloads.py        random workloads on it, and the outputs that they must produce
"""
