"""Faults: how a drill breaks the world and heals it again.

Law: one protocol (base), one table (table); the world is reached through drills.doors alone.
"""
