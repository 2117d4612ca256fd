"""For all tests."""

import signal

# What a shell runs in the background ignores Ctrl-C, and so does all that it starts; tests send it to processes of theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
