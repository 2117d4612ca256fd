"""Applies the differences that the recipes of own loops show, for the tests that run them."""


def patched(program, diff):
    """Apply a diff, whose hunks are found by their lines."""
    for hunk in diff.split("@@\n"):
        lines = [line or " " for line in hunk.splitlines()]
        before, after = ("".join(f"{line[1:]}\n" for line in lines if line[0] in f" {sign}") for sign in "-+")
        assert program.count(before) == 1, before
        program = program.replace(before, after)
    return program
