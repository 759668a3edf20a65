"""The service room: executors, engines and their registration in Consul.

Law: may import everything to its left (mesh, intentions, regions), never `drills`.
"""
