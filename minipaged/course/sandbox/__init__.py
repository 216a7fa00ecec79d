"""Where student code runs: in a process of its own, or in the page that grades it. It answers the grader's calls, and
decides nothing.

contract.py       the grader's end: calls, limits, handles, what calls return, how a submission may misbehave
answering.py      the other end: where the student's objects live
process.py        a process, as the grader sees it
worker.py         a process, from within
page_process.py   both ends in one interpreter
wire.py           what travels between them
"""
