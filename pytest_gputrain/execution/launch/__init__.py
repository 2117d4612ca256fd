"""Starts the processes of a case here, or on several nodes by torchrun's agents, and follows them until they end. Training
is left to worker.
"""
