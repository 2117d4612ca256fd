"""Text, files, signals and git, for every package; knows nothing of training and imports nothing else of the plugin."""
