"""A task becomes a reply: in processes of this machine, on several nodes or as a job of a scheduler. Gate judges it."""
