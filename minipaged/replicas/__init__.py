"""Several engines behind one endpoint: who gets a request (`routing.py`)."""
