"""The live page: the blocks, queues and figures of an engine while it serves, with a chat box to send requests.

watch.py     follows the engine's events, and sends each page the changes that it has not seen, ten times a second
routes.py    the routes of the page at /, of its files, and of its stream of changes
live.html    the page, with live.css and live.js; it keeps the last changes, so that one can step back
"""
