"""The sandbox that runs student code, in a separate process or in the page that grades it.

The sandbox only answers the grader's calls. All decisions are the grader's.

contract.py       the grader's end: calls, limits, handles, outcomes, and the ways in which a submission can misbehave
answering.py      the student's end, which holds the student's objects
process.py        a worker process, seen from the grader
worker.py         the code of the worker process
page_process.py   both ends in one interpreter
wire.py           the message format between them
"""
