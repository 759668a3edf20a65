"""The mesh room: Consul access, the snapshot, xDS, traffic, the control plane, the local world.

Law: may import `regions` and `intentions`. Inside: `world > controlplane > xds | traffic | consul > fold > model`;
xds never sees Consul, consul never sees Envoy: they meet in mesh.model.
"""
