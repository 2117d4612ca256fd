"""Text, files, signals and git, for every other package. Nothing here knows of training or imports another package."""
