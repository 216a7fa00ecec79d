"""Assignment 4: who is admitted, who is preempted, and how they come back."""
