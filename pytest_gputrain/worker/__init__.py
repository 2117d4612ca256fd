"""Trains one case in a child process. Only this package, and `execution.launch` for inline runs, imports torch; it never
imports pytest.
"""
