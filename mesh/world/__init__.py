"""The local world: real Consul, real Envoys, executors, one supervisor per region, on loopback.

Law: starts and stops processes and tells where they are; what they decide is theirs.
"""
