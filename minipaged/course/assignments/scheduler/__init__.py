"""Assignment 4: the scheduler, which chooses the requests to admit, to preempt, and to resume by swap or recompute."""
