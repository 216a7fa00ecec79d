"""An OpenAI-compatible server around the engine (`minipaged serve`).

server.py       starts the server, handles signals, shuts it down
settings.py     the settings of a server
connections.py  accepts connections, and bounds their number
app.py          the endpoints, their errors, and the abort of a request whose client hangs up
guards.py       middleware before the endpoints: the API key, the size of a body, the count of requests
bodies.py       decodes the bodies of requests
protocol.py     the fields of the bodies, and the parameters made from them
serving.py      a served model: turns a body into requests for the engine
answers.py      turns the engine's updates into OpenAI's JSON, whole or in chunks
tools.py        the tools of a request, and the calls in its answer
call_parsers.py reads calls in the text that a model writes, as it grows
response_bodies.py, responses.py
                POST /v1/responses: its body, and its answer as items and events
metrics.py      the metrics for Prometheus, with vLLM's names
live/           the page at /, which shows the blocks live

The engine's thread is in `minipaged/async_llm.py`. All of this runs in the event loop.
"""
