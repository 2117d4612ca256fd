"""Holds the architecture facts of every model, one JSON file a family; `facts` reads them, and worker.zoo builds the
models.
"""
