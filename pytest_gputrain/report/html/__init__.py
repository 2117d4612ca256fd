"""The HTML report: one file with everything in it, which asks nothing of any network."""
