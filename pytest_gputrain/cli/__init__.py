"""The command gputrain, one file a subcommand. Printing is left to report, judging to gate."""
