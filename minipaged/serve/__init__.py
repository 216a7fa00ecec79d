"""An OpenAI-compatible server around the engine (`minipaged serve`).

protocol.py    what may be asked for: the bodies of requests, and the parameters they come to
answers.py     what is answered: the engine's updates as OpenAI's JSON, whole or piece by piece
app.py         the endpoints, their errors, and the end of whoever hangs up
guards.py      what stands before them: the key, the size of a body, how many are being served
server.py      from the command line to a socket: start, signals, the end
metrics.py     what Prometheus reads, by vLLM's names
live/          the page at /, on which the blocks can be watched

The engine's thread is `minipaged/async_llm.py`; all of this runs in the event loop.
"""
