"""Trainers of frameworks, whose own loops run while their steps are measured. One module for each framework."""
