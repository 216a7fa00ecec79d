"""Where student code runs: in a process of its own, which answers the grader's calls and decides nothing.

contract.py     what the grader knows of it: limits, handles, what calls return, how a submission may misbehave
process.py      the grader's end of the process
worker.py       the other end
wire.py         what travels between them
"""
