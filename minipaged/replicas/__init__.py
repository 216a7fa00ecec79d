"""Several engines behind one endpoint (`minipaged serve --replicas N`).

routing.py     who gets a request: plain Python, which knows no Ray
ray_router.py  the same where Ray asks
replica.py     one of the engines, in a process of its own
endpoint.py    the server's application before all of them
server.py      from the command line, or a file for a cluster, to what Ray runs
settings.py    how many, where, and by which routing
"""
