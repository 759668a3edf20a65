"""Consul access: reading, watching, writing with compare-and-set, and one small door per version difference.

Law: knows Consul, never Envoy. Raw JSON ends here: what leaves is frozen values of mesh.model.
"""
