"""Engines behind the Engine protocol, each in a file of its own, none imported unless used."""
