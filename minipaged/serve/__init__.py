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
metrics.py      the metrics for Prometheus, with vLLM's names
live/           the page at /, which shows the blocks live

The engine's thread is in `minipaged/async_llm.py`. All of this runs in the event loop.
"""
