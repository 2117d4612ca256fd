"""Makes the HTML report: one file with everything in it, which loads nothing from a network."""
