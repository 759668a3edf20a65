# The Consul agents' own token: put the node into the catalog and sync what services registered with their own tokens.

node_prefix "" { policy = "write" }

agent_prefix "" { policy = "read" }

service_prefix "" { policy = "read" }
