"""The live page: the blocks, queues and figures of an engine while it serves, and a chat box to make it serve.

watch.py     the engine's events, folded into what is so now; each page is sent what it has not seen, ten times a second
routes.py    the page at /, its files, and its stream of changes
live.html    the page, with live.css and live.js: it keeps the last changes, so that one can step back
"""
