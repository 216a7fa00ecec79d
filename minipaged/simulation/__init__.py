"""A simulated machine, which only says how long steps take, and traces of requests to serve on it."""
