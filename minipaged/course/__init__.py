"""The course: students swap in their own parts, and learn from what fails."""
