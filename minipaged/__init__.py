"""minipaged: PagedAttention and the serving system around it, written twice."""
