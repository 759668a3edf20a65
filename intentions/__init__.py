"""The intention room: who may call whom, as data, and how that reaches Consul.

Law: may import `regions`, nothing to its right. Default deny: what no row allows is refused.
"""
