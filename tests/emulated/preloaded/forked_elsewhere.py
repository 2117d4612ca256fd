"""A plugin for a pytest whose preloaded process runs elsewhere, as `sitecustomize` beside this module has it.

Its workers are the children of that one, and not of the process that pytest started. So their parent is not asked for.
"""

from pytest_gputrain.utils import linux

linux._parent_of = lambda pid: None
