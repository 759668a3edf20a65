"""What every `weir` command shares: exit codes, errors, output, and the root that collects the rooms.

Law: no domain knowledge. Commands are found by entry points, so this package imports no room.
"""
