"""Several engines behind one endpoint (`minipaged serve --replicas N`).

routing.py     chooses a replica for each request; plain Python without Ray
ray_router.py  the adapter through which Ray calls our routers
replica.py     one of the engines, in its own process
endpoint.py    the server's application, in front of all replicas
server.py      starts it all, from the command line or from a config file for a cluster
settings.py    the number of replicas, their machines and their routing
"""
