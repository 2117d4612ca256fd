"""What people and machines get to read: the terminal's table and live line, the JSON document."""
