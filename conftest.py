"""Only this file may name plugins for the test session: pytester runs pytest inside of the plugin's own tests."""

pytest_plugins = ["pytester"]
