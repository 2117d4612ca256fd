"""The worker, a child process that trains one case. Only this package imports torch; it imports no pytest, and nothing
outside imports it."""
