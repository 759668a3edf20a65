"""S8, the hot pool: instances that sleep and wake in milliseconds, verified before they serve again.

Pure: snapshot, lru, place, plan, verify's checks. Shell: hotstart (the verbs of one instance), coldstart,
keeper (who sleeps too long goes cold), describe (what stands in a model's folder), cli. State lives in
Consul: each instance publishes where it stands, and the pool is read from there alone.
"""
