"""Two versions of the code against each other, on one machine in one go: ``gputrain ab``."""
