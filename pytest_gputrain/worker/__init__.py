"""The child side: the only home of torch. Nothing here imports pytest, and nothing outside imports this package."""
