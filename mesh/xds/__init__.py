"""xDS: builders that turn a MeshSnapshot into Envoy resources, the ADS protocol core, and the gRPC shell.

Law: never imports mesh.consul or mesh.traffic. Everything but server.py is pure: protobuf messages and
mesh.model only.
"""
