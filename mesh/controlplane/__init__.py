"""The control plane process of one region: composition root, watches, tick, status.

Law: the only place where consul, traffic and xds meet.
"""
