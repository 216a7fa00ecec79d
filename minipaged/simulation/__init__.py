"""A machine without a model: how long its steps take, and traces of requests to serve on it."""
