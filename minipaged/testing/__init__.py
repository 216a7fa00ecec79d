"""What tests, fuzzing and the course's grader have in common: a model that checks every read, and work for it.

content_runner.py   a model without weights that checks every read
workloads.py        random workloads on it, and what they must produce
"""
