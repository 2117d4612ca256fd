"""Helps every other package with text, files, signals and git. Nothing here knows of training or imports another package."""
