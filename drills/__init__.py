"""The drill room: scenarios, faults, load, checkers, reports.

Law: the rightmost room. Uses the others through their doors; nobody imports it.
"""
