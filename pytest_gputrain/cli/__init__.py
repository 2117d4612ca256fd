"""Implements the command gputrain; most subcommands have a file. Printing is left to report, judging to gate."""
