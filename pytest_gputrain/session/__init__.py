"""What one pytest process measures, in which order and against what. Execution runs the tasks, gate judges the replies."""
