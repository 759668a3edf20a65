"""The mesh room: Consul access, the snapshot, xDS, traffic, the control plane, the local world.

Law: may import `regions` and `intentions`. Inside, left may import right:
`world > controlplane > traffic > xds | consul > fold > model`; xds never sees Consul, consul and
traffic never see Envoy: they meet in mesh.model.
"""
