"""Turns a task into a reply: in processes of this machine, on several nodes or as a job of a scheduler. Judging the reply is
left to gate.
"""
